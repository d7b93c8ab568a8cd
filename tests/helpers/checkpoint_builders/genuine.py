"""Files that the frameworks themselves wrote, with what their own code computed, where they are beside the checkout."""

import json
import zipfile

import numpy as np
import pytest
import torch

from tests.helpers import SHARED

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared checkpoints are not beside the checkout")


def unpack(case, folder):
    """Return the path of a checkpoint, the record of what it is, and tensors by name (inputs, features, ...)."""
    with zipfile.ZipFile(SHARED / "fixtures" / f"{case}.zip") as archive:
        archive.extractall(folder)
    record = json.loads((folder / "case.json").read_text())
    stored = np.load(folder / "expected.npz")
    return (
        folder / record["checkpoint"],
        record,
        {name: torch.from_numpy(stored[name]).float() for name in stored.files},
    )


def original_images(record, expected):
    """Return the pixels (N, 3, S, S) in 0..255 that were normalised into the inputs of a case."""
    mean, std = (torch.tensor(record[name]).float().view(1, 3, 1, 1) for name in ("mean", "std"))
    return (expected["inputs"] * std + mean).mul(255).round().clamp(0, 255).byte()


def assert_features(network, expected, tolerance=1e-4):
    with torch.no_grad():
        found = network.eval()(expected["inputs"])
    torch.testing.assert_close(found, expected["features"], rtol=tolerance, atol=tolerance)


def assert_statistics(backbone, record):
    assert backbone.mean.tolist() == pytest.approx(record["mean"])
    assert backbone.std.tolist() == pytest.approx(record["std"])
