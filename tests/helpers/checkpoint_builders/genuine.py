"""Files that the frameworks themselves wrote, with what their own code computed, where they are beside the checkout."""

import json
import zipfile

import numpy as np
import pytest
import torch

from cdc_plugin.models.architectures import build
from tests.helpers import SHARED

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared checkpoints are not beside the checkout")


def unpack(case, folder):
    """Return the path of a checkpoint, the record of what it is, and tensors by name (inputs, features, ...)."""
    with zipfile.ZipFile(SHARED / "fixtures" / f"{case}.zip") as archive:
        archive.extractall(folder)
    record = json.loads((folder / "case.json").read_text())
    stored = np.load(folder / "expected.npz")
    expected = {name: torch.from_numpy(stored[name]).float() for name in stored.files}
    return folder / record["checkpoint"], record, expected


def raw_images(record, expected):
    """Return the pixels (N, 3, S, S) in 0..255 that were normalised into the inputs of a case."""
    mean, std = (torch.tensor(record[name]).float().view(1, 3, 1, 1) for name in ("mean", "std"))
    return (expected["inputs"] * std + mean).mul(255).round().clamp(0, 255).byte()


def assert_features(network, expected, tolerance=1e-4):
    with torch.no_grad():
        found = network.eval()(expected["inputs"])
    torch.testing.assert_close(found, expected["features"], rtol=tolerance, atol=tolerance)


def assert_facts(loaded, record, expected):
    """Compare features and normalisation, also of the network that is built again from its spec."""
    backbone = loaded.backbone
    assert (loaded.matched, backbone.feature_dim) == (1.0, record["feature_dim"])
    assert backbone.mean.tolist() == pytest.approx(record["mean"])
    assert backbone.std.tolist() == pytest.approx(record["std"])
    again, _ = build(json.loads(json.dumps(backbone.spec)))
    again.load_state_dict(backbone.module.state_dict())
    for network in (backbone, again):
        assert_features(network, expected)
