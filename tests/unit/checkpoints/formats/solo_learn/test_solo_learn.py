"""Files as solo-learn writes them, against networks that are put together here as solo-learn does."""

import json
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision import models

from cdc_plugin.checkpoints import Wanted
from cdc_plugin.checkpoints.formats.solo_learn import load_solo_learn
from cdc_plugin.checkpoints.load import find_format
from cdc_plugin.checkpoints.read import Checkpoint
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build
from tests.helpers.checkpoint_builders.networks import SoloWideResNet, with_noise
from tests.helpers.checkpoint_builders.self_supervised import cifar_resnet
from tests.helpers.checkpoint_builders.self_supervised import solo_args as args_for

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
VIT = {"patch_size": 8, "img_size": 32}
CIFAR_STEM = {"kernel": 3, "stride": 1, "padding": 2, "pool": False}


def vit(heads, zero_class_position=False, pool="token"):
    norm = partial(nn.LayerNorm, eps=1e-6)
    sizes = {"embed_dim": 192, "depth": 12, "num_heads": heads, "num_classes": 0, **VIT}
    network = with_noise(VisionTransformer(norm_layer=norm, global_pool=pool, **sizes))
    if zero_class_position:
        network.pos_embed.data[:, 0] = 0
    return network


def checkpoint(network, args=None, prefix="backbone.", **companions):
    state = {f"{prefix}{key}": value for key, value in network.state_dict().items()}
    state |= {"classifier.weight": torch.zeros(10, 4), "classifier.bias": torch.zeros(10)}
    state |= {key.replace("__", "."): value for key, value in companions.items()}
    payload = {"epoch": 7, "pytorch-lightning_version": "2.1.2", "state_dict": state}
    return Checkpoint(Path("x-ep=7.ckpt"), payload, {} if args is None else {"args.json": args}, state)


def loaded(given, **wanted):
    assert find_format(given) == "solo-learn"
    return load_solo_learn(given, Wanted(**wanted))


def features(network, images=IMAGES):
    with torch.no_grad():
        return network.eval()(images)


def assert_same(network, found, images=IMAGES):
    torch.testing.assert_close(features(found.backbone, images), features(network, images), rtol=1e-4, atol=1e-4)


def assert_rebuilt_from_json(found):
    again, size = build(json.loads(json.dumps(found.backbone.spec)))
    again.load_state_dict(found.backbone.module.state_dict())
    assert size == found.backbone.feature_dim
    assert torch.equal(features(again), features(found.backbone))


@pytest.fixture(scope="module")
def resnet():
    return cifar_resnet(2)


def test_resnet_of_a_cifar_run_has_padding_two_and_the_statistics_of_the_run(resnet):
    found = loaded(checkpoint(resnet, args_for("resnet18", dataset="cifar100")))
    assert_same(resnet, found)
    assert_rebuilt_from_json(found)
    assert found.backbone.spec["stem"] == CIFAR_STEM
    assert found.backbone.std.tolist() == pytest.approx([0.2673, 0.2564, 0.2762])
    assert (found.backbone.inferred, found.backbone.input_size, found.origin.epoch) == ((), 32, 7)
    assert "byol" in found.origin.writer


def test_version_of_cdc_has_padding_one_and_a_resnet_34_of_its_own():
    network = cifar_resnet(1, make=models.resnet34)
    bare = loaded(checkpoint(network))
    assert_same(network, bare)
    assert "stem.padding" in bare.backbone.inferred


def test_small_stem_is_left_to_the_images_without_arguments_or_on_data_of_ones_own(resnet):
    found = loaded(checkpoint(resnet))
    assert_same(resnet, found)
    assert set(found.backbone.inferred) == {"stem.padding", "mean", "std", "input_size"}
    found = loaded(checkpoint(resnet, args_for("resnet18", dataset="custom")))
    assert set(found.backbone.inferred) == {"stem.padding", "stem.pool", "stem.stride"}


def test_resnet_for_large_images_keeps_its_stem():
    network = models.resnet18()
    network.fc = nn.Identity()
    found = loaded(checkpoint(with_noise(network), args_for("resnet18", dataset="imagenet100", size=96)))
    assert_same(network, found, torch.rand(2, 3, 64, 64))
    assert (found.backbone.inferred, found.backbone.input_size) == ((), 96)


def test_moving_average_that_is_not_there_is_refused(resnet):
    with pytest.raises(UserError, match="no moving average"):
        loaded(checkpoint(resnet, args_for("resnet18")), branch="momentum")


@pytest.mark.parametrize(("method", "heads"), [("simclr", 3), ("dino", 3), ("mae", 12), ("mocov3", 12)])
def test_vits_of_two_methods_have_other_heads_at_the_same_shapes(method, heads):
    network = vit(heads)
    found = loaded(checkpoint(network, args_for("vit_tiny", method, **VIT, drop_path_rate=0.1)))
    assert_same(network, found)
    assert (found.backbone.inferred, found.backbone.input_size) == ((), 32)


@pytest.mark.parametrize(("zero", "heads"), [(True, 12), (False, 3)])
@pytest.mark.parametrize("args", [None, {"dataset": "cifar10", "method": "mocov3", "backbone_args": VIT}])
def test_fixed_position_embeddings_tell_the_heads_where_the_arguments_do_not(zero, heads, args):
    network = vit(heads, zero_class_position=zero)
    assert_same(network, loaded(checkpoint(network, args)))


def test_decoder_beside_a_vit_or_the_method_of_a_linear_evaluation_tells_its_heads():
    network = vit(12)
    args = args_for("vit_tiny", **VIT) | {"pretrained_feature_extractor": "x.ckpt", "pretrain_method": "mae"}
    for given in (checkpoint(network, decoder__mask_token=torch.zeros(1, 1, 8)), checkpoint(network, args)):
        assert_same(network, loaded(given))


@pytest.mark.parametrize("stated", [True, False])
def test_pooled_vit_of_mae_norms_twice(stated):
    network = vit(12, zero_class_position=True, pool="avg")
    network.norm = with_noise(nn.LayerNorm(192, eps=1e-6))
    found = loaded(checkpoint(network, args_for("vit_tiny", "mae", **VIT, global_pool="avg") if stated else None))
    assert_same(network, found)
    assert_rebuilt_from_json(found)


@pytest.mark.parametrize("stated", [True, False])
def test_swin_with_the_names_of_an_older_timm_gives_the_same_features(stated):
    network = with_noise(timm.create_model("swin_tiny_patch4_window7_224", num_classes=0, img_size=32, window_size=4))
    old = {}
    for key, value in network.state_dict().items():
        stage = key.split(".")[1]
        before = f"layers.{int(stage) - 1}.down" if ".downsample." in key else ""
        old[key.replace(f"layers.{stage}.down", before)] = value
    old["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    old["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16)
    shell = nn.Module()
    shell.state_dict = lambda: old
    args = args_for("swin_tiny", img_size=32, window_size=4) if stated else None
    found = loaded(checkpoint(shell, args))
    assert_same(network, found)
    assert found.backbone.input_size == 32


@pytest.mark.parametrize(
    ("make", "size"), [(partial(timm.create_model, "convnext_tiny", num_classes=0), 224), (SoloWideResNet, 32)]
)
def test_convnext_and_wide_resnet_are_told_by_their_shapes_too(make, size):
    network = with_noise(make())
    found = loaded(checkpoint(network))
    assert_same(network, found)
    assert_rebuilt_from_json(found)
    assert found.backbone.input_size == size
    assert {"mean", "std", "input_size"} == set(found.backbone.inferred)


def poolformer_reference(state, images):
    def normed(name, maps):
        return F.group_norm(maps, 1, state[f"{name}.weight"], state[f"{name}.bias"])

    def convolved(name, maps, *shape):
        return F.conv2d(maps, state[f"{name}.weight"], state[f"{name}.bias"], *shape)

    maps = convolved("patch_embed.proj", images, 4, 2)
    for stage, depth in enumerate([2, 2, 6, 2]):
        if stage:
            maps = convolved(f"network.{2 * stage - 1}.proj", maps, 2, 1)
        for block in range(depth):
            name = f"network.{2 * stage}.{block}"
            still = normed(f"{name}.norm1", maps)
            mixed = F.avg_pool2d(still, 3, 1, 1, count_include_pad=False) - still
            maps = maps + state[f"{name}.layer_scale_1"].view(-1, 1, 1) * mixed
            hidden = F.gelu(convolved(f"{name}.mlp.fc1", normed(f"{name}.norm2", maps)))
            maps = maps + state[f"{name}.layer_scale_2"].view(-1, 1, 1) * convolved(f"{name}.mlp.fc2", hidden)
    return normed("norm", maps).mean(dim=(2, 3))


@pytest.mark.parametrize("args", [None, args_for("poolformer_s12", dataset="imagenet")])
def test_poolformer_is_that_of_solo_learn(args):
    kwargs = {"depths": [2, 2, 6, 2], "widths": [64, 128, 320, 512], "pool": 3}
    network, _ = build({"family": "poolformer", "kwargs": kwargs})
    found = loaded(checkpoint(with_noise(network), args))
    assert_rebuilt_from_json(found)
    expected = poolformer_reference(network.state_dict(), IMAGES)
    torch.testing.assert_close(features(found.backbone), expected, rtol=1e-4, atol=1e-4)


def test_files_with_other_companions_or_without_an_online_classifier_are_left_to_others(resnet):
    for companion in ("projection_head.layers.0.weight", "online_classifier.weight", "contrastive_head.0.weight"):
        assert find_format(checkpoint(resnet, **{companion: torch.zeros(4, 4)})) != "solo-learn"
    given = checkpoint(resnet)
    for key in ("classifier.weight", "classifier.bias"):
        del given.state[key]
    assert find_format(given) != "solo-learn"


@pytest.mark.parametrize(
    ("make", "name", "kwargs", "message"),
    [
        (None, "resnet50", {}, "does not fit"),
        (None, "vit_tiny", {}, "says vit_tiny, found the weights of a resnet"),
        (None, "resnet18", {"replace_stride_with_dilation": [False, True, True]}, "cannot be rebuilt"),
        (models.resnet18, "resnet18", {}, "3x3"),
        (partial(vit, 3), "vit_tiny", {"patch_size": 8, "img_size": 64}, "pos_embed"),
        (partial(vit, 3), "vit_tiny", {"patch_size": 8, "img_size": [32, 64]}, "square"),
    ],
)
def test_arguments_that_do_not_go_with_the_weights_are_refused(resnet, make, name, kwargs, message):
    with pytest.raises(UserError, match=message):
        loaded(checkpoint(make() if make else resnet, args_for(name, **kwargs)))


@pytest.mark.parametrize("lost", ["backbone.layer1.1.", "backbone.layer4.", "backbone.conv1", "backbone.bn1.bias"])
@pytest.mark.parametrize("args", [None, args_for("resnet18")])
def test_damaged_online_network_is_refused_although_its_moving_average_is_whole(resnet, lost, args):
    average = {f"momentum_backbone.{key}": value for key, value in resnet.state_dict().items()}
    given = checkpoint(resnet, args, **average)
    for key in [key for key in given.state if key.startswith(lost)]:
        del given.state[key]
    with pytest.raises(UserError):
        loaded(given)
