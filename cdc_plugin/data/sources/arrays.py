"""Images that come as arrays: in memory, in .npy and .npz files, and in torch tensors."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdc_plugin.data.resize import Pixels
from cdc_plugin.data.row_file import RowFile
from cdc_plugin.data.sources.base import WHOLE_HASH_BYTES, ImageSource, digest_of, digest_of_array
from cdc_plugin.data.sources.folder_index import state_of
from cdc_plugin.errors import UserError

IMAGE_KEYS = ("x", "images", "data", "X")
LABEL_KEYS = ("y", "labels", "targets", "label", "Y")
LAYOUTS = "(N, H, W), (N, H, W, 1), (N, H, W, 3), (N, H, W, 4) or (N, 3, H, W)"


def array_source(images: NDArray[Any] | torch.Tensor, labels: Any = None, description: str = "array") -> ImageSource:
    """Images of one size in memory, named by their index."""
    return _source(as_pixels(images, description), labels, description)


def _source(pixels: Pixels | RowFile, labels: Any, description: str) -> ImageSource:
    return ImageSource(
        content=pixels,
        names=[str(index) for index in range(len(pixels))],
        labels=None if labels is None else _checked_labels(labels, len(pixels), description),
        class_names=None,
        digest=_digest_of_file(pixels) if isinstance(pixels, RowFile) else digest_of_array(pixels),
        description=description,
    )


def _digest_of_file(rows: RowFile) -> str:
    """Of the content; what would take long to read is known by a part of it, and the time when it was written."""
    if rows.nbytes <= WHOLE_HASH_BYTES:
        return digest_of_array(rows)
    step = -(-rows.nbytes // WHOLE_HASH_BYTES)
    return digest_of([digest_of_array(rows, step), str(state_of(rows.path))])


def array_file_source(path: Path) -> ImageSource:
    """Images of a .npy file, or of a .npz file with their labels if it holds some."""
    images, labels = read_array_file(path)
    ready = images.dtype == np.uint8 and images.ndim == 4 and images.shape[3] == 3 and images.size
    if isinstance(images, np.memmap) and images.flags.c_contiguous and ready:
        # Read by seeking, since the pages of a map would count as memory.
        return _source(RowFile(path, images.shape, images.dtype, images.offset), labels, str(path))
    return array_source(images, labels, str(path))


def image_shape_of_file(path: Path) -> tuple[int, ...]:
    """Height and width of the images of a file."""
    return as_pixels(read_array_file(path)[0][:1], str(path)).shape[1:3]


def read_array_file(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """The image array and the labels of a file, as stored; never unpickles."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"PK"  # what is inside counts, not the extension
        if not packed:
            # Copy-on-write: the file is not read whole and torch may take the rows without a warning.
            return np.load(path, mmap_mode="c", allow_pickle=False), None
        # Opened here, since NumPy leaves a broken archive open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            key = image_key(archive, path)
            label_key = next((key for key in LABEL_KEYS if key in archive.files), None)
            return archive[key], None if label_key is None else archive[label_key]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise unreadable_file(path, error) from error


def unreadable_file(path: Path, error: Exception) -> UserError:
    reason = "it ends early" if isinstance(error, EOFError) else error
    return UserError(
        f"{path} can not be read as a NumPy file ({reason}); expected an array of images without pickled "
        "objects, such as np.savez(path, x=images, y=labels) writes"
    )


def as_pixels(images: NDArray[Any] | torch.Tensor, description: str) -> Pixels:
    """Any accepted layout and type of image array as uint8 (N, H, W, 3)."""
    array = images.detach().cpu().numpy() if isinstance(images, torch.Tensor) else np.asarray(images)
    array = _channels_last(array, description)
    if len(array) == 0 or 0 in array.shape[1:3]:
        raise UserError(f"{description} holds no images (shape {array.shape}); expected at least one")
    array = _eight_bit(array, description)
    if array.shape[3] == 3:
        return array
    if array.shape[3] == 4:
        # Transparent pixels become white, as in image files.
        alpha = array[..., 3:].astype(np.float32) / 255
        return np.rint(array[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)
    return np.repeat(array, 3, axis=3)


def _channels_last(array: NDArray[Any], description: str) -> NDArray[Any]:
    if array.ndim == 3:
        return array[..., None]
    if array.ndim == 4 and array.shape[3] in (1, 3, 4):
        return array
    if array.ndim == 4 and array.shape[1] in (1, 3, 4):
        return array.transpose(0, 2, 3, 1)
    raise UserError(
        f"{description}: expected images of shape {LAYOUTS}; found {array.shape}; "
        "reshape the array, or save the images as files"
    )


def _eight_bit(array: NDArray[Any], description: str) -> Pixels:
    if array.dtype == np.uint8:
        return array
    low, high = array.min(), array.max()
    if array.dtype == bool or (np.issubdtype(array.dtype, np.floating) and low >= 0 and high <= 1):
        return np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    if np.issubdtype(array.dtype, np.integer) and low >= 0 and high <= 255:
        return array.astype(np.uint8)
    raise UserError(
        f"{description}: expected uint8 from 0 to 255 or floats from 0 to 1; found {array.dtype} "
        f"from {low:g} to {high:g}; undo the normalisation and convert to uint8"
    )


def _checked_labels(labels: Any, count: int, description: str) -> NDArray[np.int64]:
    values = np.asarray(labels)
    if values.shape == (count, 1):
        values = values[:, 0]
    whole = np.issubdtype(values.dtype, np.integer) or values.dtype == bool
    if values.shape != (count,) or not whole:
        raise UserError(
            f"{description}: expected one whole-number label an image, shape ({count},); found "
            f"{values.dtype} {values.shape}; mend the labels or leave them out"
        )
    return values.astype(np.int64)


def image_key(archive: Any, path: Path) -> str:
    """Which member of a .npz file holds the images."""
    for key in IMAGE_KEYS:
        if key in archive.files:
            return key
    # Looking at a member decompresses it; done only when no usual name is there.
    fitting = [key for key in archive.files if archive[key].ndim in (3, 4) and archive[key].dtype == np.uint8]
    if len(fitting) == 1:
        return fitting[0]
    raise UserError(
        f"{path}: expected the images under one of {', '.join(IMAGE_KEYS)}; found "
        f"{', '.join(archive.files)}; save them with np.savez(path, x=images, y=labels)"
    )
