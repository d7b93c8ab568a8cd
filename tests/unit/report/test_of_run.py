import numpy as np
import pytest

from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.images import ImageSet
from cdc_plugin.evaluation.prediction_table import build_prediction_table
from cdc_plugin.report.of_run import findings_of_run

PROBS = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], dtype=np.float32)
OLD = {"writer": "SCAN", "clusters": 2, "CONF": 0.99, "agreement_before": 1.0, "agreement_after": 0.9}


def findings(tmp_path, config=None, **metrics):
    heads = {"kmeans": {}, "clustering_head": {"CONF": 0.9}, "calibration_head": {"CONF": 0.8}}
    report = {"clusters": 2, "labels": False, "before": heads, "after": heads, "label_free": {}, "seconds": 3.0}
    images = ImageSet(np.zeros((3, 8, 8, 3), np.uint8), ["a", "b", "c"], skipped=[("d", "broken")], source="photos")
    table = build_prediction_table(images.names, PROBS, PROBS)
    config = config or RefineConfig(backbone="moco.pth", data="photos", clusters=2, epochs=2)
    history = [{"epoch": 1, "seconds": 60.0}, {"epoch": 2, "seconds": 65.2}]
    return findings_of_run(config, tmp_path / "my run", report | metrics, table, PROBS, images, history)


def test_the_facts_count_all_epochs_and_what_could_not_be_read(tmp_path):
    facts = dict(findings(tmp_path).facts)
    assert facts["images"] == "3 from photos, 1 could not be read"
    assert facts["training"] == "2 epochs, seed 0, 2 min 05 s"
    assert facts["labels"] == "none"


def test_the_command_takes_the_settings_of_the_run_to_a_new_folder(tmp_path):
    command = findings(tmp_path).command
    assert command == f"cdc-refine --recipe '{tmp_path}/my run/config.yaml' --out '{tmp_path}/my run-again'"


@pytest.mark.parametrize("given", [{"backbone": "<Backbone>"}, {"data": "<ndarray>"}])
def test_what_only_python_can_give_has_no_command(tmp_path, given):
    config = RefineConfig(**{"backbone": "moco.pth", "data": "photos", "clusters": 2, **given})
    assert findings(tmp_path, config).command is None


def test_an_old_model_stands_before_everything(tmp_path):
    plain, retrofit = findings(tmp_path), findings(tmp_path, old_model=OLD)
    assert [title for title, _, _ in plain.rows] == ["k-means on the features", "clustering head", "calibration head"]
    assert retrofit.rows[0] == ("old model (SCAN)", OLD, None)
    assert retrofit.rows[1:] == plain.rows
    assert retrofit.diagrams[0] == ("Old model", OLD)
    assert len(plain.diagrams) == 3
