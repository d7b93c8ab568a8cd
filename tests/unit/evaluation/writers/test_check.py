"""What can not be written is refused in one line before any work; nothing is touched by asking."""

import subprocess
import sys

import numpy as np
import pytest

from cdc_plugin.errors import UserError
from cdc_plugin.evaluation import writers

FILES = [("csv", "p.csv"), ("parquet", "p.parquet"), ("label-studio", "p.json"), ("fiftyone", "p.json")]


def refusal(to, out, overwrite=False) -> str:
    with pytest.raises(UserError) as caught:
        writers.choose_format(to, out, overwrite)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("to", "name"), [*FILES, ("cvat", "p.xml"), ("cvat", "p.csv"), ("folders", "sorted")])
def test_a_named_format_is_taken_and_without_one_the_ending_tells_it(tmp_path, to, name):
    assert writers.choose_format(to, tmp_path / name, overwrite=False) == to
    if to in ("csv", "parquet"):
        assert writers.choose_format(None, tmp_path / name.upper(), overwrite=False) == to
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "name", "words"),
    [
        (None, "p.json", "--to label-studio or --to fiftyone"),
        (None, "p.xml", "--to cvat"),
        (None, "p.txt", ".csv or .parquet"),
        (None, "p", "found p"),
        ("excel", "p.csv", "csv, parquet, folders, label-studio, fiftyone, cvat; found 'excel'"),
        *((to, "p.doc", "found p.doc") for to in writers.FORMATS if to != "folders"),
        *(("folders", name, "--out p;") for name in ("p.csv", "p.json")),
        *((to, f"absent/{name}", "/absent to write") for to, name in [*FILES, ("folders", "sorted")]),
    ],
)
def test_endings_formats_and_places_that_will_not_do_are_refused(tmp_path, to, name, words):
    assert words in refusal(to, tmp_path / name)


@pytest.mark.parametrize(
    ("to", "out", "present"),
    [
        *((to, name, name) for to, name in FILES),
        ("label-studio", "p.json", "p.xml"),  # is written beside it
        ("cvat", "p.csv", "p.xml"),
        ("cvat", "p.xml", "p.csv"),
        ("cvat", "p.xml", "p.labels.json"),
    ],
)
def test_an_existing_file_needs_overwrite(tmp_path, to, out, present):
    (tmp_path / present).write_text("mine")
    message = refusal(to, tmp_path / out)
    assert f"{present} already exists" in message
    assert "--overwrite" in message
    assert writers.choose_format(to, tmp_path / out, overwrite=True) == to
    assert (tmp_path / present).read_text() == "mine"


@pytest.mark.parametrize(("to", "name"), FILES)
def test_a_folder_in_the_place_of_a_file_is_refused_even_with_overwrite(tmp_path, to, name):
    (tmp_path / name).mkdir()
    assert "is a folder" in refusal(to, tmp_path / name, overwrite=True)
    assert "--to folders" in refusal(None, tmp_path)


def test_parquet_without_its_package_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "cdc-plugin[parquet]" in refusal("parquet", tmp_path / "p.parquet")


@pytest.mark.parametrize("to", ["folders", "label-studio", "fiftyone", "cvat"])
@pytest.mark.parametrize(
    "source",
    ["digits", "a.npz", "A.NPY", "shards", "shards/*.tar", "tables", "tables/a.parquet", "saved", "hf:a/b:train"],
)
def test_formats_that_point_to_image_files_refuse_sources_without_files(tmp_path, monkeypatch, to, source):
    monkeypatch.chdir(tmp_path)
    for name in ("shards/0.tar", "tables/a.parquet", "saved/state.json", "saved/dataset_info.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"content")
    with pytest.raises(UserError, match=r"image files.*\.csv"):
        writers.check_source(to, source, tmp_path / "out")


@pytest.mark.parametrize("to", writers.FORMATS)
def test_a_folder_of_images_suits_every_format_and_tables_take_any_source(tmp_path, images, to):
    writers.check_source(to, str(images), tmp_path / "out")
    if to in ("csv", "parquet"):
        writers.check_source(to, "digits", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [images.name]


def test_checking_a_file_needs_neither_torch_nor_numpy(tmp_path):
    code = (
        "import sys, pathlib; from cdc_plugin.evaluation import writers; "
        "writers.choose_format(None, pathlib.Path(sys.argv[1]), False);"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "p.csv")], check=True)


@pytest.mark.parametrize("to", writers.FORMATS)
def test_advice_is_one_line_that_names_the_file(tmp_path, images, to):
    line = writers.explain_import(to, tmp_path / "predictions.json", images)
    assert line is None or ("predictions" in line and "\n" not in line)
    assert (line is None) == (to in ("csv", "parquet", "folders"))


def test_a_failed_write_leaves_the_earlier_files(tmp_path, images, table, monkeypatch):
    """A file is whole or not there: breaking off in the middle of the rows keeps what was written before."""
    for to, name in FILES[2:]:
        writers.write(to, tmp_path / name, [table], images)
        before = (tmp_path / name).read_bytes()
        broken = table.copy()
        broken["path"][5] = 7
        with pytest.raises(AttributeError):
            writers.write(to, tmp_path / name, [broken], images)
        assert (tmp_path / name).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([images.name, "p.json", "p.xml"])
    assert np.array_equal(table.cluster, [3, 3, 0, 3, 11, 0, 1])
