"""Decode image files to 8-bit RGB, whatever their mode, depth and orientation, and make squares of one size of them."""

import contextlib
import functools
import importlib
import io
import os
import stat
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch.nn import functional as F

from cdc_plugin.data.side import Side

Pixels = NDArray[np.uint8]

READ_WHOLE = 1 << 24  # bytes; smaller files are read in one go, since threads wait for each other at every read
ORIENTATION = 0x0112  # the EXIF tag
HEIF_MAGIC = {b"ftyp" + brand for brand in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")}  # at byte 4
LONGEST = 16  # times its short side: what is kept of a strip
INTERPOLATED = ("bilinear", "bicubic")  # by torch; Pillow resizes in other ways
WITH_ALPHA = {"RGBA", "LA", "PA", "RGBa", "La"}


class UnreadableImageError(Exception):
    """This one image cannot be used; the text is the reason that is reported."""


def decode_file(path: str | os.PathLike[str], side: int) -> Image.Image:
    """Return the first frame of an image file as RGB, upright; JPEGs may be decoded smaller, not below twice ``side``.

    Raises:
        UnreadableImageError: gone, empty, damaged, far too large or of an unknown format.
    """
    try:
        state = os.stat(path)
        if not stat.S_ISREG(state.st_mode) or state.st_size == 0:  # a pipe, a device or /proc/kmsg would never end
            kind = "the file is empty" if stat.S_ISREG(state.st_mode) else "it is not a regular file"
            raise UnreadableImageError(kind)
        with open(path, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size <= READ_WHOLE:
                return decode_bytes(file.readall(), side)
        with open(path, "rb") as file:
            return _decode(file, side)
    except (OSError, ValueError) as error:  # a NUL in the path
        reason = str(error).replace(os.fspath(path), os.path.basename(path))
        raise UnreadableImageError(f"{type(error).__name__}: {reason}") from error


def decode_bytes(content: bytes, side: int) -> Image.Image:
    """Return the first frame of an image as RGB, upright, from the bytes of its file."""
    return _decode(io.BytesIO(content), side)


def square_from_pil(image: Image.Image, side: int) -> Pixels:
    """Return the centre square of an RGB image, resized with antialiasing to (side, side, 3), or what a Side asks."""
    if isinstance(side, Side):
        return squares_from_array(np.asarray(image)[None], side)[0]
    width, height = image.size
    if width == height == side:
        return np.asarray(image)
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    # Cropping within the resize keeps a 1 x 10,000 strip from becoming a giant on the way.
    box = (left, top, left + short, top + short)
    square = image.resize((side, side), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    return np.asarray(square)


def squares_from_array(images: Pixels, side: int) -> Pixels:
    """Return the centre squares of (N, H, W, 3) images, resized with antialiasing to (N, side, side, 3)."""
    if isinstance(side, Side):
        return _squares_as_stated(images, side)
    height, width = images.shape[1:3]
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    cropped = images[:, top : top + short, left : left + short]
    if short == side:
        return cropped
    batch = torch.from_numpy(np.array(cropped)).permute(0, 3, 1, 2)
    resized = F.interpolate(batch, size=(side, side), mode="bilinear", antialias=True, align_corners=False)
    return resized.permute(0, 2, 3, 1).numpy()


def _squares_as_stated(images: Pixels, side: Side) -> Pixels:
    """Return squares as the authors of a network make them: the whole photo is resized, then its centre is cut out."""
    height, width = images.shape[1:3]
    most = LONGEST * min(height, width)  # a strip would become a giant
    top, left = (max(edge - most, 0) // 2 for edge in (height, width))
    batch = torch.from_numpy(np.array(images[:, top : top + most, left : left + most])).permute(0, 3, 1, 2)
    edges = [side.stored, side.stored]
    if not side.squeezed:
        edges = [int(side.stored * edge / min(batch.shape[2:])) for edge in batch.shape[2:]]
    if edges != [*batch.shape[2:]] and side.resample not in INTERPOLATED:
        how = Image.Resampling[side.resample.upper()]
        squares = [Image.fromarray(image).resize(edges[::-1], how) for image in batch.permute(0, 2, 3, 1).numpy()]
        batch = torch.from_numpy(np.stack([np.asarray(square) for square in squares])).permute(0, 3, 1, 2)
    elif edges != [*batch.shape[2:]]:
        batch = F.interpolate(batch, size=edges, mode=side.resample, antialias=True, align_corners=False)
    # The centre that is shown starts where the authors let it start.
    top, left = (max((edge - side.shown) // 2 - (side.stored - side.shown) // 2, 0) for edge in edges)
    return batch[:, :, top : top + side.stored, left : left + side.stored].permute(0, 2, 3, 1).numpy()


def _decode(file: BinaryIO, side: int) -> Image.Image:
    if file.seek(0, io.SEEK_END) == 0:
        raise UnreadableImageError("the file is empty")
    file.seek(0)
    is_heif = file.read(12)[4:] in HEIF_MAGIC
    if is_heif:
        _register_heif()
    file.seek(0)
    try:
        with Image.open(file) as image:
            if not isinstance(side, Side):  # whose squares are to be those of the authors, bit by bit
                image.draft(None, (2 * side, 2 * side))
            image.load()
            return to_rgb(_turn_upright(image))
    except UnreadableImageError:
        raise
    except Image.DecompressionBombError as error:
        raise UnreadableImageError(f"too many pixels to decode safely ({error})") from error
    except Image.UnidentifiedImageError as error:  # its own text names the stream, not the file
        reason = "UnidentifiedImageError: cannot identify image file"
        raise UnreadableImageError('HEIC; pip install "cdc-plugin[heic]"' if is_heif else reason) from error
    except Exception as error:  # damaged files make the decoders raise nearly every kind of error
        raise UnreadableImageError(f"{type(error).__name__}: {error}") from error


@functools.cache
def _register_heif() -> None:
    """Let Pillow read HEIC, if the package for it is installed."""
    with contextlib.suppress(ImportError):  # images are then skipped, each with that reason
        importlib.import_module("pillow_heif").register_heif_opener()


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode of Pillow to 8-bit RGB; an RGB image is returned as it is.

    Transparent pixels become white: below them lie colours that nobody is meant to see, often black or
    random, and pictures cut out for the web are drawn for a white page.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_to_eight_bit(np.asarray(image))).convert("RGB")
    if image.mode in WITH_ALPHA or "transparency" in image.info:
        layer = image.convert("RGBA")
        page = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(page, layer).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _turn_upright(image: Image.Image) -> Image.Image:
    try:
        if image.getexif().get(ORIENTATION, 1) == 1:
            return image
        return ImageOps.exif_transpose(image)
    except Exception:  # a garbled EXIF block says nothing about the pixels
        return image


def _to_eight_bit(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Convert deep grayscale to 8 bits by its range: [0, 1], 8-bit in a wide type, 16-bit, or wider integers."""
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
