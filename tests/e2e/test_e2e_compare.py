"""``cdc-compare`` as people type it: in two processes, killed and started again, and mistyped."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import ROOT

COMPARE = "from cdc_plugin.cli.compare import compare_command; compare_command()"
SMALL = ["hidden=16", "batch_size=60", "sub_batch_size=30", "--device", "cpu"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}


def compare(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMPARE, *map(str, words)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )


@pytest.fixture(scope="module")
def images(digits, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("Bilder für Ömer") / "some digits.npz"
    np.savez(path, x=digits[0][:90], y=digits[1][:90])
    return path


def test_a_grid_runs_in_two_processes_and_goes_on_after_it_was_killed(tiny_checkpoint, images, tmp_path):
    words = ["--backbone", tiny_checkpoint, "--data", images, "--clusters", 4, "--epochs", 2, "--jobs", 2]
    words += ["--methods", "kmeans,scan3,cdc,single-head", "--seeds", 2, "--out", tmp_path / "grid", *SMALL]
    first = subprocess.Popen(
        [sys.executable, "-c", COMPARE, *map(str, words)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    began = time.monotonic()
    while len(list(tmp_path.glob("grid/cells/*/*/*.json"))) < 3 and time.monotonic() - began < 200:
        assert first.poll() is None, "it ended before it was killed"
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
    first.wait()
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("grid/cells/*/*/*.json")}
    assert 3 <= len(finished) < 10

    done = compare(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    records = {path: path.stat().st_mtime_ns for path in tmp_path.glob("grid/cells/*/*/*.json")}
    # Two seeds of four methods, and SCAN-2, which SCAN-3 goes on with. Its model may have to be made again.
    assert len(records) == 10
    again = {path.parent.name for path, written in finished.items() if records[path] != written}
    assert again <= {"scan2"}
    for label in ("k-means", "SCAN-2", "SCAN-3", "CDC-Clu", "CDC-Cal", "single head (Clu)"):
        assert label in done.stdout
    assert f"results: {tmp_path / 'grid'} (open report.html in a browser)" in done.stdout
    with open(tmp_path / "grid" / "table.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["k-means", "SCAN-2", "SCAN-3", "CDC-Clu", "CDC-Cal", "single head (Clu)"]
    assert {row["seeds"] for row in rows} == {"2"}
    page = (tmp_path / "grid" / "report.html").read_text(encoding="utf-8")
    assert 'src="http' not in page
    assert "<script" not in page
    assert "SCAN-3" in (tmp_path / "grid" / "table.md").read_text(encoding="utf-8")
    assert "\\begin{tabular}" in (tmp_path / "grid" / "table.tex").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "grid" / "report.json").read_text(encoding="utf-8"))["failures"] == []


def test_two_sets_of_images_stand_in_one_table(tiny_checkpoint, images, digits, tmp_path):
    np.save(tmp_path / "others.npy", 255 - digits[0][:60])
    words = ["--backbone", tiny_checkpoint, "--data", images, "others.npy", "--clusters", 4, 3, "epochs=1"]
    done = compare(*words, "--methods", "kmeans,cdc", "--seeds", 1, "--jobs", 1, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "cdc-runs" / "compare-some-digits-1"
    with open(folder / "table.csv", newline="", encoding="utf-8") as file:
        sets = [row["set"] for row in csv.DictReader(file)]
    assert list(dict.fromkeys(sets)) == ["some digits", "others"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--methods", "cdd"], "no method 'cdd': did you mean 'cdc'?"),
        (["--methods", "cdc", "--seeds", "none"], "seeds: expected how many (5) or which (0,3,7), found 'none'"),
        (["--methods", "cdc"], "missing --backbone, --data"),
        (["--recipe", "tables/mian"], "did you mean 'main'?"),
        (["--full"], "--full runs a recipe on the data sets of the paper"),
        (["--recipe", "tables/main", "--full"], "--backbone 'checkpoints/{set}.ckpt'"),
        (["--methods", "cdc", "--backbone", "b.pt", "--data", "x.npz", "--clusters", "ten"], "takes whole numbers"),
        (["--methods", "cdc", "--backbone", "nowhere.pt", "--data", "x.npz", "--clusters", "3"], "nowhere.pt"),
        (["--demo", "--methods", "cdc", "--jobs", "0"], "--jobs must be at least 1"),
        (["--demo", "--methods", "cdc", "hiden=3"], "did you mean hidden?"),
    ],
)
def test_mistakes_cost_one_line_and_leave_nothing_behind(words, expected, tmp_path):
    done = compare(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()[-1:]) == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*"))


def test_methods_and_recipes_are_listed(tmp_path):
    methods = compare("--list-methods", cwd=tmp_path).stdout
    for name in ("kmeans", "scan3", "spice", "cc", "secu", "flexmatch", "cdc+gsf", "temperature", "no-stop-gradient"):
        assert f"  {name} " in methods
    recipes = compare("--list-recipes", cwd=tmp_path).stdout
    assert len(recipes.splitlines()) == 6
