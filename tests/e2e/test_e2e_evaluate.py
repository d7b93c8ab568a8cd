"""``cdc-evaluate`` as people type it: an old model as it is, two side by side, and mistakes."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.commands import names_in, succeed

FILES = {"report.html", "report.json", "predictions.csv"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory, digits, write_images):
    """Images in class folders, one of them broken, with spaces and letters beyond ASCII in paths."""
    folder = tmp_path_factory.mktemp("Bilder für Ömer") / "my photos"
    write_images(folder, digits[0][:60], digits[1][:60] % 3)
    (folder / "class 1" / "bröken.png").write_bytes(b"\x89PNG but no more")
    return folder


def test_an_old_model_is_reported_on_as_it_is_in_a_new_numbered_folder(scan_checkpoint, photos, digits, tmp_path):
    np.save(tmp_path / "outside.npy", 255 - digits[0][:20])
    words = ["--model", scan_checkpoint, "--data", photos, "--ood", "outside.npy", "--device", "cpu"]
    done = succeed("evaluate", *words, cwd=tmp_path)
    folder = tmp_path / "cdc-runs" / "model-evaluation-1"
    assert names_in(folder) == FILES
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert (report["images"], report["classes"], report["model"]["heads"]) == (60, 3, 1)
    assert [entry["image"] for entry in report["skipped"]] == ["class 1/bröken.png"]
    assert list(report["outside"][0]["scores"]) == ["model", "distance"]
    assert "the model as it is" in done.stdout
    assert "told from 20 images of outside.npy" in done.stdout
    assert f"report: {Path('cdc-runs', 'model-evaluation-1', 'report.html')}" in done.stdout
    assert "skipped class 1/bröken.png" in done.stderr
    assert 'src="http' not in (folder / "report.html").read_text(encoding="utf-8")


def test_models_are_put_side_by_side_each_with_its_own_report(scan_checkpoint, photos, tmp_path):
    words = ["--compare", scan_checkpoint, scan_checkpoint, "--names", "one", "two", "--data", photos, "--no-labels"]
    done = succeed("evaluate", *words, "--out", "both", "--device", "cpu", "--quiet", cwd=tmp_path)
    assert done.stderr == ""
    assert names_in(tmp_path / "both") == {"one", "two", "report.html", "report.json"}
    assert names_in(tmp_path / "both" / "one") == names_in(tmp_path / "both" / "two") == FILES
    assert "one: the model as it is" in done.stdout
    assert "ACC" not in done.stdout


def test_mistakes_are_told_in_one_line_and_leave_nothing(
    scan_checkpoint, tiny_checkpoint, photos, tmp_path, monkeypatch, refuse
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "three").mkdir()
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.yaml").write_text("epochs: 9\n")
    for path in sorted(photos.rglob("image*.png"))[:3]:
        (tmp_path / "three" / path.name).write_bytes(path.read_bytes())
    cases = [
        (["--model", "nowhere", "--data", photos], "there is no model nowhere"),
        (["--model", "unfinished"], "cdc-refine --resume --out unfinished"),
        (["--model", tiny_checkpoint, "--data", photos], "no clustering head; refine it first"),
        (["--model", scan_checkpoint], "--data FOLDER"),
        (["--model", scan_checkpoint, "--data", "empty"], "no images in empty"),
        (["--model", scan_checkpoint, "--data", photos, "--ood", "nowhere"], "nothing at nowhere"),
        (["--model", scan_checkpoint, "--data", "three"], "3 readable images, too few to evaluate 4 clusters"),
        (["--model", scan_checkpoint, "--data", photos / "class 1" / "bröken.png"], "none of the 1 images"),
        (["--model", scan_checkpoint, "--data", photos, "--head", "7"], "2 clustering heads"),
    ]
    monkeypatch.chdir(tmp_path)
    for words, reason in cases:
        assert reason in refuse("evaluate", *words, "--quiet", "--device", "cpu")
    assert names_in(tmp_path) == {"empty", "three", "unfinished"}
