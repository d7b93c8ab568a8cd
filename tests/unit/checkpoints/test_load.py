"""From a file to a backbone: formats found by content, by name, and refused."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torchvision import models

from cdc_plugin.checkpoints import load_backbone, load_checkpoint
from cdc_plugin.checkpoints.formats import formats
from cdc_plugin.checkpoints.formats.base import CheckpointFormat, Loaded, Origin
from cdc_plugin.checkpoints.formats.native import read_native
from cdc_plugin.checkpoints.formats.torchvision import resnet_spec
from cdc_plugin.checkpoints.load import find_format
from cdc_plugin.checkpoints.read import read_checkpoint
from cdc_plugin.checkpoints.weights import compare
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build, skeleton
from cdc_plugin.models.backbone import Backbone
from tests.helpers.checkpoint_builders.libraries import created
from tests.helpers.checkpoint_builders.networks import LARGE_STEM, resnet

SPEC = {"family": "resnet", "block": "basic", "depths": [1, 1, 1, 1], "widths": [4, 6, 8, 10]}
SPEC |= {"stem": {"kernel": 3, "stride": 1, "padding": 1, "pool": False}}
IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def saved(network, path):
    torch.save(network.state_dict(), path)
    return path


def features(network, images=IMAGES):
    with torch.no_grad():
        return network.eval()(images)


def result_folder(folder, **changes):
    network, size = build(SPEC)
    record = {"spec": SPEC, "feature_dim": size, "mean": [0.1] * 3, "std": [0.2] * 3, "input_size": 28}
    description = {"format": "cdc_plugin", "version": 1, "backbone": record, "heads": {}} | changes
    tensors = {f"backbone.module.{key}": value for key, value in network.state_dict().items()}
    heads = {"clustering_head.w": torch.ones(1), "calibration_head.w": torch.ones(1)}
    save_file(tensors | heads, folder / "model.safetensors")
    (folder / "model.json").write_text(json.dumps(description))
    return network


def test_bare_resnet_is_rebuilt_from_its_shapes(tmp_path):
    network, size = build(SPEC)
    backbone = load_backbone(saved(network, tmp_path / "a.pt"))
    assert backbone.spec == SPEC
    assert (backbone.feature_dim, backbone.input_size) == (size, 32)
    assert torch.equal(features(backbone), features(network))
    assert {"mean", "std", "input_size", "stem.pool", "stem.padding", "stem.stride"} == set(backbone.inferred)


@pytest.mark.parametrize(
    ("name", "groups", "width"),
    [("resnet50", 1, 64), ("resnext50_32x4d", 32, 4), ("resnext101_64x4d", 64, 4), ("wide_resnet50_2", 1, 128)],
)
def test_groups_and_widths_are_read_from_the_shapes(name, groups, width):
    with torch.device("meta"):
        state = models.get_model(name).state_dict()
    found, open_facts = resnet_spec(state)
    assert (found["groups"], found["width_per_group"], open_facts) == (groups, width, ())
    assert not compare(skeleton(found), state)


def test_timm_model_is_named_by_its_file_or_by_the_user(tmp_path):
    network = timm.create_model("test_resnet", num_classes=7)
    by_file = load_backbone(saved(network, tmp_path / "my-test_resnet_ep5.pth"))
    by_user = load_backbone(saved(network, tmp_path / "a.pth"), arch="test_resnet")
    network.reset_classifier(0)
    for backbone in (by_file, by_user):
        assert torch.equal(features(backbone), features(network))


def test_vision_transformer_is_built_for_the_image_size_of_its_positions(tmp_path):
    network = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=0)
    path = saved(network, tmp_path / "a.pth")
    with pytest.raises(UserError, match="does not fit"):  # depth 1 is no model of timm's
        load_backbone(path, arch="vit_tiny_patch16_224")
    whole = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=0)
    backbone = load_backbone(saved(whole, path), arch="vit_tiny_patch16_224")
    assert backbone.input_size == 64
    images = torch.nn.functional.interpolate(IMAGES, size=64)
    assert torch.equal(features(backbone, images), features(whole, images))


def test_twins_in_names_and_shapes_that_compute_otherwise_are_not_guessed(tmp_path):
    network = timm.create_model("tf_efficientnet_lite0")
    # Fresh networks hide the difference in padding behind features close to 0.
    state = {k: v + 0.5 if k.endswith("bias") else v for k, v in network.state_dict().items()}
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"efficientnet_lite0, tf_efficientnet_lite0.*arch="):
        load_backbone(tmp_path / "a.pth")


def test_architecture_that_does_not_fit_is_refused(tmp_path):
    path = saved(models.resnet18(), tmp_path / "a.pth")
    with pytest.raises(UserError, match="basic blocks"):
        load_backbone(path, arch="resnet50")
    with pytest.raises(UserError, match="rsnet18"):
        load_backbone(path, arch="rsnet18")
    with pytest.raises(UserError, match="did you mean 'torchvision'"):
        load_backbone(path, format="torchvison")


def test_unknown_network_and_one_for_grey_images_are_refused(tmp_path):
    grey = build(SPEC)[0].state_dict() | {"conv1.weight": torch.ones(4, 1, 3, 3)}
    for state, words in (({"a.weight": torch.ones(2)}, "arch='NAME'"), (grey, "conv1 with 1 channels")):
        torch.save(state, tmp_path / "a.pth")
        with pytest.raises(UserError, match=words):
            load_backbone(tmp_path / "a.pth")


def test_result_folder_gives_its_backbone_and_states_its_input(tmp_path):
    network = result_folder(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        backbone = load_backbone(path)
        assert torch.equal(features(backbone), features(network))
        assert backbone.mean.tolist() == pytest.approx([0.1] * 3)
        assert (backbone.input_size, backbone.inferred) == (28, ())
    description, tensors = read_native(tmp_path)
    assert description["version"] == 1
    assert "clustering_head.w" in tensors


FACTS = {"spec": SPEC, "feature_dim": 16, "mean": [0.5] * 3, "std": [0.5] * 3, "input_size": 32}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "upgrade"),
        ({"format": "other"}, "not a result of cdc-refine"),
        ({"backbone": {"spec": SPEC}}, "feature_dim, mean, std, input_size"),
        ({"backbone": FACTS | {"spec": None}}, "user's own class"),
        *(
            ({"backbone": FACTS | {"mean": bad}}, "mean takes 3 numbers")
            for bad in (None, "abc", [[1], 2, 3], [1e9] * 3)
        ),
        *(({"backbone": FACTS | {"input_size": bad}}, "input_size") for bad in ("32", -1, 3.5, 10**9)),
        ({"backbone": FACTS | {"feature_dim": 10**12}}, "feature_dim"),
        ({"backbone": FACTS | {"inferred": 5}}, "inferred"),
        *(({"backbone": bad}, "does not state the backbone's spec") for bad in (7, [], "spec mean std input_size")),
    ],
)
def test_result_folder_with_a_strange_description_is_refused(tmp_path, changes, words):
    result_folder(tmp_path, **changes)
    with pytest.raises(UserError, match=words):
        load_backbone(tmp_path)


@pytest.mark.parametrize("provenance", [5, [1], {"tool": ["x"], "epochs": {}}, None])
def test_what_a_model_was_made_from_is_of_no_consequence(tmp_path, provenance):
    result_folder(tmp_path, provenance=provenance)
    assert load_checkpoint(tmp_path).origin.epoch is None


def test_unfinished_result_folder_is_told_as_such(tmp_path):
    for lost in ("model.json", "model.safetensors"):
        result_folder(tmp_path)
        (tmp_path / lost).unlink()
        with pytest.raises(UserError, match=f"no {lost}; is the run unfinished"):
            load_backbone(tmp_path)
        if Path("/proc/self/status").exists():  # as /proc/kmsg: a file that states no size, and may never end
            (tmp_path / lost).symlink_to("/proc/self/status")
            with pytest.raises(UserError, match=f"no {lost}; is the run unfinished"):
                read_native(tmp_path)
            (tmp_path / lost).unlink()
    with pytest.raises(UserError, match="there is no result folder"):
        read_native(tmp_path / "nowhere")


def test_reading_takes_no_random_numbers_of_the_caller(tmp_path):
    path, state = saved(build(SPEC)[0], tmp_path / "a.pt"), torch.get_rng_state()
    load_backbone(path)
    assert torch.equal(torch.get_rng_state(), state)


def test_format_of_another_package_is_asked_first(tmp_path, monkeypatch):
    network, size = build(SPEC)
    path = saved(network, tmp_path / "a.pt")
    made = Backbone(network, size, [0.5] * 3, [0.5] * 3, 32)
    plugin = CheckpointFormat(lambda _: True, lambda _checkpoint, _wanted: Loaded(made, Origin("plug-in")))
    monkeypatch.setitem(formats.entries, "plug-in", plugin)
    assert find_format(read_checkpoint(path)) == "plug-in"
    assert load_backbone(path) is made
    assert load_backbone(path, format="torchvision") is not made


@pytest.mark.parametrize("names", [("state_dict", "state_dict_ema"), ("student", "teacher")])
def test_branch_of_bare_weights_is_the_one_that_is_asked_for(tmp_path, names):
    networks = {branch: resnet(LARGE_STEM, 64, seed=seed) for seed, branch in enumerate(("online", "momentum"))}
    sets = {name: network.state_dict() for name, network in zip(names, networks.values(), strict=True)}
    torch.save(sets, tmp_path / "a.pth")
    for branch, network in networks.items():
        found = load_backbone(tmp_path / "a.pth", branch=branch)
        assert torch.equal(found.module.conv1.weight, network.conv1.weight)
    torch.save(sets["state_dict" if "state_dict" in sets else "student"], tmp_path / "b.pth")
    with pytest.raises(UserError, match="no moving average"):
        load_backbone(tmp_path / "b.pth", branch="momentum")


def test_weights_that_are_there_with_and_without_a_wrapper_are_refused(tmp_path):
    state = created("test_vit").state_dict()
    torch.save(state | {f"module.{key}": value + 1 for key, value in state.items()}, tmp_path / "a.pth")
    with pytest.raises(UserError, match="twice"):
        load_backbone(tmp_path / "a.pth")
