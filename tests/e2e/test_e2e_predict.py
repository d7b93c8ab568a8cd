"""``cdc-predict`` as people type it: selection, an audit, and more images than the memory would hold."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import ROOT

PREDICT = "from cdc_plugin.cli.predict import predict_command; predict_command()"
# What is printed at the end is the process's own peak in kB.
PEAK = f"import resource; {PREDICT}; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


def run(*words: object, code: str = PREDICT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *(str(word) for word in words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A result folder: a small network for 96 pixels with random weights."""
    import torch

    from cdc_plugin.models.architectures import build
    from cdc_plugin.models.backbone import Backbone
    from cdc_plugin.models.clusterer import Clusterer
    from cdc_plugin.models.heads import ClusterHead

    stem = {"kernel": 7, "stride": 2, "padding": 3, "pool": True}
    spec = {"family": "resnet", "block": "basic", "depths": [1, 1, 1, 1], "widths": [8, 8, 8, 8], "stem": stem}
    folder = tmp_path_factory.mktemp("my results")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network, features = build(spec)
        heads = [ClusterHead(features, 12, 3) for _ in range(2)]
    for head in heads:
        head[-1].weight.data *= 30
    Clusterer(Backbone(network, features, [0.3] * 3, [0.35] * 3, 96, spec=spec), *heads).eval().save(folder, {})
    return folder


def test_images_are_sorted_selected_audited_and_answered(model, digits, write_images, tmp_path):
    photos = write_images(tmp_path / "Bilder 漢字", digits[0][:40], digits[1][:40])
    (photos / "class 0" / "broken.png").write_bytes(b"x")
    out, check = tmp_path / "new.csv", tmp_path / "check"
    done = run("--model", model, "--data", photos, "--out", out, "--target-accuracy", 0.5)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["skipped class 0/broken.png"]
    rows = rows_of(out)
    assert len(rows) == 40
    assert list(rows[0])[-1] == "selected"
    selected = sum(int(row["selected"]) for row in rows)
    assert done.stdout.splitlines()[1].startswith("all 40 images" if selected == 40 else f"{selected} of 40 images")
    done = run("--model", model, "--data", photos, "--out", check, "--audit", 10)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in check.iterdir()) == ["audit.csv", "audit.html"]
    done = run("--answers", check)  # nobody has answered yet
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "no answers" in done.stderr


def test_twenty_times_as_many_images_take_no_more_memory(model, tmp_path):
    """6,000 gray images of 96 x 96 are 166 MB as RGB."""
    pixels = np.random.default_rng(0).integers(0, 255, (300, 96, 96), dtype=np.uint8)
    np.save(tmp_path / "few.npy", pixels)
    np.save(tmp_path / "many.npy", np.concatenate([pixels] * 20))
    peaks = []
    for name in ("few", "many"):
        words = ["--model", model, "--data", tmp_path / f"{name}.npy", "--out", tmp_path / f"{name}.csv"]
        # Small batches: how much the peaks of reading and of computing coincide is a matter of chance.
        done = run(*words, "--batch-size", 32, code=PEAK)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    few, many = rows_of(tmp_path / "few.csv"), rows_of(tmp_path / "many.csv")
    assert len(many) == 6000
    assert [row["cluster"] for row in many] == [row["cluster"] for row in few] * 20
    assert peaks[1] < peaks[0] + 60, peaks
