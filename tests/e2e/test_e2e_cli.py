"""The commands as people type them: in processes of their own, on small real images."""

from __future__ import annotations

import csv
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers import ROOT

FILES = {"config.yaml", "last.pt", "metrics.jsonl", "train.log", "predictions.csv", "report.json"}
FILES |= {"report.html", "model.safetensors", "model.json"}
QUICK = ["hidden=16", "batch_size=60", "sub_batch_size=30", "mini_clusters=12", "--device", "cpu"]
REFINE = [sys.executable, "-m", "cdc_plugin"]
PREDICT = [sys.executable, "-c", "from cdc_plugin.cli.predict import predict_command; predict_command()"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}


def run(*words: object, program: list[str] = REFINE, cwd: Path | None = None, **options) -> subprocess.CompletedProcess:
    command = [*program, *(str(word) for word in words)]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, encoding="utf-8", timeout=300, **options
    )


def succeed(*words: object, **options) -> subprocess.CompletedProcess:
    done = run(*words, **options)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def refuse(*words: object, **options) -> str:
    """The command must end with code 2 and one line on stderr, which is returned."""
    done = run(*words, **options)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def archive(tmp_path_factory, digits) -> Path:
    path = tmp_path_factory.mktemp("archive") / "digits.npz"
    np.savez(path, x=digits[0], y=digits[1])
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory, digits, write_images) -> Path:
    """90 images in class folders, one of them gray, one broken, with spaces and letters beyond ASCII in paths."""
    folder = tmp_path_factory.mktemp("Bilder für Ömer 漢字") / "my photos"
    write_images(folder, digits[0][:90], digits[1][:90] % 3)
    Image.fromarray(digits[0][90, :, :, 0]).save(folder / "class 0" / "gräu, and a comma.png")
    (folder / "class 1" / "bröken image.png").write_bytes(b"\x89PNG but no more")
    return folder


@pytest.fixture(scope="module")
def finished(photos, tiny_checkpoint) -> tuple[Path, subprocess.CompletedProcess]:
    out = photos.parent / "my results"
    words = ["--backbone", tiny_checkpoint, "--data", photos, "--clusters", 3, "--out", out, "--epochs", 2]
    return out, succeed(*words, *QUICK)


def test_a_run_writes_exactly_its_files_and_prints_its_figures(finished):
    out, done = finished
    assert names_in(out) == FILES
    assert "calibration head" in done.stdout
    assert "ACC" in done.stdout
    assert f"results: {out}" in done.stdout
    assert "epoch 2/2" in done.stderr


def test_a_broken_image_is_skipped_and_named_everywhere(finished):
    out, done = finished
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["images"] == 91
    assert [entry["image"] for entry in report["skipped"]] == ["class 1/bröken image.png"]
    assert "bröken image.png" in (out / "train.log").read_text(encoding="utf-8")
    assert "1 image could not be read" in done.stdout


def test_the_table_names_every_image_by_its_path(finished):
    out, _ = finished
    with open(out / "predictions.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 91
    assert "class 0/gräu, and a comma.png" in {row["path"] for row in rows}
    columns = "path cluster confidence clustering_confidence second_cluster second_confidence trusted distance outlier"
    assert list(rows[0]) == columns.split()
    assert all(0 <= int(row["cluster"]) < 3 and 1 / 3 <= float(row["confidence"]) <= 1 for row in rows)


def test_a_finished_folder_is_not_overwritten_unless_asked(finished, photos, tiny_checkpoint):
    out, _ = finished
    before = {path: path.read_bytes() for path in out.iterdir()}
    words = ["--backbone", tiny_checkpoint, "--data", photos, "--clusters", 3, "--out", out, "--epochs", 1, *QUICK]
    assert "--overwrite" in refuse(*words, "--quiet")
    words[3] = photos / "no such folder"  # asked to overwrite, but with a mistake in the inputs
    refuse(*words, "--overwrite", "--quiet")
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_new_images_are_sorted_by_a_finished_run(finished, photos, digits, tmp_path):
    out, _ = finished
    table = tmp_path / "new.csv"
    done = succeed("--model", out, "--data", photos, "--out", table, program=PREDICT)
    assert "91 images" in done.stdout
    assert "bröken image.png" in done.stderr
    columns = ["path", "cluster", "confidence"]

    def read(path: Path) -> list[list[str]]:
        with open(path, encoding="utf-8", newline="") as file:
            return [[row[column] for column in columns] for row in csv.DictReader(file)]

    assert [row[:2] for row in read(table)] == [row[:2] for row in read(out / "predictions.csv")]
    gray = tmp_path / "one.png"
    Image.fromarray(digits[0][150, :, :, 0]).save(gray)
    succeed("--model", out, "--data", gray, "--out", tmp_path / "one.csv", program=PREDICT)
    assert len(read(tmp_path / "one.csv")) == 1
    assert "--overwrite" in refuse("--model", out, "--data", gray, "--out", table, program=PREDICT)


def kill_after(epochs: int, delay: float, sign: int, words: list[object], out: Path) -> subprocess.CompletedProcess:
    """Start a run and end it ``delay`` seconds after the given number of epochs stand in metrics.jsonl."""
    command = [*REFINE, *(str(word) for word in words)]
    history = out / "metrics.jsonl"
    process = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell has the jobs in its background ignore Ctrl-C, and tests may be such a job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (history.is_file() and len(history.read_text().splitlines()) >= epochs):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(sign)
    _, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, "", errors)


def test_a_run_killed_at_any_moment_goes_on_to_the_same_bytes(archive, tiny_checkpoint, tmp_path):
    words = ["--backbone", tiny_checkpoint, "--data", archive, "--clusters", 5, "--epochs", 14, *QUICK]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    succeed(*words, "--out", whole, "--quiet")
    seconds = [json.loads(line)["seconds"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    epoch = sorted(seconds)[len(seconds) // 2]
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"moments of the kills drawn with seed {seed}")  # pytest shows it if the test fails
    moments = random.Random(seed)
    for number, done in enumerate((1, 4, 7)):
        delay = moments.random() * epoch
        resume = ["--resume"] if number else []
        ended = kill_after(done, delay, signal.SIGKILL, [*words, "--out", killed, *resume], killed)
        assert ended.returncode == -signal.SIGKILL
        assert not (killed / "report.json").exists()
    ended = kill_after(9, 0, signal.SIGINT, ["--resume", "--out", killed], killed)
    assert ended.returncode == 130
    assert "--resume" in ended.stderr.splitlines()[-1]
    # No other option is needed: the folder knows its settings.
    succeed("--resume", "--out", killed, "--quiet")
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (killed / "predictions.csv").read_bytes() == (whole / "predictions.csv").read_bytes()
    assert names_in(killed) == FILES
    epochs = [json.loads(line)["epoch"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert epochs == list(range(1, 15))


def test_a_run_killed_before_its_first_state_starts_anew_on_resume(archive, tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    words = ["--backbone", tiny_checkpoint, "--data", archive, "--clusters", 5, "--epochs", 1, "--out", out, *QUICK]
    process = subprocess.Popen([*REFINE, *(str(word) for word in words)], env=environment(), stderr=subprocess.DEVNULL)
    while not (out / "train.log").exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.wait(timeout=60)
    succeed(*words, "--resume")
    assert names_in(out) == FILES


def test_a_dry_run_and_the_list_of_recipes_write_nothing(archive, tiny_checkpoint, tmp_path):
    done = succeed(
        "--dry-run", "--backbone", tiny_checkpoint, "--data", archive, "--clusters", 4, "--out", "new", cwd=tmp_path
    )
    assert "clusters: 4" in done.stdout
    assert "# images: 200" in done.stdout
    assert "cifar10" in succeed("--list-recipes", cwd=tmp_path).stdout
    assert names_in(tmp_path) == set()


def test_without_labels_no_accuracy_is_stated_and_results_go_to_a_numbered_folder(archive, tiny_checkpoint, tmp_path):
    words = ["--backbone", tiny_checkpoint, "--data", archive, "--clusters", 2, "--epochs", 1, "--no-labels", *QUICK]
    done = succeed(*words, "--quiet", cwd=tmp_path)
    assert "ACC" not in done.stdout
    assert done.stderr == ""
    out = tmp_path / "cdc-runs" / "digits-1"
    assert names_in(out) == FILES
    report = json.loads((out / "report.json").read_text())
    assert report["labels"] is False
    assert "ACC" not in report["after"]["calibration_head"]


@pytest.mark.parametrize(("clusters", "count"), [(2, 60), (37, 60), (3, 4)])
def test_few_images_and_any_number_of_clusters_in_gray(clusters, count, digits, tiny_checkpoint, tmp_path):
    np.save(tmp_path / "gray.npy", digits[0][:count, :, :, 0])
    out = tmp_path / "out"
    words = ["--backbone", tiny_checkpoint, "--data", tmp_path / "gray.npy", "--clusters", clusters]
    # All sizes are left to be chosen.
    succeed(*words, "--epochs", 2, "--out", out, "--device", "cpu")
    report = json.loads((out / "report.json").read_text())
    assert report["images"] == count
    sizes = report["after"]["calibration_head"]["cluster_sizes"]
    assert len(sizes) == clusters
    assert sum(sizes) == count


def test_a_frozen_backbone_trains_its_heads_and_keeps_its_weights(archive, tiny_checkpoint, tmp_path):
    import torch
    from safetensors.torch import load_file

    out = tmp_path / "out"
    words = ["--backbone", tiny_checkpoint, "--data", archive, "--clusters", 10, "--epochs", 3, "--out", out]
    succeed(*words, "--freeze-backbone", "frozen_views=2", *QUICK)
    assert names_in(out) == FILES
    saved = load_file(out / "model.safetensors")
    for name, tensor in torch.load(tiny_checkpoint, weights_only=True).items():
        assert torch.equal(saved[f"backbone.{name}"], tensor), name


def test_mistakes_end_with_one_line_and_no_traceback(archive, digits, tiny_checkpoint, tmp_path):
    np.save(tmp_path / "three.npy", digits[0][:3])
    good = {"--backbone": tiny_checkpoint, "--data": archive, "--clusters": 3, "--out": tmp_path / "out"}

    def words(**changes: object) -> list[object]:
        given = {**good, **{f"--{name}": value for name, value in changes.items()}}
        return [part for pair in given.items() for part in pair] + ["--quiet"]

    assert "3 readable images, too few" in refuse(*words(data=tmp_path / "three.npy"))
    assert "nowhere.pt" in refuse(*words(backbone="nowhere.pt"))
    assert "nothing at nowhere" in refuse(*words(data="nowhere"))
    file = tmp_path / "file"
    file.touch()
    assert "give the path of a folder" in refuse(*words(out=file))
    # None of the failed starts stands in the way of the right command.
    succeed(*words(), "--epochs", 0, *QUICK)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(archive, tiny_checkpoint, tmp_path):
    tmp_path.chmod(0o500)
    try:
        words = ["--backbone", tiny_checkpoint, "--data", archive, "--clusters", 3]
        assert "give another --out" in refuse(*words, "--out", tmp_path / "out", "--quiet")
    finally:
        tmp_path.chmod(0o700)


def test_a_disk_that_takes_no_more_ends_the_run_with_one_line(archive, tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    words = ["--backbone", tiny_checkpoint, "--data", archive, "--clusters", 3, "--epochs", 1, "--out", out, *QUICK]

    def small_files() -> None:  # the state needs more; settings and log fit
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    line = refuse(*words, "--quiet", preexec_fn=small_files)
    assert "last.pt" in line
    assert names_in(out) == {"config.yaml", "train.log"}
    succeed(*words, "--resume")
    assert names_in(out) == FILES
