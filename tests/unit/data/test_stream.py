import os
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from cdc_plugin.data.decode import UnreadableImageError
from cdc_plugin.data.images import open_images
from cdc_plugin.data.sources.base import ImageSource
from cdc_plugin.data.stream import open_stream, read_images
from cdc_plugin.errors import UserError


@pytest.fixture
def photos(tmp_path, digits, write_images):
    return write_images(tmp_path / "photos", digits[0][:20], digits[1][:20])


def files(tmp_path, images) -> dict[str, object]:
    """The same images in every kind of array that is taken."""
    labels = np.arange(len(images))
    np.save(tmp_path / "plain.npy", images)
    np.save(tmp_path / "column first.npy", np.asfortranarray(images))
    np.savez(tmp_path / "stored.npz", y=labels, x=images)
    np.savez_compressed(tmp_path / "packed.npz", images=images)
    np.savez(tmp_path / "column first.npz", x=np.asfortranarray(images))
    found: dict[str, object] = {path.name: path for path in tmp_path.glob("*.np?")}
    return found | {"array": images, "tensor": torch.from_numpy(images)}


def whole(source, side: int, size: int):
    """All chunks put together."""
    stream = open_stream(source, side)
    chunks = list(stream.chunks(size))
    assert all(len(chunk.squares) == size for chunk in chunks[:-1])
    assert 1 <= len(chunks[-1].squares) <= size
    names = [name for chunk in chunks for name in chunk.names]
    return names, np.concatenate([c.places for c in chunks]), np.concatenate([c.squares for c in chunks]), stream


@pytest.mark.parametrize("size", [1, 7, 20, 64])
@pytest.mark.parametrize("side", [32, 24])
def test_a_folder_in_chunks_is_what_it_is_in_one_piece(photos, side, size):
    names, places, squares, stream = whole(photos, side, size)
    known = open_images(photos, side)
    assert names == known.names
    assert places.tolist() == list(range(20))
    np.testing.assert_array_equal(squares, known.images)
    assert stream.unreadable == []
    assert len(stream) == 20


@pytest.mark.parametrize(
    "layout",
    [
        lambda images: images,
        lambda images: images[..., 0],
        lambda images: images.astype(np.float32) / 255,
        lambda images: np.ascontiguousarray(images.transpose(0, 3, 1, 2)),
        lambda images: np.repeat(images, 2, axis=2),
    ],
    ids=["rgb", "gray", "float", "channels first", "wide"],
)
def test_array_files_in_chunks_are_what_they_are_in_one_piece(tmp_path, digits, layout):
    sources = files(tmp_path, layout(digits[0][:20]))
    assert len(sources) == 7
    for name, source in sources.items():
        for side in (32, 20):
            names, _, squares, _ = whole(source, side, 6)
            assert names == [str(index) for index in range(20)], name
            np.testing.assert_array_equal(squares, open_images(source, side).images, err_msg=name)


def test_data_sets_by_name_and_objects_are_taken_too(digits):
    assert len(open_stream("digits", 32)) == 1797
    pairs = [(Image.fromarray(image), int(label)) for image, label in zip(digits[0][:5], digits[1][:5], strict=True)]
    assert whole(pairs, 32, 2)[2].shape == (5, 32, 32, 3)
    named = ImageSource(digits[0][:3], ["a", "b", "c"], None, None, "", "mine")
    assert whole(named, 32, 2)[0] == ["a", "b", "c"]


def test_unreadable_images_are_told_and_the_places_of_the_others_are_right(photos):
    broken = sorted(photos.rglob("*.png"))[3]
    broken.write_bytes(b"x")
    names, places, squares, stream = whole(photos, 32, 4)
    assert [stream.source.names[place] for place, _ in stream.unreadable] == [broken.relative_to(photos).as_posix()]
    assert places.tolist() == [0, 1, 2, *range(4, 20)]
    assert len(names) == len(squares) == 19
    np.testing.assert_array_equal(read_images(photos, 32, places[5:8]), squares[5:8])
    list(stream.chunks(8))
    assert len(stream.unreadable) == 1  # a second pass does not count them twice
    with pytest.raises(UserError, match=broken.name):
        read_images(photos, 32, [2, 3])
    squares, skipped = stream.read([3])
    assert (len(squares), len(skipped)) == (0, 1)


def test_some_images_are_read_in_the_order_asked_for(tmp_path, photos, digits):
    wanted = [19, 0, 7, 7]
    for source in (photos, *files(tmp_path, digits[0][:20]).values()):
        everything = whole(source, 32, 20)[2]
        np.testing.assert_array_equal(read_images(source, 32, wanted), everything[wanted])
        assert read_images(source, 32, []).shape == (0, 32, 32, 3)
        with pytest.raises(IndexError):
            read_images(source, 32, [20])


def test_reading_goes_on_while_the_caller_works(digits):
    """The second chunk is complete although it was not asked for."""
    seen = threading.Event()

    def content(index: int) -> Image.Image:
        if index == 19:
            seen.set()
        return Image.fromarray(digits[0][index])

    source = ImageSource(content, [str(index) for index in range(20)], None, None, "", "mine", workers=2)
    next(open_stream(source, 32).chunks(10))
    assert seen.wait(10)


def test_an_error_while_reading_ahead_reaches_the_caller(tmp_path, digits):
    path = tmp_path / "packed.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).integers(0, 255, (500, 32, 32, 3), dtype=np.uint8))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as a NumPy file"):
        list(open_stream(path, 32).chunks(50))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((5, 4)), "expected images of shape"),
        (np.zeros((0, 8, 8, 3), np.uint8), "no images"),
        (np.full((5, 8, 8), 300), "expected uint8"),
        (np.array(["a", "b"], dtype=object), "pickled"),
    ],
    ids=["layout", "empty", "range", "objects"],
)
def test_arrays_that_are_no_images_are_refused_at_once(tmp_path, array, message):
    np.savez(tmp_path / "a.npz", x=array)
    with pytest.raises(UserError, match=message):
        open_stream(tmp_path / "a.npz", 32)


def test_labels_are_not_looked_at(tmp_path, digits):
    np.savez(tmp_path / "a.npz", x=digits[0][:4], y=np.array(["not", "a", "label"]))
    assert len(whole(tmp_path / "a.npz", 32, 4)[0]) == 4


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_an_array_file_that_is_cut_while_it_is_read_is_refused(tmp_path, digits, name):
    path = tmp_path / name
    (np.save if name == "a.npy" else np.savez)(path, digits[0])
    chunks = open_stream(path, 32).chunks(6)
    next(chunks)
    os.truncate(path, path.stat().st_size // 4)
    with pytest.raises(UserError, match="it ends early"):
        list(chunks)


PIECES = [range(3, 9), range(9, 10), range(14, 20)]
PLACES = [*range(3, 10), *range(14, 20)]


@pytest.mark.parametrize("size", [1, 4, 6, 64])
def test_pieces_of_every_kind_of_source_are_those_of_the_whole(tmp_path, digits, write_images, size):
    folder = write_images(tmp_path / "photos", digits[0][:20])
    for source in (folder, *files(tmp_path, digits[0][:20]).values()):
        stream = open_stream(source, 32)
        chunks = list(stream.chunks(size, PIECES))
        assert np.concatenate([chunk.places for chunk in chunks]).tolist() == PLACES
        np.testing.assert_array_equal(np.concatenate([chunk.squares for chunk in chunks]), digits[0][PLACES])
        assert [name for chunk in chunks for name in chunk.names] == [stream.source.names[place] for place in PLACES]
        for chunk in chunks:
            assert len(chunk.places) <= size
            assert sum(chunk.places[0] in piece and chunk.places[-1] in piece for piece in PIECES) == 1


def counting_source(images, broken: set[int], asked: list[int]) -> ImageSource:
    def read(index: int) -> Image.Image:
        asked.append(index)
        if index in broken:
            raise UnreadableImageError(f"no {index}")
        return Image.fromarray(images[index])

    return ImageSource(read, [f"{place}.png" for place in range(len(images))], None, None, "", "mine")


def test_only_pieces_are_read_and_what_cannot_be_is_told_by_its_place_in_the_source(digits):
    asked: list[int] = []
    stream = open_stream(counting_source(digits[0][:20], {0, 4, 9, 19}, asked), 32)
    chunks = list(stream.chunks(4, PIECES))
    assert asked == PLACES
    assert stream.unreadable == [(4, "no 4"), (9, "no 9"), (19, "no 19")]
    assert np.concatenate([chunk.places for chunk in chunks]).tolist() == [3, 5, 6, 7, 8, 14, 15, 16, 17, 18]


def test_pieces_without_a_readable_image_do_not_condemn_the_source(digits):
    stream = open_stream(counting_source(digits[0][:20], set(PLACES), []), 32)
    assert list(stream.chunks(4, PIECES)) == []
    assert [place for place, _ in stream.unreadable] == PLACES
    with pytest.raises(UserError, match="none of the 20 images"):
        list(open_stream(counting_source(digits[0][:20], {*range(20)}, []), 32).chunks())
