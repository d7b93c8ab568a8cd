"""Every file is read back by an independent reader and holds what the table holds."""

import json
import os
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest

from cdc_plugin.evaluation import writers
from cdc_plugin.evaluation.writers.files import escape_name, name_clusters
from tests.helpers.commands import read_table

# The columns of the fifth row beside cluster and confidence; true and false are equal to 1 and 0.
OTHERS = {"clustering_confidence": 0.5, "second_cluster": 4, "second_confidence": 0.1, "distance": 9.5}
OTHERS |= {"outlier": 1, "selected": 0}


def test_csv_holds_all_columns(tmp_path, images, odd_table):
    assert writers.write("csv", tmp_path / "p.csv", [odd_table], images) == [tmp_path / "p.csv"]
    rows = read_table(tmp_path / "p.csv")
    assert list(rows[0]) == list(odd_table.dtype.names)
    assert [row["path"] for row in rows] == odd_table.path.tolist()
    assert [row["outlier"] for row in rows] == ["0", "0", "0", "0", "1", "0", "0"]


def test_parquet_has_proper_types_escapes_bytes_that_are_no_text_and_has_a_number_for_index(
    tmp_path, images, odd_table
):
    parquet = pytest.importorskip("pyarrow.parquet")
    writers.write("parquet", tmp_path / "p.parquet", [odd_table], images)
    found = parquet.read_table(tmp_path / "p.parquet")
    types = ["string", "int32", "float", "float", "int32", "float", "float", "bool", "bool"]
    assert [str(field.type) for field in found.schema] == types
    assert found["path"].to_pylist()[:2] == ["bad\\xff.png", "control\x01.png"]
    for name in odd_table.dtype.names[1:]:
        np.testing.assert_array_equal(found[name].to_numpy(), odd_table[name])
    table = np.rec.fromarrays(
        [np.array(["0", "7"], dtype=object), np.array([1, 0]), np.array([0.5, 1], dtype=np.float32)],
        names=["index", "cluster", "confidence"],
    )
    writers.write("parquet", tmp_path / "p.parquet", [table], "digits")
    assert parquet.read_table(tmp_path / "p.parquet").to_pylist() == [
        {"index": 0, "cluster": 1, "confidence": 0.5},
        {"index": 7, "cluster": 0, "confidence": 1.0},
    ]


def test_label_studio_tasks_carry_prediction_score_and_columns(tmp_path, images, table):
    written = writers.write("label-studio", tmp_path / "p.json", [table], str(images))
    assert written == [tmp_path / "p.json", tmp_path / "p.xml"]
    tasks = json.loads((tmp_path / "p.json").read_text("utf-8"))
    assert [task["data"]["path"] for task in tasks] == table.path.tolist()
    first = tasks[0]
    assert first["predictions"][0]["score"] == first["data"]["confidence"] == 0.9
    assert first["predictions"][0]["result"] == [
        {"from_name": "cluster", "to_name": "image", "type": "choices", "value": {"choices": ["cluster 03"]}}
    ]
    own = {"image": "", "path": "", "cluster": 11, "confidence": 0.5}
    assert tasks[4]["data"] | {"image": "", "path": ""} == own | OTHERS
    assert tasks[6]["data"]["distance"] is None  # JSON has no NaN


def test_label_studio_urls_lead_to_the_images_and_the_interface_names_every_choice(tmp_path, images, table):
    writers.write("label-studio", tmp_path / "p.json", [table], images)
    for task in json.loads((tmp_path / "p.json").read_text("utf-8")):
        url = urlsplit(task["data"]["image"])
        assert url.path == "/data/local-files/"
        assert (images.parent / parse_qs(url.query)["d"][0]).is_file()  # below the document root
    view = ElementTree.parse(tmp_path / "p.xml").getroot()
    choices, image = view.find("Choices"), view.find("Image").attrib
    assert (image["name"], image["value"]) == ("image", "$image")
    assert (choices.attrib["name"], choices.attrib["toName"]) == ("cluster", "image")
    assert [choice.attrib["value"] for choice in choices] == name_clusters(table)


def test_fiftyone_labels_are_keyed_by_the_path_of_the_image(tmp_path, images, table, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writers.write("fiftyone", tmp_path / "p.json", [table], images.name)
    content = json.loads((tmp_path / "p.json").read_text("utf-8"))
    assert list(content["labels"]) == [str(images / name) for name in table.path]
    assert all(os.path.isfile(path) for path in content["labels"])
    label = content["labels"][str(images / "sub/100%#?+ $image.png")]
    assert content["classes"][label["label"]] == "cluster 11"
    assert label["confidence"] == 0.5
    assert label["attributes"] == OTHERS
    assert (label["attributes"]["outlier"], label["attributes"]["selected"]) == (True, False)
    assert type(label["attributes"]["outlier"]) is bool
    writers.write("fiftyone", tmp_path / "p.json", [table[:1]], images / "a.jpg")  # one image: within its folder
    assert list(json.loads((tmp_path / "p.json").read_text())["labels"]) == [str(images / "a.jpg")]


@pytest.mark.parametrize("to", ["label-studio", "fiftyone"])
def test_json_is_valid_unicode_whatever_the_names(tmp_path, images, odd_table, to):
    writers.write(to, tmp_path / "p.json", [odd_table], images)
    text = (tmp_path / "p.json").read_bytes().decode("utf-8")
    assert "bad\\\\xff.png" in text
    assert len(json.loads(text) if to == "label-studio" else json.loads(text)["labels"]) == 7
    if to == "label-studio":  # its URL keeps the bytes
        assert json.loads(text)[0]["data"]["image"].endswith("/bad%FF.png")


@pytest.mark.parametrize("out", ["p.xml", "p.csv"])
def test_cvat_gets_one_tag_an_image_and_a_table_of_categories_whichever_is_named(tmp_path, images, table, out):
    written = writers.write("cvat", tmp_path / out, [table], images)
    assert [file.name for file in written] == ["p.xml", "p.csv", "p.labels.json"]
    rows = read_table(tmp_path / "p.csv")
    assert list(rows[0])[:4] == ["file_name", "category_id", "category_name", "score"]
    assert [row["file_name"] for row in rows] == table.path.tolist()
    assert (rows[4]["category_id"], rows[4]["category_name"], rows[4]["score"]) == ("11", "cluster 11", "0.5")
    assert (rows[4]["outlier"], rows[4]["selected"]) == ("1", "0")
    root = ElementTree.parse(tmp_path / "p.xml").getroot()
    assert (root.tag, root.findtext("version")) == ("annotations", "1.1")
    found = root.findall("image")
    assert [image.attrib["name"] for image in found] == table.path.tolist()
    assert [image.find("tag").attrib["label"][-2:] for image in found] == ["03", "03", "00", "03", "11", "00", "01"]
    attributes = {each.attrib["name"]: each.text for each in found[4].iter("attribute")}
    assert attributes == {"confidence": "0.5", "second_cluster": "4", "outlier": "true", "selected": "false"}


def test_cvat_labels_declare_what_the_xml_uses(tmp_path, images, plain_table):
    writers.write("cvat", tmp_path / "p.xml", [plain_table], images)
    root = ElementTree.parse(tmp_path / "p.xml").getroot()
    labels = json.loads((tmp_path / "p.labels.json").read_text("utf-8"))
    assert [label["name"] for label in labels] == [label.findtext("name") for label in root.iter("label")]
    declared = {(label["name"], each["name"]) for label in labels for each in label["attributes"]}
    used = {(tag.attrib["label"], each.attrib["name"]) for tag in root.iter("tag") for each in tag}
    assert used <= declared
    assert {name for _, name in declared} == {"confidence", "second_cluster"}


def test_cvat_xml_leaves_out_names_that_cvat_can_not_find_and_says_so(tmp_path, images, odd_table, caplog):
    odd_table["path"][2], odd_table["path"][3] = "twin.jpg", "twin.png"
    writers.write("cvat", tmp_path / "p.xml", [odd_table], images)
    names = [image.attrib["name"] for image in ElementTree.parse(tmp_path / "p.xml").iter("image")]
    assert names == odd_table.path.tolist()[4:]
    assert [row["file_name"] for row in read_table(tmp_path / "p.csv")] == odd_table.path.tolist()
    assert "4 images are in the CSV but not in the XML" in caplog.text


def test_cluster_names_sort_as_numbers_valid_names_stay_as_they_are_and_invalid_ones_stay_apart(table):
    assert name_clusters(table)[:2] == ["cluster 00", "cluster 01"]
    table["second_cluster"][0] = 100
    names = name_clusters(table)
    assert len(names) == 101
    assert names == sorted(names)
    for name in ("plain.png", "Ä 日本.png", "\U0001f600.png"):
        assert escape_name(name) == name
    assert escape_name(os.fsdecode(b"bad\xff.png")) != escape_name(os.fsdecode(b"bad\xfe.png"))
