"""Networks from specs, with torchvision's and timm's own constructors as oracles."""

import pytest
import torch
from torchvision import models

from cdc_plugin.checkpoints.weights import load_strictly
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build, skeleton, timm_input

SMALL = {"family": "resnet", "block": "basic", "depths": [1, 2, 1, 1], "widths": [8, 12, 16, 20]}
SMALL["stem"] = {"kernel": 3, "stride": 1, "padding": 1, "pool": True}
OFFICIAL = {
    "resnet18": {"block": "basic", "depths": [2, 2, 2, 2]},
    "resnext50_32x4d": {"block": "bottleneck", "depths": [3, 4, 6, 3], "groups": 32, "width_per_group": 4},
    "wide_resnet50_2": {"block": "bottleneck", "depths": [3, 4, 6, 3], "width_per_group": 128},
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_spec_of_an_official_resnet_has_its_names_and_shapes(name):
    ours = skeleton({"family": "resnet", "widths": [64, 128, 256, 512], **OFFICIAL[name]}).state_dict()
    with torch.device("meta"):
        theirs = models.get_model(name).state_dict()
    shapes = {key: value.shape for key, value in theirs.items() if not key.startswith("fc.")}
    assert {key: value.shape for key, value in ours.items()} == shapes


def test_resnet18_from_its_spec_computes_what_torchvision_computes():
    theirs = models.resnet18().eval()
    ours, features = build({"family": "resnet", "widths": [64, 128, 256, 512], **OFFICIAL["resnet18"]})
    load_strictly(ours, theirs.state_dict(), "test")
    theirs.fc = torch.nn.Identity()
    image = torch.rand(1, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    assert features == 512
    assert torch.equal(ours.eval()(image), theirs(image))


@pytest.mark.parametrize(
    ("stem", "side"),
    [
        ({"padding": 1, "pool": True}, 16),
        ({"padding": 1, "pool": False}, 32),
        ({"padding": 2, "pool": False}, 34),
        ({"padding": 1, "pool": False, "stride": 2}, 16),
    ],
)
def test_stem_decides_the_size_that_the_first_stage_sees(stem, side):
    network, features = build(SMALL | {"stem": SMALL["stem"] | stem})
    sizes = []
    network.layer1.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape))
    assert network.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, features) == (1, 20)
    assert sizes == [(1, 8, side, side)]


@pytest.mark.parametrize(
    ("name", "features"),
    [("mobilenet_v2", 1280), ("mobilenet_v3_small", 1024), ("regnet_x_400mf", 400), ("densenet121", 1024)],
)
def test_torchvision_classifier_gives_way_to_its_features(name, features):
    network, found = build({"family": "torchvision", "name": name})
    assert found == features
    assert network.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, features)


@pytest.mark.parametrize("name", ["test_resnet", "mobilenetv3_small_050", "test_vit"])
def test_timm_features_are_as_many_as_stated(name):
    network, features = build({"family": "timm", "name": name, "kwargs": {}})
    assert network.eval()(torch.zeros(1, 3, timm_input(name)[2], timm_input(name)[2])).shape == (1, features)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "family, one of resnet, .*timm, torchvision, "),
        ({"family": "resnet", "block": "basic"}, "needs 'depths'"),
        (SMALL | {"block": "odd"}, "'basic', 'bottleneck'"),
        (SMALL | {"widths": [8, 8]}, "4 depths and 4 widths"),
        (SMALL | {"stem": {"kernal": 3}}, "kernal"),
        (SMALL | {"stem": {"stride": 0}}, "stride.*found 0"),
        (SMALL | {"stem": 5}, "by name, found 5"),
        (SMALL | {"depths": [2, 2, 2, 10**8]}, "depths"),
        (SMALL | {"depths": None}, "cannot build"),
        (SMALL | {"widths": "abcd"}, "widths"),
        (SMALL | {"block": ["basic"] * 9}, "block"),
        (SMALL | {"groups": 3}, "cannot build"),
        ({"family": ["resnet"]}, "family"),
        ({"family": "timm", "name": "resnet1"}, "close: resnet"),
        ({"family": "timm", "name": "test_resnet", "kwargs": {"colour": 1}}, "no argument 'colour'"),
        ({"family": "timm", "name": "test_resnet", "kwargs": {"checkpoint_path": "x.pth"}}, "checkpoint_path"),
        ({"family": "timm", "name": "test_resnet", "kwargs": {"pretrained": True}}, "pretrained"),
        ({"family": "timm", "name": "test_vit", "kwargs": {"depth": 100_000_000}}, "depth"),
        ({"family": "timm", "name": "test_vit", "kwargs": {"act_layer": "os.system"}}, "act_layer"),
        ({"family": "timm", "name": "test_vit", "kwargs": {"mlp_ratio": float("nan")}}, "mlp_ratio"),
        ({"family": "torchvision", "name": "resnet19"}, "close: resnet"),
        ({"family": "torchvision", "name": "squeezenet1_0"}, "no linear classifier"),
    ],
)
def test_bad_spec_is_refused_in_words(spec, words):
    with pytest.raises(UserError, match=words):
        build(spec)
