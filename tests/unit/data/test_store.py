"""Rows and squares on disk: written completely or not at all, made once and used again."""

import errno
import json
import logging
import os
import shutil
import tempfile
import time
from collections import namedtuple
from multiprocessing import get_context

import numpy as np
import pytest
from PIL import Image

from cdc_plugin.data import ImageSource, UnreadableImageError, open_images, store
from cdc_plugin.data import cache as data_cache
from cdc_plugin.data.cache import open_rows, remove_leftovers, write_rows
from cdc_plugin.errors import OutputError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 20, 20, 3), dtype=np.uint8)
ROWS = np.arange(20 * 3 * 2, dtype=np.float32).reshape(20, 3, 2)
USAGE = namedtuple("USAGE", "total used free")


class Items(list):
    """A map-style data set of given items; an exception among them is raised when it is asked for."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if isinstance(item, Exception):
            raise item
        return item


class Pictures:
    """A source that counts how often it is read, and whose images can be hidden."""

    def __init__(self):
        self.reads, self.hidden = [], set()
        self.source = ImageSource(self.read, list("abcdef"), np.arange(6), None, "digest", "somewhere")

    def read(self, index):
        self.reads.append(index)
        if index in self.hidden:
            raise UnreadableImageError("hidden")
        return Image.fromarray(PIXELS[index])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MEMORY_LIMIT", 1000)
    monkeypatch.setenv("CDC_CACHE", str(tmp_path / "shared"))
    return tmp_path / "shared"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_rows_written_part_by_part_come_back_mapped(tmp_path):
    path = tmp_path / "deep" / "rows.npy"
    written = write_rows(path, iter([ROWS[:3], ROWS[3:3], ROWS[3:]]), ROWS.shape, np.float32)
    opened = open_rows(path, ROWS.shape, np.float32)
    for rows in (written, opened):
        assert isinstance(rows, np.memmap)
        assert np.array_equal(rows, ROWS)
        rows[:] = -1  # copy-on-write: the file is not touched
    assert np.array_equal(np.load(path), ROWS)
    assert names(path.parent) == ["rows.npy"]


@pytest.mark.parametrize("planned", [6, 100, 10**12])
def test_fewer_rows_than_planned_may_be_written(tmp_path, monkeypatch, planned):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: USAGE(0, 0, 10**15))
    write_rows(tmp_path / "rows.npy", [ROWS[:5]], (planned, 3, 2), np.float32)
    assert np.array_equal(open_rows(tmp_path / "rows.npy", (5, 3, 2), np.float32), ROWS[:5])


@pytest.mark.parametrize("harm", ["absent", "cut", "empty", "no array", "shape", "type"])
def test_rows_that_are_absent_cut_or_others_are_not_used(tmp_path, caplog, harm):
    path = tmp_path / "rows.npy"
    write_rows(path, [ROWS], ROWS.shape, np.float32)
    contents = {"cut": path.read_bytes()[:-1], "empty": b"", "no array": b"x" * 500}
    path.write_bytes(contents.get(harm, path.read_bytes()))
    if harm == "absent":
        path.unlink()
    shape, dtype = (19, 3, 2) if harm == "shape" else ROWS.shape, np.int32 if harm == "type" else np.float32
    assert open_rows(path, shape, dtype) is None
    assert ("made again" in caplog.text) == (harm != "absent")


def test_an_error_half_way_leaves_no_rows(tmp_path):
    def parts():
        yield ROWS[:3]
        raise KeyError("image 4")

    with pytest.raises(KeyError):
        write_rows(tmp_path / "rows.npy", parts(), ROWS.shape, np.float32)
    with pytest.raises(ValueError, match="shape"):
        write_rows(tmp_path / "rows.npy", [ROWS[:, :2]], ROWS.shape, np.float32)
    assert names(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_a_process_killed_while_writing_leaves_no_rows_that_could_be_used(tmp_path):
    context = get_context("fork")
    writing = context.Event()

    def parts():
        yield ROWS[:3]
        writing.set()
        time.sleep(600)

    path = tmp_path / "features-a.npy"
    writer = context.Process(target=write_rows, args=(path, parts(), ROWS.shape, np.float32))
    writer.start()
    assert writing.wait(60)
    writer.kill()
    writer.join()
    assert open_rows(path, ROWS.shape, np.float32) is None
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_large_sets_are_kept_on_disk_and_used_again(cache):
    pictures = Pictures()
    first = open_images(pictures.source, 20)
    assert isinstance(first.images, np.memmap)
    assert (first.images[:] == PIXELS).all()
    assert names(cache) == ["images-digest-20.json", "images-digest-20.npy"]
    again = open_images(pictures.source, 20)
    assert len(pictures.reads) == 6
    assert again.labels.tolist() == [*range(6)]
    first.batch([0])[0, 0, 0, 0] = 9
    assert (open_images(pictures.source, 20).images[:] == PIXELS).all()


def test_small_sets_stay_in_memory_and_a_folder_of_ones_own_wins(tmp_path, cache, monkeypatch):
    open_images(Pictures().source, 20, cache=tmp_path / "deep" / "own")
    assert names(tmp_path / "deep" / "own") == ["images-digest-20.json", "images-digest-20.npy"]
    monkeypatch.setattr(store, "MEMORY_LIMIT", 10**6)
    assert not isinstance(open_images(Pictures().source, 20).images, np.memmap)
    assert not cache.exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps open files")
def test_without_a_cache_large_sets_lie_in_a_file_that_nobody_else_finds(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("CDC_CACHE", "off")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    images = open_images(Pictures().source, 20).images
    assert isinstance(images, np.memmap)
    assert (images[:] == PIXELS).all()
    (folder,) = tmp_path.iterdir()
    assert names(folder) == []


def test_without_a_cache_and_room_on_the_disk_images_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("CDC_CACHE", "off")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: USAGE(10, 9, 1))
    assert not isinstance(open_images(Pictures().source, 20).images, np.memmap)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert not isinstance(open_images(Pictures().source, 20).images, np.memmap)


def test_a_cache_that_can_not_be_written_is_done_without(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CDC_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert (open_images(Pictures().source, 20).images[:] == PIXELS).all()
    assert "set CDC_CACHE" in caplog.text
    with pytest.raises(OutputError, match="cannot be written"):  # one that was asked for
        open_images(Pictures().source, 20, cache=tmp_path / "file")


def test_what_was_skipped_and_labelled_survives_in_a_folder(tmp_path):
    dataset = Items([(PIXELS[0], 4), OSError("gone"), (PIXELS[2], 5)])
    first, again = (open_images(dataset, 20, cache=tmp_path) for _ in range(2))
    for images in (first, again):
        assert (images.images[:] == PIXELS[[0, 2]]).all()
        assert images.labels.tolist() == [4, 5]
        assert images.skipped == [("1", "OSError: gone")]


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps open files")
def test_a_data_set_known_by_a_sample_only_is_never_taken_from_the_shared_cache(cache):
    first = open_images(Items([(image, 0) for image in PIXELS]), 20)
    assert names(cache) == []
    second = open_images(Items([(image, 1) for image in PIXELS]), 20)
    assert second.labels.tolist() == [1] * 6
    assert (first.images[:] == PIXELS).all()


def test_an_image_that_can_be_read_by_now_is_taken_in():
    pictures = Pictures()
    pictures.hidden = {3}
    assert open_images(pictures.source, 20).skipped == [("d", "hidden")]
    assert len(open_images(pictures.source, 20)) == 5
    assert len(pictures.reads) == 7  # the hidden one was tried once more
    pictures.hidden = set()
    assert (open_images(pictures.source, 20).images[:] == PIXELS).all()


@pytest.mark.parametrize("harm", ["shorter", "other rows", "other notes", "damaged notes", "no notes", "older"])
def test_what_is_not_complete_is_made_again(cache, harm):
    open_images(Pictures().source, 20)
    file, notes = cache / "images-digest-20.npy", cache / "images-digest-20.json"
    text = notes.read_text()
    older = json.dumps({**json.loads(text), "version": 0})
    notes.write_text({"damaged notes": text[:-5], "other notes": '{"count": "?"}', "older": older}.get(harm, text))
    if harm == "shorter":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "other rows":  # complete, but not what the notes are about
        write_rows(file, [PIXELS[:5]], PIXELS.shape, np.uint8)
    elif harm == "no notes":
        notes.unlink()
    pictures = Pictures()
    images = open_images(pictures.source, 20)
    assert (images.images[:] == PIXELS).all()
    assert images.labels.tolist() == [*range(6)]
    assert len(pictures.reads) == 6


def test_too_little_disk_is_said_before_anything_is_read(cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: USAGE(10, 9, 1))
    pictures = Pictures()
    with pytest.raises(OutputError, match=r"takes 7 KB in .*, and 1 bytes are free"):
        open_images(pictures.source, 20)
    assert (pictures.reads, names(cache)) == ([], [])


@pytest.mark.parametrize(("module", "function"), [(os, "fsync"), (os, "replace"), (data_cache, "_write_header")])
def test_a_disk_that_fills_up_leaves_no_file_behind(cache, monkeypatch, module, function):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, function, fail)
    with pytest.raises(OutputError, match="make room"):
        open_images(Pictures().source, 20)
    assert names(cache) == []


def _open_slowly(reads, answers):
    def read(index):
        time.sleep(0.03)
        reads.put(index)
        return Image.fromarray(PIXELS[index])

    images = open_images(ImageSource(read, list("abcdef"), None, None, "slow", "somewhere"), 20)
    answers.put(bool((images.images[:] == PIXELS).all()))


@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_of_several_processes_one_reads_and_the_others_wait():
    context = get_context("fork")
    reads, answers = context.Queue(), context.Queue()
    started = [context.Process(target=_open_slowly, args=(reads, answers)) for _ in range(3)]
    for process in started:
        process.start()
    assert [answers.get(timeout=60) for _ in started] == [True] * 3
    assert sorted(reads.get(timeout=60) for _ in range(6)) == [*range(6)]
    for process in started:
        process.join()
    assert reads.empty()


@pytest.mark.parametrize("limit", [store.MEMORY_LIMIT, 0])
def test_blank_images_and_copies_are_named_wherever_images_are_kept(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(store, "MEMORY_LIMIT", limit)
    noise = np.random.default_rng(0).integers(0, 256, (3, 40, 40, 3), dtype=np.uint8)
    pictures = {name: Image.fromarray(noise[number]) for number, name in enumerate(["a", "b", "y"])}
    pictures |= {"c": Image.new("RGBA", (9, 9)), "d": Image.new("L", (1, 1)), "z": pictures["b"]}
    (tmp_path / "photos").mkdir()
    for name, picture in pictures.items():
        picture.save(tmp_path / "photos" / f"{name}.png")
    (tmp_path / "photos" / "aa.png").touch()
    for _ in range(2):  # read, and found in the cache
        images = open_images(tmp_path / "photos", 32, cache=tmp_path)
        found = {warning["kind"]: (warning["count"], warning["examples"]) for warning in images.warnings}
        assert found == {"blank": (2, ["c.png", "d.png"]), "copies": (1, ["b.png", "z.png"])}
        assert len(images) == 6
    array = np.concatenate([noise, noise[:1], np.zeros_like(noise[:1])])
    for data, size in ((array, 40), (array, 32), (array.transpose(0, 3, 1, 2), 40)):
        assert [warning["examples"] for warning in open_images(data, size).warnings] == [["4"], ["0", "3"]]
    assert open_images(noise, 32).warnings == []
    changed = noise.copy()
    changed[2, 39, 39, 2] ^= 1
    assert open_images(noise, 40).digest != open_images(changed, 40).digest
