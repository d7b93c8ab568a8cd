"""The tree of clusters and the page of new kinds."""

import re

import numpy as np
import pytest

from cdc_plugin.evaluation.records import build_prediction_table
from cdc_plugin.report.gallery import ClusterCard, Thumbnail
from cdc_plugin.report.kinds_page import render_kinds
from cdc_plugin.report.page_data import ClusterFigures
from cdc_plugin.report.tree import MOST_ROWS, UNFOLDED, draw_trees
from tests.helpers.html_page import Page

HOSTILE = "<script>alert('x')</script>"
RECORD = {"merges": [[1, 4], [0, 2], [0, 1], [0, 3]], "distances": [0.1, 0.2, 0.3, 0.4]}


def card(number: int) -> ClusterCard:
    pictures = [Thumbnail(f"data:{number}-{turn}", f"{number}", "") for turn in range(5)]
    return ClusterCard(number, "", "", None, None, pictures, [], [])


def chain(clusters: int) -> dict:
    merges = [[0, number] for number in range(1, clusters)]
    return {"merges": merges, "distances": np.linspace(0, 1, clusters - 1).tolist()}


def test_rows_are_clusters_in_an_order_in_which_no_branches_cross():
    figures = [
        ClusterFigures(size, 0.9, name) for size, name in ((3, "a"), (1, None), (5, "b"), (2, "a"), (4, HOSTILE))
    ]
    (tree,) = draw_trees(RECORD, figures, [card(number) for number in range(4)])
    assert [row.clusters for row in tree.rows] == [[0], [2], [1], [4], [3]]
    assert [row.name for row in tree.rows][:2] == ["a", "b"]
    assert tree.rows[0].size == "3\u00a0images"
    assert [len(row.pictures) for row in tree.rows] == [3, 3, 3, 0, 3]
    heights = {height for x1, x2, height in re.findall(r'x1="([\d.]+)%" x2="([\d.]+)%" y1="([\d.]+)"', tree.drawing)}
    assert len(heights) >= 5


@pytest.mark.parametrize("level", range(1, 6))
def test_the_line_of_a_level_crosses_as_many_branches(level):
    (tree,) = draw_trees(RECORD, [ClusterFigures(1, 0.9)] * 5, [])
    place = 100 * (level - 0.5) / 5
    branches = re.findall(r'x1="([\d.]+)%" x2="([\d.]+)%" y1="([\d.]+)" y2="([\d.]+)" class="branch"', tree.drawing)
    crossed = [x1 for x1, x2, y1, y2 in branches if float(x1) < place < float(x2) and y1 == y2]
    assert len(crossed) == level


def test_many_clusters_have_a_coarse_tree_first_and_very_many_no_more_rows_than_can_be_read():
    for clusters in (UNFOLDED + 1, MOST_ROWS + 50):
        trees = draw_trees(chain(clusters), [ClusterFigures(1, 0.9)] * clusters, [card(number) for number in range(9)])
        assert [len(tree.rows) for tree in trees] == [UNFOLDED, min(clusters, MOST_ROWS)]
        for tree in trees:
            assert sorted(number for row in tree.rows for number in row.clusters) == list(range(clusters))
            labels = [int(label) for label in re.findall(r">(\d+)</text>", tree.drawing)]
            assert labels[0] == 1
            assert len(labels) < 25
    largest = max(trees[0].rows, key=lambda row: len(row.clusters))
    assert len({picture.name for picture in largest.pictures}) == 3  # one of each of its clusters


def test_without_a_hierarchy_there_is_no_tree():
    assert draw_trees(None, [ClusterFigures(1, 0.9)], []) == []
    assert draw_trees({"merges": [], "distances": []}, [ClusterFigures(1, 0.9)], []) == []


def page_of(read, kinds: list[int]) -> Page:
    probabilities = np.eye(3, dtype=np.float32)[np.arange(len(kinds)) % 3]
    more = {"outlier": np.array(kinds) == 0, "new_kind": np.array(kinds)}
    names = [f"{HOSTILE}{number}" for number in range(len(kinds))]
    table = build_prediction_table(names, probabilities, probabilities, more)
    distance = np.arange(len(kinds), dtype=np.float32)
    return Page(render_kinds(table, distance, read, [("images", HOSTILE)], "cdc-refine --init grow"))


def test_the_page_of_new_kinds_is_complete_in_itself_and_says_what_to_type():
    asked = []

    def read(rows):
        asked.extend(rows.tolist())
        return [np.full((8, 8, 3), row, np.uint8) for row in rows]

    page = page_of(read, [0] * 40 + [1] * 12 + [-1] * 20)
    assert {"kind-0", "kind-1"} <= set(page.ids)
    assert "cdc-refine --init grow" in page.text
    assert "40 images" in page.text.replace("\u00a0", " ")
    assert asked == sorted(set(asked))
    assert set(range(16)) | set(range(32, 40)) <= set(asked)  # typical and least typical of the first
    assert all(target.startswith("data:") for target in page.fetched)
    assert HOSTILE not in page.html


def test_new_kinds_of_samples_without_pictures_are_named():
    page = page_of(lambda rows: [None] * len(rows), [0] * 12)
    assert "12 samples" in page.text.replace("\u00a0", " ")
    assert "<img" not in page.html
