"""The checkpoint doctor on genuine checkpoints and real images."""

import pytest
import torch

from cdc_plugin.checkpoints import load_checkpoint
from cdc_plugin.checkpoints.infer.resolve import check_input
from cdc_plugin.evaluation.inspect import inspect
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone
from tests.helpers import SHARED
from tests.helpers.checkpoint_builders.genuine import needs_shared, raw_images, unpack

pytestmark = needs_shared


def with_padding(backbone, padding):
    spec = backbone.spec | {"stem": backbone.spec["stem"] | {"padding": padding}}
    network, size = build(spec)
    network.load_state_dict(backbone.module.state_dict())
    return Backbone(network, size, backbone.mean.tolist(), backbone.std.tolist(), backbone.input_size, spec).eval()


@pytest.mark.parametrize(("case", "padding"), [("solo-mocov2plus-r18-cifar", 2), ("cdcfork-mocov2plus-r34-cifar", 1)])
def test_paddings_and_statistics_that_a_file_states_are_verified(tmp_path, case, padding):
    path, record, expected = unpack(case, tmp_path)
    images = raw_images(record, expected)
    backbone = load_checkpoint(path).backbone.eval()
    assert backbone.spec["stem"]["padding"] == padding
    assert check_input(backbone, images).verdict == "fits"
    doubted = check_input(with_padding(backbone, 3 - padding), images)
    assert doubted.verdict == "other"
    assert doubted.variants[0].changed == {"stem.padding": padding}
    wrong = Backbone(backbone.module, backbone.feature_dim, (0.5,) * 3, (0.5,) * 3, 32, backbone.spec)
    assert "CIFAR-10's mean and std" in check_input(wrong, images).words


@pytest.mark.parametrize("name", ["digits", "fashion5k"])
def test_trained_backbones_fit_their_images_and_beat_random_weights(name):
    found = inspect(SHARED / "backbones" / f"{name}_resnet18w16.pt", str(SHARED / "data" / f"{name}.npz"))["images"]
    assert found["batchnorm"]["verdict"] == "fits"
    assert not found["features"]["collapsed"]
    near = found["neighbours"]
    assert near["better"]
    assert near["trained"]["kept"] > 3 * near["random"]["kept"]


def test_images_of_another_kind_are_told():
    found = inspect(SHARED / "backbones" / "digits_resnet18w16.pt", str(SHARED / "data" / "cifar10_5k.npz"))["images"]
    assert found["batchnorm"]["verdict"] == "unlike"


@pytest.mark.parametrize("case", ["cc", "lightly-simsiam-timm-r18"])
def test_enlarged_images_are_told_from_those_of_the_training(tmp_path, case):
    path, record, expected = unpack(case, tmp_path)
    images = raw_images(record, expected)[:16].float()
    large = torch.nn.functional.interpolate(images, size=128, mode="bilinear")
    found = check_input(load_checkpoint(path).backbone.eval(), large)
    assert found.variants[0].changed["input_size"] == record["input_size"]


@pytest.mark.parametrize(
    ("case", "heads", "used"), [("scan-scan-model", [10, 10, 10], [0]), ("cdc-official-checkpoint", [10, 10], [0, 1])]
)
def test_all_heads_of_a_clustering_network_are_found(tmp_path, case, heads, used):
    path, *_ = unpack(case, tmp_path)
    found = inspect(path)
    assert [head["clusters"] for head in found["heads"]] == heads
    assert found["heads_used"] == used


def test_momentum_branch_is_found(tmp_path):
    path, *_ = unpack("solo-mocov2plus-r18-cifar", tmp_path)
    found = inspect(path)
    assert found["branches"] == ["online", "momentum"]
    assert found["branch_used"] == "online"
