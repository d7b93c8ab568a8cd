import os
import threading
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from cdc_plugin.data import ImageSource, UnreadableImageError, native_size, open_images, store
from cdc_plugin.data.decode import squares_from_array
from cdc_plugin.data.images import digest_image_list, survey_images
from cdc_plugin.data.side import Side
from cdc_plugin.data.sources import arrays
from cdc_plugin.data.sources.arrays import describe_array
from cdc_plugin.errors import UserError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 20, 20, 3), dtype=np.uint8)


class Items(list):
    """A map-style data set of given items; an exception among them is raised when it is asked for."""

    classes = ("even", "odd")

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if isinstance(item, Exception):
            raise item
        return item


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        lambda x: x.transpose(0, 3, 1, 2),
        lambda x: torch.from_numpy(x),
        lambda x: torch.from_numpy(x).permute(0, 3, 1, 2),
        lambda x: x.astype(np.int64),
        lambda x: (x / 255).astype(np.float32),
        lambda x: np.concatenate([x, np.full_like(x[..., :1], 255)], axis=3),
    ],
)
def test_every_layout_of_an_array_gives_the_same_images(layout):
    images = open_images(layout(PIXELS))
    assert (images.images == PIXELS).all()
    assert images.images.dtype == np.uint8
    assert images.names == ["0", "1", "2", "3", "4", "5"]
    assert images.digest == describe_array(PIXELS).digest


def test_gray_arrays_become_three_equal_channels():
    for gray in (PIXELS[..., 0], PIXELS[..., :1], PIXELS[:, None, :, :, 0]):
        assert (open_images(gray).images == PIXELS[..., :1]).all()


def test_small_square_arrays_keep_their_size_and_others_are_resized():
    assert native_size(PIXELS) == 20
    assert open_images(PIXELS).images.shape == (6, 20, 20, 3)
    assert open_images(PIXELS, 32).images.shape == (6, 32, 32, 3)
    oblong = PIXELS[:, :, :16]
    assert native_size(oblong) is None
    assert open_images(oblong).images.shape == (6, 256, 256, 3)


def test_resizing_an_array_equals_resizing_its_images_with_pillow():
    ours = open_images(np.concatenate([PIXELS, PIXELS], axis=2), 12).images
    for image, square in zip(np.concatenate([PIXELS, PIXELS], axis=2), ours, strict=True):
        expected = Image.fromarray(image[:, 10:30]).resize((12, 12), Image.Resampling.BILINEAR)
        assert np.abs(square.astype(int) - np.asarray(expected)).max() <= 1


def test_npz_with_labels_and_npy_without(tmp_path):
    np.savez(tmp_path / "a.npz", x=PIXELS, y=np.array([5, 5, 7, 7, 7, 9], dtype=np.uint8))
    images = open_images(tmp_path / "a.npz")
    assert (images.images == PIXELS).all()
    assert images.labels.tolist() == [5, 5, 7, 7, 7, 9]
    assert images.labels.dtype == np.int64
    np.save(tmp_path / "b.npy", PIXELS)
    mapped = open_images(str(tmp_path / "b.npy"))
    assert mapped.labels is None
    assert native_size(tmp_path / "b.npy") == 20
    assert (mapped.batch(torch.tensor([4, 1])).permute(0, 2, 3, 1).numpy() == PIXELS[[4, 1]]).all()
    assert mapped.count == len(mapped) == 6


def test_the_only_image_array_of_an_npz_is_found_whatever_its_name_and_that_of_the_file(tmp_path):
    np.savez(tmp_path / "a.npz", pictures=PIXELS, targets=np.arange(6), extra=np.ones(3))
    np.save(tmp_path / "b.npy", PIXELS)
    for name, other, labels in (("a.npz", "a.npy", [*range(6)]), ("b.npy", "b.npz", None)):
        images = open_images((tmp_path / name).rename(tmp_path / other))
        assert (images.images == PIXELS).all()
        assert (images.labels is None) if labels is None else (images.labels.tolist() == labels)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": PIXELS, "b": PIXELS}, "found a, b"),
        ({"x": np.array([{}, {}])}, "pickled"),
        ({"x": PIXELS, "y": np.arange(3)}, r"6 rows and labels int64 \(3,\)"),
        (None, "cannot be read as a NumPy file"),
    ],
)
def test_bad_array_files_are_refused_in_words(tmp_path, arrays, message):
    path = tmp_path / "a.npz"
    path.write_bytes(b"PK\x03\x04 no archive") if arrays is None else np.savez(path, **arrays)
    with pytest.raises(UserError, match=message):
        open_images(path)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (PIXELS[0, 0], r"expected images of shape .*found \(20, 3\)"),
        (np.zeros((2, 8, 8, 5), np.uint8), r"found \(2, 8, 8, 5\)"),
        (PIXELS / 255.0 - 0.5, "found float64 from -0.5"),
        (PIXELS.astype(np.float32), "floats from 0 to 1; found float32"),
        (PIXELS.astype(np.int32) * 9, "found int32 from 0"),
        (PIXELS[:0], "no images"),
    ],
)
def test_bad_arrays_are_refused_in_words(array, message):
    with pytest.raises(UserError, match=message):
        open_images(array, 32)


@pytest.mark.parametrize(
    "convert", [Image.fromarray, lambda x: x, torch.from_numpy, lambda x: torch.from_numpy(x).permute(2, 0, 1) / 255]
)
def test_data_set_with_labels_is_read_in_order(convert):
    dataset = Items([(convert(image), index % 2) for index, image in enumerate(PIXELS)])
    images = open_images(dataset, 20)
    assert (images.images == PIXELS).all()
    assert images.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert images.class_names == ["even", "odd"]
    assert native_size(dataset) == 20
    assert images.digest == open_images(dataset, 20).digest


WORDS = ["dog", "cat", "dog", "größe", "cat", "cat"]


@pytest.mark.parametrize("labels", [np.array(WORDS), np.char.encode(WORDS, "utf-8"), np.array(WORDS)[:, None]])
def test_labels_may_be_words(tmp_path, labels):
    np.savez(tmp_path / "a.npz", x=PIXELS, y=labels)
    images = open_images(tmp_path / "a.npz")
    assert (images.labels.tolist(), images.class_names) == ([1, 0, 1, 2, 0, 0], ["cat", "dog", "größe"])


@pytest.mark.parametrize("labels", [[1], np.full(6, np.nan), np.array([{}] * 6), np.zeros((6, 2), int), WORDS[:2]])
def test_labels_that_are_not_wanted_are_not_looked_at(tmp_path, labels):
    np.savez(tmp_path / "a.npz", x=PIXELS, y=labels)
    with pytest.raises(UserError, match="--no-labels"):
        open_images(tmp_path / "a.npz")
    assert open_images(tmp_path / "a.npz", labels=False).labels is None
    assert not survey_images(tmp_path / "a.npz", 32, labels=False).labels


def test_data_set_without_labels_has_none():
    pictures, tensor = [Image.fromarray(image) for image in PIXELS], torch.from_numpy(PIXELS)
    for source in (pictures, Items(pictures), [(image, "a caption") for image in pictures], TensorDataset(tensor)):
        images = open_images(source)
        assert (images.images == PIXELS).all()
        assert images.labels is None
    assert open_images(TensorDataset(tensor, torch.arange(6))).labels.tolist() == [*range(6)]


@pytest.mark.parametrize(
    ("source", "size", "message"),
    [
        (iter([]), 32, "expected a folder"),
        (3, 32, "expected a folder"),
        ({"a": 1}, 32, "expected a folder"),
        (Items([]), 32, "empty"),
        (Items([3.5]), 32, "found float"),
        (PIXELS, 4, "at least 8"),
    ],
)
def test_other_sources_are_refused_in_words(source, size, message):
    with pytest.raises(UserError, match=message):
        open_images(source, size)


def test_one_other_image_of_a_data_set_gives_another_digest():
    pixels = np.repeat(PIXELS, 20, axis=0)  # more than are looked at beforehand
    before = open_images(Items(list(pixels)), 20)
    assert open_images(Items(list(pixels)), 20).digest == before.digest
    pixels[50] += 1
    assert open_images(Items(list(pixels)), 20).digest != before.digest


def test_other_unreadable_images_give_another_digest():
    def read(lost, index):
        if index == lost:
            raise UnreadableImageError("gone for a moment")
        return Image.fromarray(PIXELS[index])

    sources = (ImageSource(partial(read, lost), list("abcdef"), None, None, "same", "") for lost in (None, 1, 2))
    assert len({open_images(source, 20).digest for source in sources}) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda file: Image.fromarray(PIXELS[0]).save(file.rename(file.with_name("other.png"))),
        lambda file: file.rename(file.with_name("renamed.png")),
        lambda file: file.write_bytes(b"no image"),
        lambda file: Image.fromarray(PIXELS[0]).save(file),
        lambda file: None,
    ],
    ids=["another file", "another name", "unreadable", "pixels", "copied"],
)
def test_lists_of_as_many_images_differ_unless_they_are_copies(tmp_path, write_images, change, request):
    """What processes compare at the start of a run; `ImageSet.digest` differs as well, and with a copy's times."""
    first, second = (write_images(tmp_path / name, PIXELS) for name in ("first", "second"))
    for file in first.iterdir():
        os.utime(file, (1, 1))
    change(sorted(second.iterdir())[3])
    one, other = open_images(first, 20), open_images(second, 20)
    assert (digest_image_list(one) == digest_image_list(other)) == ("copied" in request.node.name)
    assert one.digest != other.digest


def test_a_large_file_is_known_by_a_part_and_the_time_when_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "FULL_DIGEST_BYTES", PIXELS.nbytes // 3)
    np.save(tmp_path / "a.npy", PIXELS)
    before = open_images(tmp_path / "a.npy").digest
    assert open_images(tmp_path / "a.npy").digest == before
    changed = PIXELS.copy()
    changed[1] += 1
    np.save(tmp_path / "a.npy", changed)
    os.utime(tmp_path / "a.npy", (1, 1))
    assert open_images(tmp_path / "a.npy").digest != before


def test_a_survey_counts_all_images_and_reads_few(tmp_path, write_images):
    write_images(tmp_path, PIXELS, np.arange(6) % 2)
    for number in range(4):
        (tmp_path / "class 0" / f"broken {number}.png").write_bytes(b"no image")
    found = survey_images(tmp_path, 20, looks=5)
    assert (found.count, found.labels, found.source, found.looked_at) == (10, True, str(tmp_path), 5)
    assert found.skipped[0] == ("class 0/broken 0.png", "UnidentifiedImageError: cannot identify image file")
    assert not survey_images(tmp_path, 20, labels=False).labels
    assert len(survey_images(tmp_path, 20, looks=100).skipped) == 4
    for file in tmp_path.rglob("*.png"):
        file.write_bytes(b"no image")
    assert len(survey_images(tmp_path, 20, looks=5).skipped) == 5
    with pytest.raises(UserError, match="none of the 10 images"):
        survey_images(tmp_path, 20)


def test_reading_ends_early_where_nothing_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "HOPELESS", 4)
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="none of the first 4 of the 6 images"):
        open_images(tmp_path, 16)
    Image.new("RGB", (20, 20)).save(tmp_path / "3.png")
    found = open_images(tmp_path, 16)
    assert (len(found), len(found.skipped)) == (1, 5)


@pytest.mark.parametrize("quick", [True, False])
def test_several_threads_read_only_what_takes_long(monkeypatch, quick):
    monkeypatch.setattr(store, "QUICK", 1e9 if quick else -1)
    monkeypatch.setattr(store, "MEASURED", 1)
    seen = []

    def read(index):
        seen.append(threading.get_ident())
        return Image.fromarray(PIXELS[index])

    source = ImageSource(read, list("abcdef"), None, None, "", "", workers=2)
    assert (open_images(source, 20).images == PIXELS).all()
    own = sum(thread == threading.get_ident() for thread in seen)
    assert own == (6 if quick else store.SLOW_MEASUREMENTS)


@pytest.mark.parametrize("resample", ["lanczos", "nearest", "box", "hamming"])
def test_a_filter_of_pillow_makes_the_squares_that_pillow_makes(resample):
    photo = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    resized = Image.fromarray(photo).resize((48, 32), Image.Resampling[resample.upper()])
    expected = np.asarray(resized)[4:28, 12:36]
    np.testing.assert_array_equal(squares_from_array(photo[None], Side(24, 32, resample))[0][4:28, 4:28], expected)
