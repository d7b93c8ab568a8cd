"""Several processes of ``torchrun`` sort images as one process does."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cdc_plugin.evaluation.predict import predict_images
from tests.helpers import ROOT

# ``-m cdc_plugin predict ...`` with small parts; where told so, the second process dies instead of keeping its second.
DRIVER = """
import os, signal, sys
from cdc_plugin.evaluation import predict_resume
from cdc_plugin.__main__ import choose

predict_resume.PART = 16
saved = []
save = predict_resume.PartFolder.save

def saving(*arguments):
    if sys.argv[1] == "dies" and os.environ["RANK"] == "1" and saved:
        os.kill(os.getpid(), signal.SIGKILL)
    saved.append(save(*arguments))

predict_resume.PartFolder.save = saving
command, rest = choose(sys.argv[2:])
command(rest)
"""


@pytest.fixture
def photos(tmp_path, digits, write_images) -> Path:
    folder = write_images(tmp_path / "photos", digits[0][:117])
    (folder / "image 050.png").write_bytes(b"x")
    return folder


@pytest.fixture
def model(tmp_path, tiny_clusterer) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    tiny_clusterer.save(folder, {})
    return folder


@pytest.fixture
def driver(tmp_path) -> Path:
    path = tmp_path / "driver.py"
    path.write_text(DRIVER)
    return path


def torchrun(processes: int, *words: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        + [str(word) for word in words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_as_one_process(out: Path, model, photos: Path) -> None:
    expected = predict_images(model, photos, torch.device("cpu")).table
    with open(out, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == expected["path"].tolist()
    assert [int(row["cluster"]) for row in rows] == expected["cluster"].tolist()
    assert [float(row["confidence"]) for row in rows] == pytest.approx(expected["confidence"].tolist(), abs=1.5e-6)


def test_a_process_dies_and_another_number_of_processes_goes_on(tmp_path, model, photos, driver, tiny_clusterer):
    out = tmp_path / "new.csv"
    words = ["predict", "--model", model, "--data", photos, "--out", out, "--device", "cpu"]
    done = torchrun(2, driver, "dies", *words)
    assert done.returncode != 0
    assert not out.exists()
    finished = len(list((tmp_path / ".new.csv.parts").glob("[!.]*.npz")))
    assert 1 <= finished < 8
    done = torchrun(3, driver, "lives", *words)
    assert done.returncode == 0, done.stderr
    assert_as_one_process(out, tiny_clusterer, photos)
    assert len(done.stdout.splitlines()) == 1  # one process speaks
    assert done.stdout.startswith("116 images, mean confidence")
    assert done.stderr.count(f"resuming: {finished} of 8 parts are finished") == 1
    assert done.stderr.count("skipped image 050.png") == 1
    assert not (tmp_path / ".new.csv.parts").exists()


def test_two_processes_share_the_work_of_an_undisturbed_run(tmp_path, model, photos, driver, tiny_clusterer):
    out = tmp_path / "new.csv"
    done = torchrun(2, driver, "lives", "predict", "--model", model, "--data", photos, "--out", out, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert_as_one_process(out, tiny_clusterer, photos)


def test_a_mistake_and_few_images_are_no_trouble_to_several_processes(tmp_path, model, photos, tiny_clusterer):
    words = ["-m", "cdc_plugin", "predict", "--model", model, "--out", tmp_path / "new.csv", "--device", "cpu"]
    done = torchrun(2, *words, "--data", tmp_path / "nowhere")
    assert done.returncode != 0
    assert done.stderr.count("cdc-predict: error: nothing at") == 1
    done = torchrun(2, *words, "--data", photos)
    assert done.returncode == 0, done.stderr
    assert_as_one_process(tmp_path / "new.csv", tiny_clusterer, photos)
    assert not list(tmp_path.glob(".*"))
