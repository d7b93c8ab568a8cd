"""Clustering networks that their own frameworks wrote, against what those compute."""

import json
import zipfile

import numpy as np
import pytest
import torch

from cdc_plugin.checkpoints import infer_input, load_checkpoint
from tests.helpers import SHARED

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared checkpoints are not beside the checkout")
CASES = {
    "scan-pretext-model": "scan",
    "scan-scan-model": "scan",
    "scan-selflabel-model": "scan",
    "secu-entropy": "secu",
    "spice-self-select": "spice-self",
    "cc": "cc",
    "cdc-official-checkpoint": "cdc",
}


@pytest.mark.parametrize("case", CASES)
def test_features_and_probabilities_are_those_of_the_framework_itself(tmp_path, case):
    with zipfile.ZipFile(SHARED / "fixtures" / f"{case}.zip") as archive:
        archive.extractall(tmp_path)
    record = json.loads((tmp_path / "case.json").read_text())
    expected = {name: torch.from_numpy(values) for name, values in np.load(tmp_path / "expected.npz").items()}
    loaded = load_checkpoint(tmp_path / record["checkpoint"])
    backbone = loaded.backbone.eval()
    assert loaded.format == CASES[case]
    assert backbone.mean.tolist() == pytest.approx(record["mean"])
    assert backbone.std.tolist() == pytest.approx(record["std"])
    assert (backbone.input_size, backbone.feature_dim) == (record["input_size"], record["feature_dim"])
    with torch.no_grad():
        features = backbone(expected["inputs"].float())
        logits = [head.eval()(features) for head in loaded.heads]
    torch.testing.assert_close(features, expected["features"], rtol=1e-4, atol=1e-4)
    names = [name for name in ("logits", "logits_cali") if name in expected]
    assert len(logits) == len(names)
    for found, name in zip(logits, names, strict=True):
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-4)
        probs = expected[name.replace("logits", "probs")]
        torch.testing.assert_close(found.softmax(dim=1), probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["scan-scan-model", "secu-entropy", "spice-self-select"])
def test_images_confirm_that_networks_for_cifar_have_no_pool(tmp_path, case):
    with zipfile.ZipFile(SHARED / "fixtures" / f"{case}.zip") as archive:
        archive.extractall(tmp_path)
    record = json.loads((tmp_path / "case.json").read_text())
    stored = np.load(tmp_path / "expected.npz")
    inputs, expected = (torch.from_numpy(stored[name]).float() for name in ("inputs", "features"))
    mean, std = (torch.tensor(record[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    pixels = (inputs * std + mean).mul(255).round().clamp(0, 255).byte()
    found = infer_input(load_checkpoint(tmp_path / record["checkpoint"]).backbone, pixels)
    assert found.backbone.spec["stem"]["pool"] is False
    with torch.no_grad():
        torch.testing.assert_close(found.backbone.eval()(inputs), expected, rtol=1e-4, atol=1e-4)
