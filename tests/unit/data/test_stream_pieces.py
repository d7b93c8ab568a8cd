"""A stream that is read in pieces: what lies between them is not decoded."""

import numpy as np
import pytest
import torch
from PIL import Image

from cdc_plugin.data.decode import UnreadableImageError
from cdc_plugin.data.sources.base import ImageSource
from cdc_plugin.data.stream import open_stream

PIECES = [range(3, 9), range(9, 10), range(14, 20)]
PLACES = [*range(3, 10), *range(14, 20)]


def every_kind(tmp_path, images, write_images) -> list[object]:
    np.save(tmp_path / "plain.npy", images)
    np.save(tmp_path / "column first.npy", np.asfortranarray(images))
    np.savez(tmp_path / "stored.npz", x=images)
    np.savez_compressed(tmp_path / "packed.npz", x=images)
    folder = write_images(tmp_path / "photos", images)
    return [*sorted(tmp_path.glob("*.np?")), folder, images, torch.from_numpy(images)]


@pytest.mark.parametrize("size", [1, 4, 6, 64])
def test_pieces_of_every_kind_of_source_are_those_of_the_whole(tmp_path, digits, write_images, size):
    for source in every_kind(tmp_path, digits[0][:20], write_images):
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


def test_only_the_images_of_the_pieces_are_read(digits):
    asked: list[int] = []
    list(open_stream(counting_source(digits[0][:20], set(), asked), 32).chunks(4, PIECES))
    assert asked == PLACES


def test_what_cannot_be_read_is_told_by_its_place_in_the_source(digits):
    stream = open_stream(counting_source(digits[0][:20], {0, 4, 9, 19}, []), 32)
    chunks = list(stream.chunks(4, PIECES))
    assert stream.unreadable == [(4, "no 4"), (9, "no 9"), (19, "no 19")]
    assert np.concatenate([chunk.places for chunk in chunks]).tolist() == [3, 5, 6, 7, 8, 14, 15, 16, 17, 18]


def test_pieces_without_a_readable_image_do_not_condemn_the_source(digits):
    stream = open_stream(counting_source(digits[0][:20], set(PLACES), []), 32)
    assert list(stream.chunks(4, PIECES)) == []
    assert [place for place, _ in stream.unreadable] == PLACES
