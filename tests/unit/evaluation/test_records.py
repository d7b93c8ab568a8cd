import os
import tracemalloc

import numpy as np
import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score

from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.quality import find_trusted
from cdc_plugin.evaluation.records import (
    BLOCK,
    build_prediction_table,
    build_table,
    compute_outlier_columns,
    compute_prediction_columns,
    describe_run,
    measure,
    write_tables,
)
from tests.helpers.commands import read_table

CLUSTERING = np.array([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.5, 0.4, 0.1], [0.0, 0.0, 1.0]], dtype=np.float32)
CALIBRATION = np.array([[0.8, 0.2, 0.0], [0.3, 0.6, 0.1], [0.3, 0.5, 0.2], [0.1, 0.2, 0.7]], dtype=np.float32)
HEADS = ("cluster", "confidence", "clustering_confidence", "second_cluster", "second_confidence")


def test_figures_with_labels_by_hand_and_against_scikit_learn():
    labels = np.array([4, 7, 7, 9])
    kmeans_labels = np.array([0, 0, 1, 2])
    found = measure(CLUSTERING, CALIBRATION, kmeans_labels, labels)
    assert set(found) == {"kmeans", "clustering_head", "calibration_head"}
    assert found["calibration_head"]["ACC"] == 1.0
    assert found["calibration_head"]["CONF"] == pytest.approx(0.65)
    # All four are right, in bins of their own: the distances to 1 are the error.
    assert found["calibration_head"]["ECE"] == pytest.approx((0.2 + 0.4 + 0.5 + 0.3) / 4, abs=1e-6)
    assert found["clustering_head"]["ACC"] == 0.75
    assert found["kmeans"]["NMI"] == pytest.approx(normalized_mutual_info_score(labels, kmeans_labels))
    assert found["kmeans"]["ECE"] is None
    assert found["clustering_head"]["cluster_sizes"] == [2, 1, 1]


def test_without_labels_only_confidence_and_sizes_are_stated():
    found = measure(CLUSTERING, CALIBRATION, np.array([0, 0, 1, 2]), None)
    assert set(found["calibration_head"]) == {"CONF", "cluster_sizes", "bins", "histogram"}
    assert set(found["kmeans"]) == {"cluster_sizes"}
    assert found["calibration_head"]["cluster_sizes"] == [1, 2, 1]


def test_trusted_samples_are_those_of_the_selection():
    sure = np.repeat(np.eye(2, dtype=np.float32), 3, axis=0)
    assert find_trusted(sure).all()
    assert not find_trusted(np.full((4, 4), 0.25, dtype=np.float32)).any()


def test_the_command_takes_the_settings_to_a_new_folder_and_there_is_none_for_what_only_python_can_give(tmp_path):
    run = tmp_path / "my run"
    run.mkdir()
    (run / "config.yaml").write_text("clusters: 2\n")
    described = describe_run(RefineConfig(backbone="moco.pth", data="photos", clusters=2), run)
    assert described["settings"] == "clusters: 2\n"
    assert described["command"] == f"cdc-refine --recipe '{run}/config.yaml' --out '{run}-again'"
    for backbone, data in (("<Backbone>", "photos"), ("moco.pth", "<ndarray>")):
        assert describe_run(RefineConfig(backbone=backbone, data=data, clusters=2), run)["command"] is None


def test_the_table_by_hand():
    table = build_prediction_table(
        ["a/1.png", "b, c.png", "ü.png", "4"], CLUSTERING, CALIBRATION, {"trusted": np.array([True] * 4)}
    )
    assert table.dtype.names == ("path", *HEADS, "trusted")
    assert build_prediction_table(["0", "1", "2", "3"], CLUSTERING, CALIBRATION).dtype.names == ("index", *HEADS)
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


def test_an_outlier_lies_beyond_the_limit():
    prototypes = Prototypes(torch.tensor([[1.0, 0.0]]), torch.eye(2), limit=1.0)
    columns = compute_outlier_columns(prototypes, torch.tensor([[5.0, 0.0], [0.0, 3.0]]))
    assert columns["distance"].tolist() == pytest.approx([0.0, 2**0.5], abs=1e-3)
    assert columns["outlier"].tolist() == [False, True]


def test_the_csv_reads_back_with_commas_quotes_and_unicode_in_names_and_bytes_that_are_no_text(tmp_path):
    names = ['say "cheese".png', "a, b.png", "größe 漢字.png", os.fsdecode(b"\xff\xfe.png")]
    trusted = np.array([True, False, True, False])
    table = build_prediction_table(names, CLUSTERING, CALIBRATION, {"trusted": trusted})
    write_tables(tmp_path / "p.csv", [table])
    rows = read_table(tmp_path / "p.csv")
    assert [row["path"] for row in rows] == names
    assert [row["trusted"] for row in rows] == ["1", "0", "1", "0"]
    assert rows[0]["confidence"] == "0.800000"
    assert rows[0]["cluster"] == "0"


@pytest.mark.parametrize("rows", [0, 1, BLOCK, BLOCK + 1])
def test_a_table_of_any_length_is_written_whole(tmp_path, rows):
    write_tables(tmp_path / "p.csv", [build_table([str(row) for row in range(rows)], {"cluster": np.arange(rows)})])
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines == ["index,cluster", *(f"{row},{row}" for row in range(rows))]


def test_a_table_that_cannot_be_written_is_told_in_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        write_tables(tmp_path / "missing" / "p.csv", [build_table(["a"], {"cluster": np.array([0])})])


def test_the_order_of_clusters_is_found_in_parts_of_little_memory():
    probabilities = torch.rand(60_000, 50, generator=torch.Generator().manual_seed(0)).numpy()
    tracemalloc.start()
    columns = compute_prediction_columns(probabilities, probabilities)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < probabilities.nbytes
    order = np.argsort(-probabilities, axis=1, kind="stable")
    np.testing.assert_array_equal(columns["cluster"], order[:, 0])
    np.testing.assert_array_equal(columns["second_cluster"], order[:, 1])
