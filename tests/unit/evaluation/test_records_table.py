import csv

import numpy as np
import pytest
import torch

from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.records import (
    BLOCK,
    add_column,
    build_prediction_table,
    build_table,
    compute_outlier_columns,
    compute_prediction_columns,
    write_tables,
)

CLUSTERING = np.array([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.5, 0.4, 0.1], [0.0, 0.0, 1.0]], dtype=np.float32)
CALIBRATION = np.array([[0.8, 0.2, 0.0], [0.3, 0.6, 0.1], [0.3, 0.5, 0.2], [0.1, 0.2, 0.7]], dtype=np.float32)
HEADS = ("cluster", "confidence", "clustering_confidence", "second_cluster", "second_confidence")


def test_the_table_by_hand():
    table = build_prediction_table(
        ["a/1.png", "b, c.png", "ü.png", "4"], CLUSTERING, CALIBRATION, {"trusted": np.array([True] * 4)}
    )
    assert table.dtype.names == ("path", *HEADS, "trusted")
    assert table["cluster"].tolist() == [0, 1, 1, 2]
    assert table["second_cluster"].tolist() == [1, 0, 0, 1]
    np.testing.assert_allclose(table["confidence"], [0.8, 0.6, 0.5, 0.7], rtol=1e-6)
    np.testing.assert_allclose(table["second_confidence"], [0.2, 0.3, 0.3, 0.2], rtol=1e-6)
    np.testing.assert_allclose(table["clustering_confidence"], [0.9, 0.7, 0.5, 1.0], rtol=1e-6)


def test_of_two_clusters_with_the_same_probability_the_lower_number_comes_first():
    columns = compute_prediction_columns(CALIBRATION[:1], np.array([[0.2, 0.4, 0.4]], dtype=np.float32))
    assert (columns["cluster"].item(), columns["second_cluster"].item()) == (1, 2)
    assert columns["confidence"] == columns["second_confidence"]


def test_columns_of_parts_are_parts_of_the_columns():
    probs = np.random.default_rng(0).dirichlet(np.ones(7), 50).astype(np.float32)
    whole = compute_prediction_columns(probs[::-1], probs)
    parts = [compute_prediction_columns(probs[::-1][rows], probs[rows]) for rows in (slice(0, 13), slice(13, 50))]
    for name, column in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), column)


def test_images_without_paths_are_named_by_their_index_and_new_images_have_no_trusted_column():
    assert build_prediction_table(["0", "1", "2", "3"], CLUSTERING, CALIBRATION).dtype.names == ("index", *HEADS)


def test_an_outlier_lies_beyond_the_limit():
    prototypes = Prototypes(torch.tensor([[1.0, 0.0]]), torch.eye(2), limit=1.0)
    columns = compute_outlier_columns(prototypes, torch.tensor([[5.0, 0.0], [0.0, 3.0]]))
    assert columns["distance"].tolist() == pytest.approx([0.0, 2**0.5], abs=1e-3)
    assert columns["outlier"].tolist() == [False, True]


def test_a_column_more_leaves_the_others_as_they_are():
    table = build_prediction_table(["a", "b", "c", "d"], CLUSTERING, CALIBRATION)
    more = add_column(table, "selected", np.array([True, False, True, False]))
    assert more.dtype.names == (*table.dtype.names, "selected")
    assert all((more[name] == table[name]).all() for name in table.dtype.names)
    assert more["selected"].tolist() == [True, False, True, False]


def test_the_csv_reads_back_with_commas_quotes_and_unicode_in_names(tmp_path):
    names = ['say "cheese".png', "a, b.png", "größe 漢字.png", "line\nbreak.png"]
    trusted = np.array([True, False, True, False])
    table = build_prediction_table(names, CLUSTERING, CALIBRATION, {"trusted": trusted})
    write_tables(tmp_path / "p.csv", [table])
    with open(tmp_path / "p.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == names
    assert [row["trusted"] for row in rows] == ["1", "0", "1", "0"]
    assert rows[0]["confidence"] == "0.800000"
    assert rows[0]["cluster"] == "0"


def test_names_that_are_no_valid_text_do_not_lose_the_table(tmp_path):
    name = b"\xff\xfe.png".decode("utf-8", "surrogateescape")  # how Python spells such a file name
    write_tables(tmp_path / "p.csv", [build_prediction_table([name] * 4, CLUSTERING, CALIBRATION)])
    assert b"\xff\xfe.png" in (tmp_path / "p.csv").read_bytes()


@pytest.mark.parametrize("rows", [0, 1, BLOCK, BLOCK + 1])
def test_a_table_of_any_length_is_written_whole(tmp_path, rows):
    write_tables(tmp_path / "p.csv", [build_table([str(row) for row in range(rows)], {"cluster": np.arange(rows)})])
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines == ["index,cluster", *(f"{row},{row}" for row in range(rows))]


def test_a_table_that_cannot_be_written_is_told_in_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        write_tables(tmp_path / "missing" / "p.csv", [build_table(["a"], {"cluster": np.array([0])})])
