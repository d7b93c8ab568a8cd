"""Records to rows: order, means and deviations worked out by hand, and what is undefined or missing."""

import math
from typing import Any

import pytest

from cdc_plugin.comparison.export import to_markdown
from cdc_plugin.comparison.table import Value, collect, summarise
from cdc_plugin.metrics.over_seeds import COSTS, columns_of, deviation_words, mean_words


def record(method: str, seed: int = 0, set_: str = "digits", **more: Any) -> dict[str, Any]:
    figures = {"ACC": 0.9, "NMI": 0.8, "ARI": 0.7, "ECE": 0.1, "AUROC": 0.9, "AURC": 0.02, "FPR95": 0.3, "CONF": 0.95}
    facts = {"set": set_, "method": method, "group": "opponents", "uses_labels": False, "seed": seed, "labels": True}
    rows = [{"label": method.upper(), "figures": figures}]
    return {**facts, "rows": rows, "selected": None, "seconds": 41.0, **more}


@pytest.mark.parametrize(
    ("accuracies", "mean", "deviation", "defined"),
    [
        # Squared distances .0009, .0001 and .0016, their sum .0026 over 2.
        ([0.90, 0.92, 0.97], 0.93, math.sqrt(0.0013), 3),
        ([0.9, None, 0.8, math.nan], 0.85, 0.1 / math.sqrt(2), 2),
    ],
)
def test_mean_and_deviation_over_the_seeds_in_which_a_figure_is_defined(accuracies, mean, deviation, defined):
    rows = [[{"label": "row", "figures": {"ACC": accuracy, "CONF": 0.5}}] for accuracy in accuracies]
    (row,) = collect([record("a", seed, rows=own) for seed, own in enumerate(rows)], ["a"])
    assert row.seeds == len(accuracies)
    assert row.values["ACC"] == Value(pytest.approx(mean), pytest.approx(deviation), defined)
    assert row.values["ECE"] is None
    assert summarise([0.5]) == Value(0.5, None, 1)


def test_methods_come_in_the_order_asked_for_sets_and_heads_in_that_of_the_records():
    two = [{"label": "CDC-Clu", "figures": {}}, {"label": "CDC-Cal", "figures": {}}]
    first = [record("unasked"), record("cdc", rows=two), record("kmeans")]
    others = [record("kmeans", set_="animals"), record("cdc", 1, rows=two)]
    rows = collect([*first, *others], ["kmeans", "failed", "cdc"])
    assert [(row.set, row.label, row.seeds) for row in rows] == [
        ("digits", "KMEANS", 1),
        ("digits", "CDC-Clu", 2),
        ("digits", "CDC-Cal", 2),
        ("digits", "UNASKED", 1),
        ("animals", "KMEANS", 1),
    ]


def test_a_labelled_row_has_these_columns_and_without_labels_confidence_and_sizes_remain():
    (row,) = collect([record("a", selected=0.25)], ["a"])
    figures = ["ACC", "NMI", "ARI", "ECE", "AUROC", "AURC", "FPR95", "CONF"]
    assert list(row.values) == [*figures, "selected", "seconds"]
    assert row.values["selected"] == Value(0.25, None, 1)
    assert row.figures[0]["ACC"] == 0.9  # for the diagrams
    rows = [{"label": "row", "figures": {"CONF": 0.8, "cluster_sizes": [6, 0, 2, 0]}}]
    (row,) = collect([record("a", labels=False, rows=rows)], ["a"])
    assert list(row.values) == ["CONF", "largest_cluster", "empty_clusters", "selected", "seconds"]
    assert row.values["largest_cluster"] == Value(0.75, None, 1)
    assert row.values["empty_clusters"] == Value(2.0, None, 1)


def test_memory_is_a_column_where_it_was_measured_and_the_parameters_where_they_are_asked_for():
    (row,) = collect([record("a", parameters=21_810_000, gpu_memory=None)], ["a"])
    assert "gpu_memory" not in row.values
    rows = collect([record("a", seed, parameters=21_810_000, gpu_memory=5620.0 + seed) for seed in range(2)], ["a"])
    assert columns_of(rows)[-1] == "gpu_memory"
    words = [mean_words(column, rows[0].values[column]) for column in COSTS]
    assert words == ["21.81 M", "5,620 MB"]
    assert all(deviation_words(column, rows[0].values[column]) == "" for column in COSTS)
    assert "21.81 M" in to_markdown(rows, ["parameters"])


def with_outside(*sources: str) -> dict[str, Any]:
    scores = {"AUROC": 0.75, "FPR95": None, "AUPR": 0.6}
    outside = [{"data": data, "images": 5, "scores": scores} for data in sources]
    return record("a", rows=[{"label": "A", "figures": {}, "outside": outside}])


def test_outside_data_add_columns_under_short_names_unless_two_would_be_the_same():
    (row,) = collect([with_outside("sets/textures.npz", "holiday.photos")], ["a"])
    assert list(row.values)[-4:] == ["AUROC textures", "FPR95 textures", "AUROC holiday.photos", "FPR95 holiday.photos"]
    assert (row.values["AUROC textures"], row.values["FPR95 textures"]) == (Value(0.75, None, 1), None)
    (row,) = collect([with_outside("one/x.npz", "two/x.npz")], ["a"])
    assert {"AUROC one/x.npz", "AUROC two/x.npz"} < set(row.values)
