"""Small pictures inside the page itself, as data URIs, within a number of bytes that is fixed beforehand."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.images import ImageSet

BUDGET = 4_500_000  # bytes of all pictures of a page; a third more as base64, so that a page stays below 8 MB
LEAST_BYTES = 900  # below this a thumbnail of a photograph shows nothing
LARGEST_SIDE, SMALLEST_SIDE = 96, 32
QUALITIES = (85, 70, 50, 30)
HEADER_BYTES, BYTES_PER_PIXEL = 350, 0.37  # of photographs as JPEG of the first quality
FINGERPRINT_SIDE = 8


@dataclass(frozen=True)
class Thumbnail:
    """A small picture: ``uri`` is its content, ``name`` that of the image, ``caption`` what to say below it."""

    uri: str
    name: str
    caption: str


@dataclass(frozen=True)
class ThumbnailSize:
    """Longer side in pixels, and the bytes that one picture may take."""

    side: int
    most_bytes: int


def size_within(budget: int, count: int) -> ThumbnailSize:
    """The largest size at which ``count`` pictures fit into ``budget`` bytes: 32 to 96 pixels, in steps of 8."""
    most_bytes = budget // max(count, 1)
    side = int(np.sqrt(max(most_bytes - HEADER_BYTES, 0) / BYTES_PER_PIXEL)) // 8 * 8
    return ThumbnailSize(min(max(side, SMALLEST_SIDE), LARGEST_SIDE), most_bytes)


def encode(pixels: NDArray[np.uint8], size: ThumbnailSize) -> bytes:
    """One image (H, W, 3) as JPEG that keeps its shape and is never enlarged.

    Images of up to 32 pixels keep every pixel: the page enlarges them. Quality gives way before size where an image
    would take more than its bytes.
    """
    image = Image.fromarray(np.ascontiguousarray(pixels))
    side = min(max(image.size), size.side)
    while True:
        small = _without_colour_if_grey(_shrink(image, side))
        for quality in QUALITIES:
            data = _jpeg(small, quality)
            if len(data) <= size.most_bytes:
                return data
        if side <= FINGERPRINT_SIDE:
            return data
        side = max(side * 3 // 4, FINGERPRINT_SIDE)


def make_thumbnails(
    images: ImageSet, indices: Sequence[int], captions: Sequence[str], size: ThumbnailSize
) -> list[Thumbnail]:
    """One thumbnail for every index; an image that comes up again is read and encoded once.

    Images are read one at a time, so that a memory map on disk stays there.
    """
    uris: dict[int, str] = {}
    for index in sorted(set(indices)):
        data = encode(np.asarray(images.images[index]), size)
        uris[index] = "data:image/jpeg;base64," + base64.b64encode(data).decode("ascii")
    return [
        Thumbnail(uris[index], images.names[index], caption) for index, caption in zip(indices, captions, strict=True)
    ]


def fingerprint(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The brightness of an image (H, W, 3) on 8 x 8 fields, (64,): what two copies of one picture share."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    fields = image.resize((FINGERPRINT_SIDE, FINGERPRINT_SIDE), Image.Resampling.BOX, reducing_gap=2.0)
    return np.asarray(fields.convert("L"), dtype=np.float32).ravel()


def _shrink(image: Image.Image, side: int) -> Image.Image:
    longer = max(image.size)
    if side >= longer:
        return image
    width, height = (max(round(length * side / longer), 1) for length in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=2.0)


def _without_colour_if_grey(image: Image.Image) -> Image.Image:
    pixels = np.asarray(image)
    return Image.fromarray(pixels[:, :, 0].copy()) if (pixels == pixels[:, :, :1]).all() else image


def _jpeg(image: Image.Image, quality: int) -> bytes:
    stream = io.BytesIO()
    # Pixels that are shown enlarged keep their own colour each; elsewhere the eye does not see the difference.
    subsampling = 0 if max(image.size) <= SMALLEST_SIDE else 2
    image.save(stream, "JPEG", quality=quality, optimize=True, subsampling=subsampling)
    return stream.getvalue()
