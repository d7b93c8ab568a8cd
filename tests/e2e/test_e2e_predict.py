"""``cdc-predict`` as people type it: selection, an audit, and more images than the memory would hold."""

import numpy as np
import pytest

from tests.helpers.commands import names_in, read_table, refuse, run_python, succeed
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


def test_images_are_sorted_selected_audited_and_answered(model, digits, write_images, tmp_path):
    photos = write_images(tmp_path / "Bilder 漢字", digits[0][:40], digits[1][:40])
    (photos / "class 0" / "broken.png").write_bytes(b"x")
    out, check = tmp_path / "new.csv", tmp_path / "check"
    done = succeed("predict", "--model", model, "--data", photos, "--out", out, "--target-accuracy", 0.5)
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["skipped class 0/broken.png"]
    rows = read_table(out)
    assert len(rows) == 40
    assert list(rows[0])[-1] == "selected"
    selected = sum(int(row["selected"]) for row in rows)
    assert done.stdout.splitlines()[1].startswith("all 40 images" if selected == 40 else f"{selected} of 40 images")
    succeed("predict", "--model", model, "--data", photos, "--out", check, "--audit", 10)
    assert names_in(check) == {"audit.csv", "audit.html"}
    assert "no answers" in refuse("predict", "--answers", check)  # nobody has answered yet


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
