"""Thumbnails: whole images inside the page, small, and never more bytes than were given out."""

from __future__ import annotations

import base64
import io
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from cdc_plugin.data.images import ImageSet
from cdc_plugin.report.gallery.thumbnails import ThumbnailSize, encode, fingerprint, make_thumbnails, size_within

AMPLE = ThumbnailSize(96, 100_000)


def decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def slope(height: int, width: int) -> np.ndarray:
    """A colour picture without noise, so that JPEG keeps it nearly as it is."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([across, down, 255 - across], axis=2).astype(np.uint8)


def noise(side: int) -> np.ndarray:
    """The worst case: what no format can make small."""
    return np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)


def test_a_thumbnail_shows_the_image_with_its_name_and_caption():
    images = ImageSet(np.stack([noise(32), slope(32, 32)]), ["a/noise.png", "b/slope.png"])
    (thumbnail,) = make_thumbnails(images, [1], ["97 %"], AMPLE)
    kind, content = thumbnail.uri.split(",")
    assert kind == "data:image/jpeg;base64"
    assert (thumbnail.name, thumbnail.caption) == ("b/slope.png", "97 %")
    shown = np.asarray(decoded(base64.b64decode(content)).convert("RGB"), dtype=int)
    assert np.abs(shown - slope(32, 32)).mean() < 4


@pytest.mark.parametrize("side", [8, 31, 32])
def test_images_of_up_to_32_pixels_keep_every_pixel(side):
    assert decoded(encode(slope(side, side), AMPLE)).size == (side, side)


def test_large_images_are_made_small_and_middling_ones_are_not_enlarged():
    assert decoded(encode(slope(256, 256), AMPLE)).size == (96, 96)
    assert decoded(encode(slope(48, 48), AMPLE)).size == (48, 48)


def test_images_that_are_not_square_keep_their_shape():
    assert decoded(encode(slope(100, 200), AMPLE)).size == (96, 48)
    assert decoded(encode(slope(300, 1), AMPLE)).size == (1, 96)


def test_grey_images_stored_in_three_channels_are_kept_in_one():
    grey = np.repeat(slope(64, 64)[:, :, :1], 3, axis=2)
    assert decoded(encode(grey, AMPLE)).mode == "L"
    grey[5, 5, 2] ^= 128  # one coloured pixel makes it a colour image
    assert decoded(encode(grey, AMPLE)).mode == "RGB"


@pytest.mark.parametrize("most_bytes", [3000, 1500, 900])
@pytest.mark.parametrize("side", [32, 64, 256])
def test_even_noise_stays_within_the_bytes_given(side, most_bytes):
    assert len(encode(noise(side), ThumbnailSize(96, most_bytes))) <= most_bytes


def test_what_can_not_be_made_small_enough_is_shown_all_the_same():
    assert decoded(encode(noise(64), ThumbnailSize(96, 10))).size == (8, 8)


def test_more_thumbnails_are_smaller_and_together_never_pass_the_budget():
    sizes = [size_within(4_500_000, count) for count in (0, 1, 100, 1000, 2000, 4000, 1_000_000)]
    assert [size.side for size in sizes[:3]] == [96, 96, 96]
    assert sizes[-1].side == 32
    assert all(a.side >= b.side for a, b in pairwise(sizes))
    for count in (1, 7, 2000):
        assert size_within(4_500_000, count).most_bytes * count <= 4_500_000


def test_an_image_that_comes_up_again_is_encoded_once_and_keeps_both_captions():
    reads = []

    class Counted:
        def __getitem__(self, index: int) -> np.ndarray:
            reads.append(index)
            return slope(32, 32)

    images = ImageSet(Counted(), ["first", "second", "third"])  # type: ignore[arg-type]
    shown = make_thumbnails(images, [2, 0, 2], ["a", "b", "c"], AMPLE)
    assert reads == [0, 2]  # in the order in which they lie on a disk
    assert [(t.name, t.caption) for t in shown] == [("third", "a"), ("first", "b"), ("third", "c")]
    assert shown[0].uri is shown[2].uri


def test_memory_maps_give_the_same_thumbnails_as_arrays(tmp_path):
    pixels = np.stack([slope(40, 40), noise(40)])
    np.save(tmp_path / "images.npy", pixels)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    expected = make_thumbnails(ImageSet(pixels, ["0", "1"]), [0, 1], ["", ""], AMPLE)
    assert make_thumbnails(ImageSet(mapped, ["0", "1"]), [0, 1], ["", ""], AMPLE) == expected


def test_a_caption_for_every_image_is_demanded():
    with pytest.raises(ValueError):
        make_thumbnails(ImageSet(np.stack([slope(8, 8)]), ["0"]), [0], [], AMPLE)


def test_the_fingerprint_is_the_mean_brightness_of_each_field():
    pixels = np.zeros((16, 16, 3), dtype=np.uint8)
    pixels[:2, :2] = 200
    pixels[0, 2:4] = 100  # half of the field beside it
    assert fingerprint(pixels)[:3].tolist() == [200, 50, 0]


def test_fingerprints_of_copies_agree_and_those_of_other_digits_do_not(digits):
    pixels, _ = digits
    copy = np.asarray(decoded(encode(pixels[0], AMPLE)).convert("RGB"))
    looks = np.stack([fingerprint(image) for image in pixels])
    apart = np.abs(looks - fingerprint(copy)).mean(axis=1)
    assert apart[0] < 4
    assert (apart[1:] > 4).all()
