import numpy as np
import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score

from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.evaluation.quality import find_trusted
from cdc_plugin.evaluation.records import describe_run, measure

CPU = torch.device("cpu")
CLUSTERING = np.array([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.5, 0.4, 0.1], [0.0, 0.0, 1.0]], dtype=np.float32)
CALIBRATION = np.array([[0.8, 0.2, 0.0], [0.3, 0.6, 0.1], [0.3, 0.5, 0.2], [0.1, 0.2, 0.7]], dtype=np.float32)


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


def test_the_command_takes_the_settings_of_the_run_to_a_new_folder(tmp_path):
    config = RefineConfig(backbone="moco.pth", data="photos", clusters=2)
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run" / "config.yaml").write_text("clusters: 2\n")
    described = describe_run(config, tmp_path / "my run")
    assert described["settings"] == "clusters: 2\n"
    command = described["command"]
    assert command == f"cdc-refine --recipe '{tmp_path}/my run/config.yaml' --out '{tmp_path}/my run-again'"


@pytest.mark.parametrize("given", [{"backbone": "<Backbone>"}, {"data": "<ndarray>"}])
def test_what_only_python_can_give_has_no_command(tmp_path, given):
    config = RefineConfig(**{"backbone": "moco.pth", "data": "photos", "clusters": 2, **given})
    (tmp_path / "config.yaml").touch()
    assert describe_run(config, tmp_path)["command"] is None
