"""Checkpoints that solo-learn and CDC's version of it wrote, against what their own code computes."""

import json
import zipfile

import numpy as np
import pytest
import torch

from cdc_plugin.checkpoints import Wanted, infer_input, load_checkpoint
from cdc_plugin.checkpoints.formats.solo_learn.args import read_run_defaults
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build
from tests.helpers import SHARED

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared checkpoints are not beside the checkout")
CASES = [
    "solo-byol-r18-224",
    "solo-mae-vit_tiny",
    "solo-mocov2plus-r18-cifar",
    "solo-simclr-wrn-adamw",
    "solo-simsiam-wrn",
    "solo102-mocov2plus-r18-cifar",
    "cdcfork-mocov2plus-r34-cifar",
]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with zipfile.ZipFile(SHARED / "fixtures" / f"{request.param}.zip") as archive:
        archive.extractall(folder)
    record = json.loads((folder / "case.json").read_text())
    expected = np.load(folder / "expected.npz")
    inputs, features = (torch.from_numpy(expected[name]).float() for name in ("inputs", "features"))
    return folder, record, inputs, features


def features_of(backbone, inputs):
    with torch.no_grad():
        return backbone.eval()(inputs)


def test_run_folder_alone_gives_the_features_and_all_facts(case):
    folder, record, inputs, expected = case
    found = load_checkpoint(folder)
    backbone = found.backbone
    torch.testing.assert_close(features_of(backbone, inputs), expected, rtol=1e-4, atol=1e-4)
    assert (found.format, backbone.inferred, found.matched) == ("solo-learn", (), 1.0)
    assert (backbone.feature_dim, backbone.input_size) == (record["feature_dim"], record["input_size"])
    assert backbone.mean.tolist() == pytest.approx(record["mean"])
    assert backbone.std.tolist() == pytest.approx(record["std"])
    build(json.loads(json.dumps(backbone.spec)))[0].load_state_dict(backbone.module.state_dict())


def test_file_without_its_arguments_gives_the_same_features_and_says_what_it_assumed(case, tmp_path):
    folder, record, inputs, expected = case
    alone = tmp_path / "alone.ckpt"
    alone.hardlink_to(folder / record["checkpoint"])
    found = load_checkpoint(alone)
    assert found.format == "solo-learn"
    torch.testing.assert_close(features_of(found.backbone, inputs), expected, rtol=1e-4, atol=1e-4)
    assert {"mean", "std"} <= set(found.backbone.inferred)
    if found.backbone.spec.get("stem", {}).get("kernel") == 3:
        assert "stem.padding" in found.backbone.inferred
        mean, std = (torch.tensor(record[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
        pixels = (inputs * std + mean).mul(255).round().clamp(0, 255).byte()
        settled = infer_input(found.backbone, pixels).backbone
        assert settled.spec["stem"] == found.backbone.spec["stem"]


def test_moving_average_is_another_network_or_a_clear_refusal(case):
    folder, record, inputs, expected = case
    if "momentum branch" not in record["shrink"]:
        with pytest.raises(UserError, match="no moving average"):
            load_checkpoint(folder, wanted=Wanted(branch="momentum"))
        return
    found = load_checkpoint(folder, wanted=Wanted(branch="momentum"))
    difference = (features_of(found.backbone, inputs) - expected).norm(dim=1) / expected.norm(dim=1)
    assert difference.mean() > 0.1  # the fixtures' averages were made to differ
    assert found.origin.why["branch"].startswith("momentum_")


def test_arguments_imply_data_and_clusters_without_a_look_at_the_weights(case, tmp_path):
    folder, record, *_ = case
    (tmp_path / "args.json").write_text((folder / "args.json").read_text())
    fields = read_run_defaults(tmp_path / record["checkpoint"])
    expected = {"clusters": 3} if "custom" in record["checkpoint"] else {"data": "cifar10", "clusters": 10}
    assert fields == expected
