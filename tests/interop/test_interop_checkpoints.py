"""Bare networks that other frameworks wrote, settled by images or told by weights alone."""

import numpy as np
import pytest
import torch

from cdc_plugin.checkpoints import Wanted, infer_input, load_backbone, read_checkpoint
from cdc_plugin.checkpoints.formats.torchvision import load_torchvision
from cdc_plugin.checkpoints.infer.from_weights import pool_by_weights
from cdc_plugin.checkpoints.read import Checkpoint
from cdc_plugin.checkpoints.weights import strip_prefix
from cdc_plugin.errors import UserError
from tests.helpers import SHARED
from tests.helpers.checkpoint_builders.genuine import assert_features, needs_shared, raw_images, unpack

pytestmark = needs_shared
EFFICIENTNET = SHARED / "weights" / "tf_efficientnet_lite0_imagenet_timm.pth"


def images_of(name):
    return torch.from_numpy(np.load(SHARED / "data" / f"{name}.npz")["x"]).permute(0, 3, 1, 2)


def bare_resnet(path, prefix):
    state = strip_prefix(read_checkpoint(path).state, prefix)
    return Checkpoint(path, state, {}, {key: value for key, value in state.items() if not key.startswith("fc.")})


def test_published_efficientnet_is_told_by_its_file_name_and_by_the_user(tmp_path):
    told, named = load_backbone(EFFICIENTNET), load_backbone(EFFICIENTNET, arch="tf_efficientnet_lite0")
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(told.eval()(image), named.eval()(image))
    assert told.mean.tolist() == told.std.tolist() == [0.5] * 3
    with pytest.raises(UserError, match="does not fit"):
        load_backbone(EFFICIENTNET, arch="efficientnet_b0")


@pytest.mark.parametrize(("name", "mean", "std"), [("digits", 0.3092, 0.3488), ("fashion5k", 0.2851, 0.3375)])
def test_bare_backbones_are_settled_as_they_were_trained(name, mean, std):
    backbone = load_backbone(SHARED / "backbones" / f"{name}_resnet18w16.pt")
    found = infer_input(backbone, images_of(name))
    assert found.backbone.spec["stem"] == {"kernel": 3, "stride": 1, "padding": 1, "pool": True}
    assert found.backbone.mean.tolist() == pytest.approx([mean] * 3, abs=0.002)
    assert found.backbone.std.tolist() == pytest.approx([std] * 3, abs=0.002)
    assert found.backbone.inferred == ("input_size",)


@pytest.mark.parametrize(
    ("case", "prefix", "padding"),
    [
        ("solo-mocov2plus-r18-cifar", "backbone.", 2),
        ("solo102-mocov2plus-r18-cifar", "encoder.", 2),
        ("cdcfork-mocov2plus-r34-cifar", "backbone.", 1),
    ],
)
def test_paddings_that_no_shape_tells_apart_are_settled_by_images(tmp_path, case, prefix, padding):
    path, record, expected = unpack(case, tmp_path)
    checkpoint = bare_resnet(path, prefix)
    found = infer_input(load_torchvision(checkpoint, Wanted()).backbone, raw_images(record, expected))
    stem = found.backbone.spec["stem"]
    assert (stem["padding"], stem["pool"], stem["stride"]) == (padding, False, 1)
    assert found.backbone.std.tolist() == pytest.approx(record["std"], abs=0.002)
    assert_features(found.backbone, expected, tolerance=1e-3)


def test_imagenet_normalisation_stays_where_images_do_not_speak_clearly(tmp_path):
    path, record, expected = unpack("torchvision-resnet18", tmp_path)
    found = infer_input(load_backbone(path), raw_images(record, expected))
    assert found.backbone.mean.tolist() == pytest.approx(record["mean"])


def test_images_of_another_kind_do_not_move_a_backbone():
    backbone = load_backbone(SHARED / "backbones" / "digits_resnet18w16.pt")
    found = infer_input(backbone, images_of("cifar10_5k"))
    assert found.backbone is backbone
    assert backbone.spec["stem"]["pool"] is True


@pytest.mark.parametrize(
    ("case", "prefix", "pool"),
    [("scan-pretext-model", "backbone.", False), ("lightly-simsiam-timm-r18", "backbone.", True)],
)
def test_pool_is_told_by_the_weights_alone(tmp_path, case, prefix, pool):
    path, *_ = unpack(case, tmp_path)
    guess = pool_by_weights(bare_resnet(path, prefix).state)
    assert guess.kept is pool
    assert guess.clear
