"""Hugging Face data sets: objects, saved folders, parquet files and names; labels for reporting only."""

import os
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from cdc_plugin.data import native_size, open_images
from cdc_plugin.errors import UserError

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
LABELS = [0, 1, 2, 0, 1, 2]
NAMES = ["cat", "dog", "owl"]


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def pictures(labels=LABELS, label_type=None, label_name="label"):
    label_type = label_type or datasets.ClassLabel(names=NAMES)
    features = {"id": datasets.Value("int64"), "photo": datasets.Image(), label_name: label_type}
    rows = {"id": [*range(6)], "photo": [Image.fromarray(image) for image in PIXELS], label_name: labels}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def test_a_data_set_gives_its_images_labels_and_class_names():
    data = pictures()
    images, some = open_images(data), open_images(data.select([4, 2]))
    assert (images.images == PIXELS).all()
    assert (images.labels.tolist(), images.class_names) == (LABELS, NAMES)
    assert images.names == [str(number) for number in range(6)]
    assert native_size(data) == 16
    assert (some.images == PIXELS[[4, 2]]).all()
    assert some.labels.tolist() == [1, 2]
    assert images.digest == open_images(data).digest != open_images(data.select([0, 1, 2, 3, 5, 4])).digest
    transformed = data.with_transform(lambda rows: {"photo": ["nonsense"] * len(rows["photo"])})
    assert (open_images(transformed).images == PIXELS).all()


def test_labels_can_be_left_out_and_hidden_ones_are_none():
    assert open_images(pictures(), labels=False).labels is None
    assert open_images(pictures([-1] * 6)).labels is None
    assert open_images(pictures([1.5] * 6, datasets.Value("float32"))).labels is None
    assert open_images(pictures(LABELS, datasets.Value("int64"), "fine_label")).labels.tolist() == LABELS
    assert open_images(pictures(LABELS, datasets.Value("int64"), "age")).labels is None
    words = open_images(pictures(["owl", "dog", "owl"] * 2, datasets.Value("string")))
    assert (words.labels.tolist(), words.class_names) == ([1, 0, 1] * 2, ["dog", "owl"])
    assert open_images(pictures(["owl", None, "owl"] * 2, datasets.Value("string"))).labels is None


def test_of_several_splits_one_must_be_named(tmp_path):
    both = datasets.DatasetDict({"train": pictures(), "test": pictures()})
    with pytest.raises(UserError, match=r"splits train, test; .*data\['train'\]"):
        open_images(both)
    both.save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"give one of them: .*saved/train"):
        open_images(tmp_path / "saved")
    assert len(open_images(tmp_path / "saved" / "train")) == 6
    assert len(open_images(datasets.DatasetDict({"train": pictures()}))) == 6


@pytest.mark.parametrize("how", ["tables/a.parquet", "tables", "saved"])
def test_parquet_files_folders_of_them_and_saved_data_sets(tmp_path, how):
    (tmp_path / "tables").mkdir()
    pictures().to_parquet(tmp_path / "tables" / "a.parquet")
    pictures().save_to_disk(tmp_path / "saved")
    images = open_images(str(tmp_path / how))
    assert (images.images == PIXELS).all()
    assert (images.labels.tolist(), images.class_names) == (LABELS, NAMES)
    assert images.digest == open_images(tmp_path / how).digest


def test_files_that_are_written_again_in_place_give_another_digest(tmp_path):
    pictures().save_to_disk(tmp_path / "saved")
    before = open_images(tmp_path / "saved")
    pictures().select([1, 0, 2, 3, 4, 5]).flatten_indices().save_to_disk(tmp_path / "other")
    (old,), (new,) = ((tmp_path / name).glob("*.arrow") for name in ("saved", "other"))
    old.write_bytes(new.read_bytes())
    os.utime(old, (1, 1))
    assert open_images(tmp_path / "saved").digest != before.digest


def test_of_several_parquet_files_the_damaged_one_is_named(tmp_path):
    pictures().to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"no table")
    with pytest.raises(UserError, match=r"b\.parquet cannot be read as parquet \(Parquet"):
        open_images(tmp_path)


def test_where_parquet_files_lie_deeper_their_folder_is_asked_for(tmp_path):
    (tmp_path / "data").mkdir()
    pictures().to_parquet(tmp_path / "data" / "a.parquet")
    with pytest.raises(UserError, match=r"the folder it lies in"):
        open_images(tmp_path)


def test_rows_without_a_readable_image_are_skipped_with_a_reason(tmp_path):
    Image.fromarray(PIXELS[0]).save(tmp_path / "0.png")
    values = [str(tmp_path / "0.png"), None, {"bytes": b"no image", "path": None}, str(tmp_path / "gone.png")]
    data = datasets.Dataset.from_dict({"image": values}, features=datasets.Features({"image": datasets.Image()}))
    images = open_images(data, 16)
    assert images.names == ["0"]
    reasons = dict(images.skipped)
    assert "no image in this row" in reasons["1"]
    assert "identify" in reasons["2"]
    assert "FileNotFound" in reasons["3"]


def test_a_data_set_of_the_hub_is_loaded_by_name_and_split(monkeypatch):
    load = Mock(return_value=pictures())
    monkeypatch.setattr(datasets, "load_dataset", load)
    images = open_images("hf:owner/name:train", 16)
    load.assert_called_once_with("owner/name", split="train", trust_remote_code=False)
    assert (images.source, len(images)) == ("hf:owner/name:train", 6)


def test_what_the_hub_does_not_give_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("no route\nto host")))
    with pytest.raises(UserError, match=r"hf:owner/name cannot be loaded \(no route\); expected hf:NAME:SPLIT"):
        open_images("hf:owner/name", 16)


def test_without_the_package_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install cdc-plugin\[data\]"):
        open_images("hf:owner/name", 16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pictures().to_iterable_dataset(), "streaming=False"),
        (lambda: datasets.Dataset.from_dict({"text": ["a", "b"]}), "no column of images"),
        (lambda: pictures().select([]), "is empty"),
    ],
)
def test_other_kinds_of_data_set_are_refused_in_words(make, message):
    with pytest.raises(UserError, match=message):
        open_images(make(), 16)


def test_a_table_that_unpacks_to_far_more_than_its_size_and_a_pipe_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("cdc_plugin.data.sources.hugging_face.UNPACKED_FREELY", 100_000)
    parquet = pytest.importorskip("pyarrow.parquet")
    zeros = pyarrow.table({"image": [bytes(1_000_000), bytes(2_000_000)]})
    parquet.write_table(zeros, tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(UserError, match="unpacks to more than"):
        open_images(tmp_path / "a.parquet", 8)
    os.mkfifo(tmp_path / "0.parquet")
    with pytest.raises(UserError, match="no regular file"):
        open_images(tmp_path, 8)
    pictures().save_to_disk(tmp_path / "saved")
    victim = next((tmp_path / "saved").glob("*.arrow"))
    victim.unlink()
    os.mkfifo(victim)
    with pytest.raises(UserError, match=f"{victim.name} is not a regular file"):
        open_images(tmp_path / "saved", 8)
    victim.unlink()
    victim.symlink_to("/proc/self/status")  # as /proc/kmsg, which states no size and never ends
    with pytest.raises(UserError, match=f"{victim.name} is not a regular file, or empty"):
        open_images(tmp_path / "saved", 8)
