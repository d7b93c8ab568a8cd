"""Predictions read by the tools that they are written for; each test is skipped where its tool is not installed."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cdc_plugin.evaluation import writers

NAMES = ["a.jpg", "sub/a.jpg", 'sub/comma, "quotes" & <angle>\'.png', "sub/100%#?+.png", "日本/写真 Ä.jpg"]
CLUSTERS = [3, 0, 3, 11, 1]


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "my photos"
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 3)).save(folder / name)
    return folder


@pytest.fixture
def table() -> np.recarray:
    columns = {
        "path": np.array(NAMES, dtype=object),
        "cluster": np.array(CLUSTERS),
        "confidence": np.array([0.9, 0.8, 0.7, 0.6, 1.0], dtype=np.float32),
        "clustering_confidence": np.full(5, 0.5, dtype=np.float32),
        "second_cluster": np.array([0, 1, 2, 3, 4]),
        "second_confidence": np.full(5, 0.1, dtype=np.float32),
        "outlier": np.array([False, False, True, False, False]),
        "selected": np.array([True, True, False, False, True]),
    }
    return np.rec.fromarrays(list(columns.values()), names=list(columns))


def test_label_studio_accepts_interface_tasks_and_predictions(tmp_path, images, table):
    interface = pytest.importorskip("label_studio_sdk.label_interface")
    writers.write("label-studio", tmp_path / "p.json", [table], images)
    labelling = interface.LabelInterface((tmp_path / "p.xml").read_text("utf-8"))
    labelling.validate()
    tasks = json.loads((tmp_path / "p.json").read_text("utf-8"))
    assert len(tasks) == len(NAMES)
    for task in tasks:
        assert labelling.validate_task({"data": task["data"]})
        assert labelling.validate_prediction(task["predictions"][0], return_errors=True) == []
    result = tasks[0]["predictions"][0]["result"][0]
    unknown = {"score": 1.0, "result": [{**result, "value": {"choices": ["cluster 99"]}}]}
    assert not labelling.validate_prediction(unknown)


def test_fiftyone_imports_labels_confidences_and_attributes(tmp_path, images, table):
    importers = pytest.importorskip("fiftyone.utils.data.importers")
    writers.write("fiftyone", tmp_path / "p.json", [table], images)
    # What ``Dataset.from_dir`` reads with; a whole data set would need its data base server.
    importer = importers.FiftyOneImageClassificationDatasetImporter(labels_path=str(tmp_path / "p.json"))
    with importer:
        found = {path: label for path, _, label in importer}
        assert importer.get_dataset_info()["classes"][11] == "cluster 11"
    assert set(found) == {str(images / name) for name in NAMES}
    label = found[str(images / NAMES[2])]
    assert (label.label, label.confidence, label.outlier, label.second_cluster) == ("cluster 03", 0.7, True, 2)


def test_datumaro_reads_the_cvat_xml(tmp_path, images, table):
    datumaro = pytest.importorskip("datumaro")
    (tmp_path / "cvat").mkdir()
    (tmp_path / "cvat" / "images").symlink_to(images)
    writers.write("cvat", tmp_path / "cvat" / "p.xml", [table], images)
    dataset = datumaro.Dataset.import_from(str(tmp_path / "cvat"), "cvat")
    labels = dataset.categories()[datumaro.AnnotationType.label]
    found = {item.id: item.annotations for item in dataset}
    assert set(found) == {name.rsplit(".", 1)[0] for name in NAMES}
    (tag,) = found[NAMES[2].rsplit(".", 1)[0]]
    assert labels[tag.label].name == "cluster 03"
    assert tag.attributes == {"confidence": 0.7, "second_cluster": 2, "outlier": True, "selected": False}


@pytest.mark.parametrize("reader", ["pandas", "duckdb", "polars"])
def test_parquet_opens_in_other_libraries(tmp_path, images, table, reader):
    pytest.importorskip("pyarrow")
    library = pytest.importorskip(reader)
    writers.write("parquet", tmp_path / "p.parquet", [table], images)
    if reader == "duckdb":
        rows = library.sql(f"select path, cluster from '{tmp_path / 'p.parquet'}' where selected").fetchall()
    else:
        frame = library.read_parquet(tmp_path / "p.parquet")
        columns = zip(frame["path"], frame["cluster"], frame["selected"], strict=True)
        rows = [(path, cluster) for path, cluster, selected in columns if selected]
    assert rows == [(NAMES[0], 3), (NAMES[1], 0), (NAMES[4], 1)]
