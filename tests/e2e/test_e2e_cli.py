"""The commands as people type them: in processes of their own, on small real images."""

import json
import os
import random
import resource
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.helpers.commands import end_when, names_in, read_table, refuse, succeed

FILES = {"config.yaml", "last.pt", "metrics.jsonl", "train.log", "predictions.csv", "report.json"}
FILES |= {"report.html", "model.safetensors", "model.json"}
QUICK = ["hidden=16", "batch_size=60", "sub_batch_size=30", "mini_clusters=12", "--device", "cpu"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory, digits, write_images):
    """90 images in class folders, one of them gray, one broken, with spaces and letters beyond ASCII in paths."""
    folder = tmp_path_factory.mktemp("Bilder für Ömer 漢字") / "my photos"
    write_images(folder, digits[0][:90], digits[1][:90] % 3)
    Image.fromarray(digits[0][90, :, :, 0]).save(folder / "class 0" / "gräu, and a comma.png")
    (folder / "class 1" / "bröken image.png").write_bytes(b"\x89PNG but no more")
    return folder


@pytest.fixture(scope="module")
def finished(photos, tiny_checkpoint):
    out = photos.parent / "my results"
    words = ["--backbone", tiny_checkpoint, "--data", photos, "--clusters", 3, "--out", out, "--epochs", 2]
    return out, succeed("refine", *words, *QUICK)


def test_a_run_writes_its_files_prints_its_figures_and_names_every_image_also_a_broken_one(finished):
    out, done = finished
    assert names_in(out) == FILES
    assert "calibration head" in done.stdout
    assert "ACC" in done.stdout
    assert f"results: {out}" in done.stdout
    assert "epoch 2/2" in done.stderr
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["images"] == 91
    assert [entry["image"] for entry in report["skipped"]] == ["class 1/bröken image.png"]
    assert "bröken image.png" in (out / "train.log").read_text(encoding="utf-8")
    assert "1 image could not be read" in done.stdout
    rows = read_table(out / "predictions.csv")
    assert len(rows) == 91
    assert "class 0/gräu, and a comma.png" in {row["path"] for row in rows}
    columns = "path cluster confidence clustering_confidence second_cluster second_confidence trusted distance outlier"
    assert list(rows[0]) == columns.split()
    assert all(0 <= int(row["cluster"]) < 3 and 1 / 3 <= float(row["confidence"]) <= 1 for row in rows)


def test_a_finished_folder_is_not_overwritten_unless_asked(finished, photos, tiny_checkpoint):
    out, _ = finished
    before = {path: path.read_bytes() for path in out.iterdir()}
    words = ["--backbone", tiny_checkpoint, "--data", photos, "--clusters", 3, "--out", out, "--epochs", 1, *QUICK]
    assert "--overwrite" in refuse("refine", *words, "--quiet")
    words[3] = photos / "no such folder"  # asked to overwrite, but with a mistake in the inputs
    refuse("refine", *words, "--overwrite", "--quiet")
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_new_images_are_sorted_by_a_finished_run(finished, photos, digits, tmp_path):
    out, _ = finished
    table = tmp_path / "new.csv"
    done = succeed("predict", "--model", out, "--data", photos, "--out", table)
    assert "91 images" in done.stdout
    assert "bröken image.png" in done.stderr
    new, known = ([(row["path"], row["cluster"]) for row in read_table(t)] for t in (table, out / "predictions.csv"))
    assert new == known
    gray = tmp_path / "one.png"
    Image.fromarray(digits[0][150, :, :, 0]).save(gray)
    succeed("predict", "--model", out, "--data", gray, "--out", tmp_path / "one.csv")
    assert len(read_table(tmp_path / "one.csv")) == 1
    assert "--overwrite" in refuse("predict", "--model", out, "--data", gray, "--out", table)


def epochs_in(folder) -> list[dict]:
    history = folder / "metrics.jsonl"
    return [json.loads(line) for line in history.read_text().splitlines()] if history.is_file() else []


def test_a_run_killed_at_any_moment_goes_on_to_the_same_bytes(archive, tiny_checkpoint, tmp_path):
    words = ["--backbone", tiny_checkpoint, "--data", archive, "--clusters", 5, "--epochs", 14, "rounds=3", *QUICK]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    succeed("refine", *words, "--out", whole, "--quiet")
    epoch = np.median([record["seconds"] for record in epochs_in(whole)])
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"moments of the kills drawn with seed {seed}")  # pytest shows it if the test fails
    moments = random.Random(seed)
    for done, resume in ((1, []), (4, ["--resume"]), (7, ["--resume"])):
        more = ["--out", killed, *resume]
        delay = moments.random() * epoch
        code, _ = end_when(lambda n=done: len(epochs_in(killed)) >= n, "refine", *words, *more, delay=delay)
        assert code == -signal.SIGKILL
        assert not (killed / "report.json").exists()
    # No other option is needed: the folder knows its settings.
    resume = ["refine", "--resume", "--out", killed]
    code, said = end_when(lambda: len(epochs_in(killed)) >= 9, *resume, sign=signal.SIGINT)
    assert code == 130
    assert "--resume" in said.splitlines()[-1]
    succeed(*resume, "--quiet")
    for name in ("model.safetensors", "predictions.csv"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert names_in(killed) == FILES
    assert [record["epoch"] for record in epochs_in(killed)] == list(range(1, 15))


def test_a_run_killed_before_its_first_state_starts_anew_on_resume(archive, tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    words = ["--backbone", tiny_checkpoint, "--data", archive, "--clusters", 5, "--epochs", 1, "--out", out, *QUICK]
    end_when((out / "train.log").exists, "refine", *words)
    succeed("refine", *words, "--resume")
    assert names_in(out) == FILES


def test_without_labels_no_accuracy_is_stated_and_results_go_to_a_numbered_folder(archive, tiny_checkpoint, tmp_path):
    words = ["--backbone", tiny_checkpoint, "--data", archive, "--clusters", 2, "--epochs", 1, "--no-labels", *QUICK]
    done = succeed("refine", *words, "--quiet", cwd=tmp_path)
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
    succeed("refine", *words, "--epochs", 2, "--out", out, "--device", "cpu")
    report = json.loads((out / "report.json").read_text())
    assert report["images"] == count
    sizes = report["after"]["calibration_head"]["cluster_sizes"]
    assert len(sizes) == clusters
    assert sum(sizes) == count


def test_a_frozen_backbone_trains_its_heads_and_keeps_its_weights(archive, tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    words = ["--backbone", tiny_checkpoint, "--data", archive, "--clusters", 10, "--epochs", 3, "--out", out]
    succeed("refine", *words, "--freeze-backbone", "frozen_views=2", *QUICK)
    assert names_in(out) == FILES
    saved = load_file(out / "model.safetensors")
    for name, tensor in torch.load(tiny_checkpoint, weights_only=True).items():
        assert torch.equal(saved[f"backbone.{name}"], tensor), name


def test_mistakes_end_with_one_line_and_no_traceback(archive, digits, tiny_checkpoint, tmp_path):
    np.save(tmp_path / "three.npy", digits[0][:3])
    good = {"--backbone": tiny_checkpoint, "--data": archive, "--clusters": 3, "--out": tmp_path / "out"}

    def words(**changes: object) -> list[object]:
        given = {**good, **{f"--{name}": value for name, value in changes.items()}}
        return ["refine", *(part for pair in given.items() for part in pair), "--quiet"]

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
        assert "give another --out" in refuse("refine", *words, "--out", tmp_path / "out", "--quiet")
    finally:
        tmp_path.chmod(0o700)


def test_a_disk_that_takes_no_more_ends_the_run_with_one_line(archive, tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    words = ["--backbone", tiny_checkpoint, "--data", archive, "--clusters", 3, "--epochs", 1, "--out", out, *QUICK]

    def small_files() -> None:  # the state needs more; settings and log fit
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    line = refuse("refine", *words, "--quiet", preexec_fn=small_files)
    assert "last.pt" in line
    assert names_in(out) == {"config.yaml", "train.log"}
    succeed("refine", *words, "--resume")
    assert names_in(out) == FILES
