"""Numbers, tables and sentences as people read them."""

import numpy as np
import pytest

from cdc_plugin.metrics.confidence import accept_to_target
from cdc_plugin.report.page_data import ClusterFigures
from cdc_plugin.report.words import (
    TARGET,
    TITLES,
    before_after_table,
    describe_clusters,
    describe_interval,
    headline,
    outside_rows,
    shorten,
    side_by_side_table,
)

SCORES = {"AUROC": 0.9, "FPR95": 0.2, "AUPR": 0.8}


@pytest.mark.parametrize(
    ("confidence", "said"),
    [
        ([0.99, 0.97], "All 2 images can be used at 95 % expected accuracy; over all images 98.0 % is expected."),
        ([0.99, 0.93, 0.3], "2 of 3 images (66.7 %) can be used at 95 %"),
        ([0.99, 0.3, 0.3], "Only 1 of 3 images (33.3 % of them) can be used"),
        ([0.5, 0.25], "None of the 2 images can be used at 95 % expected accuracy: the surest one has 50.0 %"),
        ([0.95], "The only image can be used"),
    ],
)
def test_the_headline_says_plainly_how_many_images_can_be_used(confidence, said):
    accepted = accept_to_target(np.array(confidence), TARGET).count
    assert said in headline(np.array(confidence), accepted).replace("\u00a0", " ")


def test_the_headline_states_the_interval_where_one_is_known():
    card = {"expected_low": 0.7, "expected_high": 0.861}
    said = headline(np.array([0.99, 0.3]), 1, describe_interval(card)).replace("\u00a0", " ")
    assert "over all images 64.5 % (70–86 %) is expected" in said
    assert describe_interval({"expected_low": None}) == ""


def test_clusters_that_stand_out_are_named():
    clusters = [ClusterFigures(3, 0.5), ClusterFigures(0), ClusterFigures(9, 0.75)]
    words = describe_clusters(clusters).replace("\u00a0", " ")
    assert "largest is 2 with 9 images, the smallest 0 with 3" in words
    assert "least sure is 0 with 50.0 %" in words
    assert "1 cluster is empty: 1." in words


def test_long_text_keeps_its_beginning_and_its_end():
    assert shorten("abcdefghij", 7) == "ab…ghij"
    assert shorten("abc", 3) == "abc"


def test_the_better_figure_is_marked_by_a_sign_and_equals_are_not():
    before = {"ACC": 0.9, "ECE": 0.1, "NMI": 0.5, "CONF": 0.2}
    after = {"ACC": 0.8, "ECE": 0.05, "NMI": 0.50001, "CONF": 1}
    table = before_after_table([("head", before, after)])
    marks = {key: [cell.better for cell in cells] for key, _, cells in table.rows}
    assert marks == {"ACC": [True, False], "ECE": [False, True], "NMI": [False, False], "CONF": [False, False]}
    models = [("a", [("h", {"ACC": 0.5}), ("i", {"ACC": 0.7})]), ("b", [("h", {"ACC": 0.7})])]
    [(_, _, cells)] = side_by_side_table(models).rows  # the best of all models
    assert [cell.better for cell in cells] == [False, True, True]


def test_unknown_figures_are_dashes_and_rows_that_nobody_has_are_left_out():
    table = before_after_table([("k-means", {"ACC": 0.5, "ECE": None}, None), ("head", {"ECE": 0.1}, {"ECE": 0.2})])
    assert [parts for _, parts in table.columns] == [[""], ["before", "after"]]
    assert [(key, [cell.words for cell in cells]) for key, _, cells in table.rows] == [
        ("ACC", ["50.0\u00a0%", "–", "–"]),
        ("ECE", ["–", "10.0\u00a0%", "20.0\u00a0%"]),
    ]


def test_outside_scores_are_compared_within_one_data_set():
    both = {"model": SCORES, "distance": {**SCORES, "FPR95": 0.1, "AUPR": None}}
    entry = {"data": "a", "images": 1000, "scores": both}
    rows = outside_rows([("m", [entry, {**entry, "data": "b", "scores": {"model": SCORES}}])])
    assert [(row.data, row.images, row.score) for row in rows] == [
        ("a", "1,000", TITLES["model"]),
        ("a", "1,000", "distance"),
        ("b", "1,000", TITLES["model"]),
    ]
    assert [[cell.better for cell in row.cells] for row in rows] == [[False] * 3, [False, True, False], [False] * 3]
    assert rows[1].cells[2].words == "–"
