"""Checkpoints of lightly, timm and torchvision, written by themselves, against what their own code computes."""

import json
import zipfile

import numpy as np
import pytest
import torch

from cdc_plugin.checkpoints import load_checkpoint
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build
from tests.helpers import SHARED

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared checkpoints are not beside the checkout")
CASES = {
    "lightly-simsiam-r18-seq": "lightly",
    "lightly-simsiam-timm-r18": "lightly",
    "timm-convnext_atto-train": "timm",
    "timm-test_resnet": "timm",
    "torchvision-resnet18": "torchvision",
}


def unpack(case, folder):
    with zipfile.ZipFile(SHARED / "fixtures" / f"{case}.zip") as archive:
        archive.extractall(folder)
    record = json.loads((folder / "case.json").read_text())
    expected = np.load(folder / "expected.npz")
    inputs, features = (torch.from_numpy(expected[name]).float() for name in ("inputs", "features"))
    return folder / record["checkpoint"], record, inputs, features


@pytest.mark.parametrize("case", CASES)
def test_features_and_input_are_those_of_the_framework(tmp_path, case):
    path, record, inputs, expected = unpack(case, tmp_path)
    found = load_checkpoint(path)
    assert (found.format, found.matched) == (CASES[case], 1.0)
    assert found.backbone.mean.tolist() == pytest.approx(record["mean"])
    assert found.backbone.std.tolist() == pytest.approx(record["std"])
    assert found.backbone.input_size == record["input_size"] or "input_size" in found.backbone.inferred
    with torch.no_grad():
        torch.testing.assert_close(found.backbone.eval()(inputs), expected, rtol=1e-4, atol=1e-4)


def test_model_of_timm_is_told_without_its_file_name(tmp_path):
    path, _, inputs, expected = unpack("timm-test_resnet", tmp_path)
    backbone = load_checkpoint(path.rename(tmp_path / "weights.pth")).backbone
    assert backbone.spec["name"] == "test_resnet"
    with torch.no_grad():
        torch.testing.assert_close(backbone.eval()(inputs), expected, rtol=1e-4, atol=1e-4)


def test_backbone_of_lightly_is_built_again_from_its_spec(tmp_path):
    path, _, inputs, expected = unpack("lightly-simsiam-r18-seq", tmp_path)
    backbone = load_checkpoint(path).backbone
    network, _ = build(json.loads(json.dumps(backbone.spec)))
    network.load_state_dict(backbone.module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(inputs), expected, rtol=1e-4, atol=1e-4)


def test_weights_missing_or_misshapen_inside_the_backbone_are_refused(tmp_path):
    path, *_ = unpack("lightly-simsiam-r18-seq", tmp_path)
    payload = torch.load(path)
    for name in ("backbone.0.weight", "backbone.1.running_mean", "backbone.6.1.conv2.weight", "backbone.7.0.bn1.bias"):
        for change in (None, payload["state_dict"][name][:2]):
            state = {key: change if key == name else value for key, value in payload["state_dict"].items()}
            state = {key: value for key, value in state.items() if value is not None}
            torch.save(payload | {"state_dict": state}, tmp_path / "changed.ckpt")
            with pytest.raises(UserError):
                load_checkpoint(tmp_path / "changed.ckpt")
