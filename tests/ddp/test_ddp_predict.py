"""Several processes of ``torchrun`` sort images as one process does."""

import csv
from pathlib import Path

import pytest

from tests.helpers.predictions import predict_at_once, table_of
from tests.helpers.torchrun import torchrun

# ``cdc-predict`` with small parts; with the word "dies" the second process is killed before it saves its second part.
DRIVER = """
import os, signal, sys
from cdc_plugin.evaluation import predict_resume
from cdc_plugin.cli.predict import predict_command

predict_resume.PART = 16
saved = []
save = predict_resume.PartFolder.save

def saving(*arguments):
    if sys.argv[1] == "dies" and os.environ["RANK"] == "1" and saved:
        os.kill(os.getpid(), signal.SIGKILL)
    saved.append(save(*arguments))

predict_resume.PartFolder.save = saving
predict_command(sys.argv[2:])
"""


@pytest.fixture
def photos(tmp_path, digits, write_images) -> Path:
    folder = write_images(tmp_path / "photos", digits[0][:117])
    (folder / "image 050.png").write_bytes(b"x")
    return folder


@pytest.fixture
def words(tmp_path, tiny_clusterer) -> list:
    """Arguments of ``cdc-predict`` without --data."""
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "run").mkdir()
    tiny_clusterer.save(tmp_path / "run", {})
    return ["--model", tmp_path / "run", "--out", tmp_path / "new.csv", "--device", "cpu"]


def assert_equals_one_process(out: Path, model, photos: Path) -> None:
    expected = table_of(predict_at_once(model, photos))
    with open(out, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == expected["path"].tolist()
    assert [int(row["cluster"]) for row in rows] == expected["cluster"].tolist()
    assert [float(row["confidence"]) for row in rows] == pytest.approx(expected["confidence"].tolist(), abs=1.5e-6)


def test_a_process_dies_and_another_number_of_processes_continues(tmp_path, words, photos, tiny_clusterer):
    out, parts = tmp_path / "new.csv", tmp_path / ".new.csv.parts"
    done = torchrun(2, tmp_path / "driver.py", "dies", *words, "--data", photos)
    assert done.returncode != 0
    assert not out.exists()
    finished = len(list(parts.glob("[!.]*.npz")))
    assert 1 <= finished < 8
    done = torchrun(3, tmp_path / "driver.py", "lives", *words, "--data", photos)
    assert done.returncode == 0, done.stderr
    assert_equals_one_process(out, tiny_clusterer, photos)
    assert len(done.stdout.splitlines()) == 1  # one process prints
    assert done.stdout.startswith("116 images, mean confidence")
    assert done.stderr.count(f"resuming: {finished} of 8 parts are finished") == 1
    assert done.stderr.count("skipped image 050.png") == 1
    assert not parts.exists()


def test_two_processes_report_a_mistake_once_and_share_the_work_of_the_next_run(
    tmp_path, words, photos, tiny_clusterer
):
    done = torchrun(2, "-m", "cdc_plugin", "predict", *words, "--data", tmp_path / "nowhere")
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "exitcode  : 2" in done.stderr
    assert done.stderr.count("cdc-predict: error: nothing at") == 1
    assert "cdc_plugin/" not in done.stderr  # no traceback of ours
    for command in (["-m", "cdc_plugin", "predict"], [tmp_path / "driver.py", "lives"]):  # one part, and eight
        done = torchrun(2, *command, *words, "--data", photos)
        assert done.returncode == 0, done.stderr
        assert_equals_one_process(tmp_path / "new.csv", tiny_clusterer, photos)
        assert not list(tmp_path.glob(".*"))
        (tmp_path / "new.csv").unlink()
