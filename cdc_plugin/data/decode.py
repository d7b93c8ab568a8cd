"""One image file to 8-bit RGB, whatever its mode, depth and orientation; what can not be read says why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from cdc_plugin.data.source import UnreadableImageError

WITH_ALPHA = {"RGBA", "LA", "PA", "RGBa", "La"}


def decode_file(path: Path, side: int) -> Image.Image:
    """The first frame of an image file as RGB, upright.

    Args:
        side: the image will be made this small; JPEGs may be decoded at a fraction of their size, never below
            twice this.

    Raises:
        UnreadableImageError: empty, damaged, far too large or of an unknown format.
    """
    try:
        if path.stat().st_size == 0:
            raise UnreadableImageError("the file is empty")
        with Image.open(path) as image:
            image.draft(None, (2 * side, 2 * side))
            image.load()
            return to_rgb(_upright(image))
    except UnreadableImageError:
        raise
    except Image.DecompressionBombError as error:
        raise UnreadableImageError(f"too many pixels to decode safely ({error})") from error
    except Exception as error:  # damaged files make the decoders raise nearly every kind of error
        raise UnreadableImageError(f"{type(error).__name__}: {error}".replace(str(path), path.name)) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode of Pillow to 8-bit RGB.

    Transparent pixels become white: below them lie colours that nobody is meant to see, often black or
    random, and pictures cut out for the web are drawn for a white page.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_eight_bit(np.asarray(image))).convert("RGB")
    if image.mode in WITH_ALPHA or "transparency" in image.info:
        layer = image.convert("RGBA")
        page = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(page, layer).convert("RGB")
    return image.convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a garbled EXIF block says nothing about the pixels
        return image


def _eight_bit(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Deep grayscale to 8 bits by its range: [0, 1], 8-bit in a wide type, 16-bit, or wider integers."""
    numbers = values.astype(np.float64)
    if not np.isfinite(numbers).all():
        raise UnreadableImageError("pixels that are not finite numbers")
    low, high = float(numbers.min()), float(numbers.max())
    if low < 0:
        raise UnreadableImageError(f"pixels from {low:g} to {high:g}; expected none below 0")
    if np.issubdtype(values.dtype, np.floating) and high <= 1:
        numbers = numbers * 255
    elif high > 65535:
        numbers = numbers * (255 / high)
    elif high > 255:
        numbers = numbers / 257  # 65535 / 255: a fixed factor, so that dark images stay dark
    return np.rint(numbers).astype(np.uint8)
