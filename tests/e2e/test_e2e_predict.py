"""``cdc-predict`` on more images than the memory would hold."""

import numpy as np
import pytest

from tests.helpers.commands import read_table, run_python
from tests.helpers.exported_models import TINY_RESNET, clusterer

# What is printed at the end is the process's own peak in kB.
PEAK = """
import resource
from cdc_plugin.cli.predict import predict_command
predict_command()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A result folder: a small network for 96 pixels with random weights."""
    folder = tmp_path_factory.mktemp("my results")
    made = clusterer({**TINY_RESNET, "stem": {}})
    made.backbone.input_size = 96
    made.save(folder, {})
    return folder


def test_twenty_times_as_many_images_take_no_more_memory(model, tmp_path):
    """6,000 gray images of 96 x 96 are 166 MB as RGB."""
    pixels = np.random.default_rng(0).integers(0, 255, (300, 96, 96), dtype=np.uint8)
    np.save(tmp_path / "few.npy", pixels)
    np.save(tmp_path / "many.npy", np.concatenate([pixels] * 20))
    peaks = []
    for name in ("few", "many"):
        words = ["--model", model, "--data", tmp_path / f"{name}.npy", "--out", tmp_path / f"{name}.csv"]
        # Small batches: how much the peaks of reading and of computing coincide is a matter of chance.
        done = run_python("-c", PEAK, *words, "--batch-size", 32)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    few, many = read_table(tmp_path / "few.csv"), read_table(tmp_path / "many.csv")
    assert len(many) == 6000
    assert [row["cluster"] for row in many] == [row["cluster"] for row in few] * 20
    assert peaks[1] < peaks[0] + 60, peaks
