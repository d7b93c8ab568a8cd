"""``cdc-compare`` as people type it: in two processes, killed and started again, and mistyped."""

import json

import numpy as np
import pytest

from tests.helpers.commands import end_when, read_table, succeed

SMALL = ["hidden=16", "batch_size=60", "sub_batch_size=30", "--device", "cpu"]


@pytest.fixture(scope="module")
def images(digits, tmp_path_factory):
    path = tmp_path_factory.mktemp("Bilder für Ömer") / "some digits.npz"
    np.savez(path, x=digits[0][:90], y=digits[1][:90])
    return path


def test_a_grid_runs_in_two_processes_and_goes_on_after_it_was_killed(tiny_checkpoint, images, tmp_path):
    words = ["--backbone", tiny_checkpoint, "--data", images, "--clusters", 4, "--epochs", 2, "--jobs", 2]
    words += ["--methods", "kmeans,scan3,cdc,single-head", "--seeds", 2, "--out", tmp_path / "grid", *SMALL]
    cells = "grid/cells/*/*/*.json"
    end_when(lambda: len(list(tmp_path.glob(cells))) >= 3, "compare", *words)
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob(cells)}
    assert 3 <= len(finished) < 10

    done = succeed("compare", *words)
    records = {path: path.stat().st_mtime_ns for path in tmp_path.glob(cells)}
    # Two seeds of four methods, and SCAN-2, which SCAN-3 goes on with. Its model may have to be made again.
    assert len(records) == 10
    again = {path.parent.name for path, written in finished.items() if records[path] != written}
    assert again <= {"scan2"}
    labels = ["k-means", "SCAN-2", "SCAN-3", "CDC-Clu", "CDC-Cal", "single head (Clu)"]
    assert all(label in done.stdout for label in labels)
    assert f"results: {tmp_path / 'grid'} (open report.html in a browser)" in done.stdout
    assert [(row["label"], row["seeds"]) for row in read_table(tmp_path / "grid" / "table.csv")] == [
        (label, "2") for label in labels
    ]
    page = (tmp_path / "grid" / "report.html").read_text(encoding="utf-8")
    assert 'src="http' not in page
    assert "<script" not in page
    assert "SCAN-3" in (tmp_path / "grid" / "table.md").read_text(encoding="utf-8")
    assert "\\begin{tabular}" in (tmp_path / "grid" / "table.tex").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "grid" / "report.json").read_text(encoding="utf-8"))["failures"] == []


def test_two_sets_of_images_stand_in_one_table(tiny_checkpoint, images, digits, tmp_path):
    np.save(tmp_path / "others.npy", 255 - digits[0][:60])
    words = ["--backbone", tiny_checkpoint, "--data", images, "others.npy", "--clusters", 4, 3, "epochs=1"]
    succeed("compare", *words, "--methods", "kmeans,cdc", "--seeds", 1, "--jobs", 1, *SMALL, cwd=tmp_path)
    rows = read_table(tmp_path / "cdc-runs" / "compare-some-digits-1" / "table.csv")
    assert list(dict.fromkeys(row["set"] for row in rows)) == ["some digits", "others"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--methods", "cdd"], "no method 'cdd': did you mean 'cdc'?"),
        (["--methods", "cdc"], "missing --backbone, --data"),
        (["--full"], "--full runs a recipe on the data sets of the paper"),
        (["--recipe", "tables/main", "--full"], "--backbone 'checkpoints/{set}.ckpt'"),
        (["--methods", "cdc", "--backbone", "b.pt", "--data", "x.npz", "--clusters", "ten"], "takes whole numbers"),
        (["--methods", "cdc", "--backbone", "nowhere.pt", "--data", "x.npz", "--clusters", "3"], "nowhere.pt"),
        (["--demo", "--methods", "cdc", "--jobs", "0"], "--jobs must be at least 1"),
    ],
)
def test_mistakes_cost_one_line_and_leave_nothing_behind(words, expected, refuse, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in refuse("compare", *words, "--quiet")
    assert not list(tmp_path.rglob("*"))


def test_methods_and_recipes_are_listed():
    methods = succeed("compare", "--list-methods").stdout
    for name in (
        "kmeans",
        "scan3",
        "spice",
        "cc",
        "secu",
        "flexmatch",
        "cdc+gsf",
        "temperature",
        "no-stop-gradient",
        "temi",
        "hdbscan",
    ):
        assert f"  {name} " in methods
    assert len(succeed("compare", "--list-recipes").stdout.splitlines()) == 8
