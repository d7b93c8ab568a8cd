"""Cells are run once, with common features and heads, and give what the stage itself gives."""

import json
from pathlib import Path

import numpy as np
import pytest

import cdc_plugin
from cdc_plugin import load_backbone
from cdc_plugin.comparison import datasets
from cdc_plugin.comparison import grid as grids
from cdc_plugin.comparison.cell import build_cell, read_record, slugify
from cdc_plugin.comparison.datasets import DatasetRequest, open_dataset
from cdc_plugin.comparison.methods import HEADLESS, METHODS, find_method
from cdc_plugin.comparison.run import MethodComparison, compare_methods
from cdc_plugin.comparison.train import TRAININGS
from cdc_plugin.errors import UserError
from tests.helpers.json_records import check_record

SETTINGS = {"epochs": 1, "hidden": 16, "batch_size": 60, "sub_batch_size": 30, "device": "cpu"}
ALL = [name for name in METHODS if name != "old"]


@pytest.fixture(scope="module")
def images(digits, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("images") / "some.npz"
    np.savez(path, x=digits[0][:90], y=digits[1][:90])
    return path


def compare(checkpoint: Path, images: Path, methods, out: Path, seeds: int = 1, **changes) -> MethodComparison:
    return compare_methods(checkpoint, images, methods, seeds, 4, out, **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def everything(tiny_checkpoint, images, tmp_path_factory) -> tuple[MethodComparison, Path]:
    """All methods, once."""
    out = tmp_path_factory.mktemp("comparison") / "all"
    outside = tmp_path_factory.mktemp("outside") / "noise.npz"
    np.savez(outside, x=np.random.default_rng(0).integers(0, 255, (20, 32, 32, 3), dtype=np.uint8))
    methods = [*ALL, "scan2+cdc", "cdc:hidden=8", "cdc:batch_size=50%:mini_clusters=10%"]
    return compare(tiny_checkpoint, images, methods, out, outside=[str(outside)]), out


def test_every_method_ends_in_a_row_with_figures_and_scores_outside_images_if_it_has_heads(everything):
    compared, _ = everything
    assert compared.failures == {}
    labels = [row.label for row in compared.rows]
    assert {"CDC-Clu", "CDC-Cal", "SCAN-2 + CDC", "k-means", "CDC-Cal, H 8", "CDC-Cal, B 50%, K 10%"} <= set(labels)
    for row in compared.rows:
        assert row.values["ACC"] is not None, row.label
        assert (row.values["ECE"] is None) is (row.method in HEADLESS - {"gmm"})
        assert row.uses_labels is (row.method in ("temperature", "linear", "supervised"))
    scored = {row.method for row in compared.rows if row.values.get("AUROC noise") is not None}
    assert scored == {row.method for row in compared.rows} - HEADLESS - {"temperature", "pseudocal"}


def test_the_result_folder_holds_tables_cells_a_page_and_what_all_methods_share(everything, tiny_checkpoint):
    _, out = everything
    tables = {"table.csv", "table.md", "table.tex", "cells.csv"}
    others = {"cells", "comparison.json", "report.html", "report.json", "shared", "train.log"}
    assert {path.name for path in out.iterdir()} == tables | others
    record = json.loads((out / "cells" / "some" / "cdc" / "seed0.json").read_text(encoding="utf-8"))
    assert [row["label"] for row in record["rows"]] == ["CDC-Clu", "CDC-Cal"]
    assert record["settings"]["clusters"] == 4
    model = load_backbone(tiny_checkpoint)
    head = 16 * (model.feature_dim + 1) + 2 * 16 + 4 * 17  # linear, BatchNorm, linear
    assert record["parameters"] == sum(weight.numel() for weight in model.parameters()) + 2 * head
    assert record["gpu_memory"] is None
    for name, kind in (("report.json", "method_comparison"), ("comparison.json", "comparison_settings")):
        check_record(json.loads((out / name).read_text(encoding="utf-8")), kind)
    assert not list(out.glob("cells/*/*/seed0/"))  # models that were kept for a second stage are gone
    # All methods of a seed start from the same heads, features and views.
    records = [json.loads(path.read_text(encoding="utf-8")) for path in out.glob("cells/some/*/seed0.json")]
    assert len({json.dumps(record["settings"]["augment"]) for record in records}) == 1
    for name in ("start-seed0.pt", "features-*.pt"):
        assert len(list((out / "shared" / "some").glob(name))) == 1


def test_a_cell_of_cdc_is_the_run_that_the_stage_makes(everything, tiny_checkpoint, images, tmp_path):
    _, out = everything
    report = cdc_plugin.refine(tiny_checkpoint, images, 4, out=tmp_path / "run", seed=0, level="learned", **SETTINGS)
    record = read_record(build_cell(out, "some", find_method("cdc"), 0))
    assert record is not None
    for row, head in zip(record["rows"], ("clustering_head", "calibration_head"), strict=True):
        assert row["figures"] == report.metrics["after"][head]


def test_the_images_themselves_are_refused_as_images_from_outside(tiny_checkpoint, images, tmp_path):
    others = tmp_path / "copy.npz"
    with np.load(images) as archive:
        np.savez(others, x=archive["x"])  # without labels: other labels are no other images
    with pytest.raises(UserError, match="these are the images of some itself"):
        compare(tiny_checkpoint, images, "cdc", tmp_path / "grid", outside=[str(others)])


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The methods of the cells that were run."""
    names: list[str] = []
    original = grids.run_cell
    monkeypatch.setattr(grids, "run_cell", lambda cell, *rest: (names.append(cell.method.name), original(cell, *rest)))
    return names


def test_a_restart_repeats_no_finished_cell_and_runs_the_others(tiny_checkpoint, images, tmp_path, ran):
    first, again = (compare(tiny_checkpoint, images, "kmeans,cdc", tmp_path / "grid") for _ in range(2))
    assert ran == ["kmeans", "cdc"]
    assert again.rows == first.rows
    more = compare(tiny_checkpoint, images, "kmeans,cdc,single-head", tmp_path / "grid", seeds=2)
    assert len(ran) == 6
    assert [row.seeds for row in more.rows] == [2, 2, 2, 2]


def test_a_second_stage_runs_its_first_again_only_where_the_model_is_gone(tiny_checkpoint, images, tmp_path, ran):
    for method in ("scan2", "scan3", "scan3"):
        compare(tiny_checkpoint, images, method, tmp_path / "grid")
    assert ran == ["scan2", "scan2", "scan3"]


def test_a_frozen_backbone_computes_its_views_once_for_all_seeds(tiny_checkpoint, images, tmp_path, monkeypatch):
    made: list[object] = []
    views = datasets.view_features
    monkeypatch.setattr(datasets, "view_features", lambda *rest: (made.append(1), views(*rest))[1])
    plain = compare(
        tiny_checkpoint, images, "temi,turtle,gmm,spectral,hdbscan", tmp_path / "grid", freeze_backbone=True
    )
    assert (plain.failures, made) == ({}, [])
    methods = "cdc,scan2,scan3,spice,cc,secu,dcboost,pseudocal"
    compared = compare(tiny_checkpoint, images, methods, tmp_path / "grid", freeze_backbone=True, seeds=2)
    assert (compared.failures, made) == ({}, [1])
    assert not list((tmp_path / "grid" / "shared").glob("*/views-*"))  # they can be large


def test_without_labels_sizes_and_confidence_are_compared_and_references_refused(tiny_checkpoint, images, tmp_path):
    with pytest.raises(UserError, match="linear need labels"):
        compare(tiny_checkpoint, images, "cdc,linear", tmp_path / "grid", labels=False)
    assert not (tmp_path / "grid").exists()
    compared = compare(tiny_checkpoint, images, "kmeans,cdc", tmp_path / "grid", labels=False)
    assert all("ACC" not in row.values for row in compared.rows)
    assert compared.rows[-1].values["CONF"] is not None


def test_references_are_left_out_where_the_images_have_no_labels(tiny_checkpoint, digits, tmp_path, caplog):
    np.save(tmp_path / "bare.npy", digits[0][:60])
    with caplog.at_level("WARNING"):
        compared = compare(tiny_checkpoint, tmp_path / "bare.npy", "linear,kmeans,supervised", tmp_path / "grid")
    assert compared.failures == {}
    assert [row.method for row in compared.rows] == ["kmeans"]
    assert "bare has no labels, so linear, supervised are left out" in caplog.text


def test_a_method_that_fails_costs_its_second_stage_and_no_other(tiny_checkpoint, images, tmp_path, monkeypatch):
    def fail(bench):
        raise UserError("no luck")

    monkeypatch.setitem(TRAININGS, "scan2", fail)
    compared = compare(tiny_checkpoint, images, "old,scan2+cdc,kmeans", tmp_path / "grid")
    names = [f"some, {method}, seed 0" for method in ("old", "scan2", "scan2+cdc")]
    assert list(compared.failures) == names
    assert compared.failures[names[1]] == "no luck"
    assert "scan2" in compared.failures[names[2]]
    assert [row.method for row in compared.rows] == ["kmeans"]


def test_other_settings_in_the_same_folder_are_refused_and_named(tiny_checkpoint, images, tmp_path):
    compare(tiny_checkpoint, images, "kmeans", tmp_path / "grid")
    with pytest.raises(UserError, match=r"other settings for some \(epochs\)"):
        compare(tiny_checkpoint, images, "kmeans", tmp_path / "grid", epochs=2)
    compare(tiny_checkpoint, images, "kmeans", tmp_path / "grid", epochs=2, overwrite=True)


DEEP = b"[" * 20_000


@pytest.mark.parametrize(
    ("file", "content"), [("comparison.json", DEEP), ("comparison.json", b"{}"), ("cells", DEEP), ("shared", b"PK")]
)
def test_a_damaged_file_of_a_comparison_is_refused_and_named(tiny_checkpoint, images, tmp_path, file, content):
    compare(tiny_checkpoint, images, "cdc", tmp_path)
    victim = {
        "comparison.json": tmp_path / "comparison.json",
        "cells": build_cell(tmp_path, "some", find_method("cdc"), 0).path,
        "shared": next(tmp_path.glob("shared/*/start-*.pt")),
    }[file]
    victim.write_bytes(content)
    with pytest.raises(UserError, match=f"{victim.name} cannot be read"):
        compare(tiny_checkpoint, images, "cdc,kmeans", tmp_path)


def test_a_folder_that_holds_something_else_is_left_alone(tiny_checkpoint, images, tmp_path):
    (tmp_path / "mine.txt").write_text("precious", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"holds no comparison but mine\.txt"):
            compare(tiny_checkpoint, images, "kmeans", tmp_path, overwrite=overwrite)
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "precious"


def test_a_mistyped_outside_set_is_refused_before_any_cell_runs(tiny_checkpoint, images, tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.npz"):
        compare(tiny_checkpoint, images, "cdc", tmp_path / "grid", outside=["nowhere.npz"])
    assert not list((tmp_path / "grid").glob("cells/*/*/*.json"))


def test_cells_have_a_share_of_the_epochs_of_a_run_unless_the_user_says_how_many(tiny_checkpoint, images, tmp_path):
    def epochs(**changes) -> int:
        flags = {"backbone": str(tiny_checkpoint), "data": str(images), "clusters": 4, **changes}
        opened = open_dataset(DatasetRequest("some", flags=flags), tmp_path)
        return opened.resolve_settings([], 0, ()).epochs

    assert epochs() == 60  # of 100, for so few images
    assert epochs(epochs=7) == 7


def test_names_that_no_file_system_takes_stay_distinct():
    names = ["cdc", "cdc:hidden=8", "cdc:hidden=8%", "a/b", "a\\b", "..", "x" * 200, "x" * 201]
    slugs = [slugify(name) for name in names]
    assert len(set(slugs)) == len(slugs)
    assert all("/" not in s and "\\" not in s and s not in (".", "..", "") and len(s) < 80 for s in slugs)
