"""A run that is followed by TensorBoard, from the command line: refused early, resumed, or dropped."""

import json
from pathlib import Path

import pytest

from cdc_plugin.cli.refine import refine_command
from tests.helpers.event_files import scalars

QUICK = ["hidden=16", "batch_size=60", "sub_batch_size=30", "mini_clusters=12", "--device", "cpu", "--quiet"]
PAST = {"before/calibration_head/CONF", "after/calibration_head/CONF", "label_free/expected_accuracy", "images"}


@pytest.fixture
def words(tiny_checkpoint, digits, write_images, tmp_path):
    photos = write_images(tmp_path / "photos", digits[0][:60])
    return ["--backbone", tiny_checkpoint, "--data", photos, "--clusters", 3, "--out", tmp_path / "out", *QUICK]


def refine(*words):
    refine_command([str(word) for word in words])


def test_an_unknown_tracker_is_refused_before_anything_is_read(tiny_checkpoint, tmp_path, refuse, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--backbone", tiny_checkpoint, "--data", "nowhere", "--clusters", 3]
    assert "did you mean 'tensorboard'?" in refuse("refine", *words, "--track", "tensorbord")
    assert list(Path().iterdir()) == []


def test_a_followed_run_can_be_resumed_with_and_without_its_tracker(words, tmp_path, capsys):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    out, logs = tmp_path / "out", tmp_path / "out" / "tensorboard"
    refine(*words, "--epochs", 2, "--track", "tensorboard")
    found = scalars(logs)
    assert found[0][0].startswith("train/")
    assert [step for tag, step, _ in found if tag == "train/clustering_loss"] == [1, 2]
    assert {tag for tag, step, _ in found if step == 2} >= PAST
    assert json.loads((out / "trackers.json").read_text()) == {"tensorboard": {"epoch": 2, "finished": True}}
    refine("--resume", "--out", out, "--quiet", "--track", "tensorboard")  # there is nothing new to tell
    assert scalars(logs) == found
    files = len(list(logs.iterdir()))
    refine("--resume", "--out", out, "--quiet")  # no file decides where data are sent
    assert len(list(logs.iterdir())) == files == 2
    refine(*words, "--epochs", 1, "--overwrite", "--track", "tensorboard")
    assert [step for tag, step, _ in scalars(logs) if tag == "train/clustering_loss"] == [1]


def test_a_run_that_is_not_followed_leaves_no_trace_of_it(words, tmp_path):
    refine(*words, "--epochs", 1)
    assert not {"tensorboard", "trackers.json", "wandb"} & {path.name for path in (tmp_path / "out").iterdir()}
