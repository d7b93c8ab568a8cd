"""The tables of a page: which figures they show, and which of them are marked."""

from cdc_plugin.report.tables import before_after_table, outside_rows, side_by_side_table
from cdc_plugin.report.words import TITLES

SCORES = {"AUROC": 0.9, "FPR95": 0.2, "AUPR": 0.8}


def test_the_better_figure_is_marked_by_a_sign_and_equals_are_not():
    before, after = (
        {"ACC": 0.9, "ECE": 0.1, "NMI": 0.5, "CONF": 0.2},
        {"ACC": 0.8, "ECE": 0.05, "NMI": 0.50001, "CONF": 1},
    )
    table = before_after_table([("head", before, after)])
    marks = {measure.key: [cell.better for cell in cells] for measure, cells in table.rows}
    assert marks == {"ACC": [True, False], "ECE": [False, True], "NMI": [False, False], "CONF": [False, False]}


def test_unknown_figures_are_dashes_and_rows_that_nobody_has_are_left_out():
    table = before_after_table([("k-means", {"ACC": 0.5, "ECE": None}, None), ("head", {"ECE": 0.1}, {"ECE": 0.2})])
    assert [column.parts for column in table.columns] == [[""], ["before", "after"]]
    assert [(measure.key, [cell.words for cell in cells]) for measure, cells in table.rows] == [
        ("ACC", ["50.0\u00a0%", "–", "–"]),
        ("ECE", ["–", "10.0\u00a0%", "20.0\u00a0%"]),
    ]


def test_side_by_side_marks_the_best_of_all_models():
    table = side_by_side_table([("a", [("h", {"ACC": 0.5}), ("i", {"ACC": 0.7})]), ("b", [("h", {"ACC": 0.7})])])
    [(_, cells)] = table.rows
    assert [cell.better for cell in cells] == [False, True, True]


def test_outside_scores_are_compared_within_one_data_set():
    entry = {
        "data": "a",
        "images": 1000,
        "scores": {"model": SCORES, "distance": {**SCORES, "FPR95": 0.1, "AUPR": None}},
    }
    rows = outside_rows([("m", [entry, {**entry, "data": "b", "scores": {"model": SCORES}}])])
    assert [(row.data, row.images, row.score) for row in rows] == [
        ("a", "1,000", TITLES["model"]),
        ("a", "1,000", "distance"),
        ("b", "1,000", TITLES["model"]),
    ]
    assert [[cell.better for cell in row.cells] for row in rows] == [[False] * 3, [False, True, False], [False] * 3]
    assert rows[1].cells[2].words == "–"
