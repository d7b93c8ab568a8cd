"""Describe images in arrays: in memory, in tensors, and in .npy and .npz files, read at once or block by block."""

import contextlib
import hashlib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from cdc_plugin.data.cache import compute_digest
from cdc_plugin.data.decode import Pixels
from cdc_plugin.data.sources.base import ImageSource, read_state
from cdc_plugin.errors import DataError

IMAGE_KEYS = ("x", "images", "data", "X")
LABEL_KEYS = ("y", "labels", "targets", "label", "Y")
LAYOUTS = "(N, H, W), (N, H, W, 1), (N, H, W, 3), (N, H, W, 4) or (N, 3, H, W)"
UNPACKED_FREELY, MOST_TIMES = 1 << 30, 200  # bytes of an array, and times its packed size, beyond which it is a bomb
FULL_DIGEST_BYTES = 1 << 30  # larger files are told apart by a sample of their rows, and their time of change


def describe_array(
    images: NDArray[Any] | torch.Tensor,
    labels: Any = None,
    description: str = "array",
    class_names: list[str] | None = None,
) -> ImageSource:
    """Return a source of images of one size in memory, named by their index."""
    pixels = to_pixels(images, description)
    return _build_source(pixels, labels, class_names, description, digest_array(pixels))


def describe_array_file(path: Path) -> ImageSource:
    """Return a source of the images of a .npy file, or of a .npz file with their labels if it holds some."""
    images, labels = _read_array_file(path)
    pixels = to_pixels(images, str(path))
    # What would take long to read is known by a part of it, and the time when it was written.
    step = -(-pixels.nbytes // FULL_DIGEST_BYTES) if isinstance(images, np.memmap) else 1
    digest = digest_array(pixels, step)
    if step > 1:
        digest = compute_digest([digest, str(read_state(path))])
    return _build_source(pixels, labels, None, str(path), digest)


def read_image_size(path: Path) -> tuple[int, ...]:
    """Return height and width of the images of a .npy or .npz file."""
    return to_pixels(_read_array_file(path)[0][:1], str(path)).shape[1:3]


def digest_array(images: Pixels, step: int = 1) -> str:
    """Return a short hash of shape and content, or of every k-th row and the last."""
    chunk = 1024 * step
    state = hashlib.blake2b(repr(images.shape).encode(), digest_size=8)
    for start in range(0, len(images), chunk):
        state.update(np.ascontiguousarray(images[start : start + chunk : step]).data)
    state.update(np.ascontiguousarray(images[-1:]).data)
    return state.hexdigest()


def to_pixels(images: NDArray[Any] | torch.Tensor, description: str) -> Pixels:
    """Return image arrays of any accepted layout and type as uint8 (N, H, W, 3).

    >>> to_pixels(np.full((1, 2, 2), 0.5), "gray images")[0, 0, 0].tolist()
    [128, 128, 128]
    """
    array = images.detach().cpu().numpy() if isinstance(images, torch.Tensor) else np.asarray(images)
    array = _move_channels_last(array, description)
    if len(array) == 0 or 0 in array.shape[1:3]:
        raise DataError(f"{description} holds no images (shape {array.shape}); expected at least one")
    array = _to_eight_bit(array, description)
    if array.shape[3] == 3:
        return array
    if array.shape[3] == 4:
        # Transparent pixels become white, as in image files.
        alpha = array[..., 3:].astype(np.float32) / 255
        return np.rint(array[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)
    return np.repeat(array, 3, axis=3)


@dataclass(frozen=True)
class ArrayRows:
    """An array of images (N, ...) that need not be in memory."""

    shape: tuple[int, ...]  # as stored, in any layout that images come in
    dtype: np.dtype
    blocks: Callable[[Iterable[range]], Iterator[NDArray[Any]]]  # from rising ranges of rows to their content
    names: list[str]
    description: str  # what to call the array in messages

    def __len__(self) -> int:
        return len(self.names)


def split_rows(rows: range, size: int) -> Iterator[range]:
    """Yield consecutive blocks of ``size`` rows, the last one shorter."""
    return (rows[start : start + size] for start in range(0, len(rows), size))


def read_rows_of_array(array: NDArray[Any], description: str, names: list[str] | None = None) -> ArrayRows:
    """Return the rows of an array in memory, named by their index where they have no other name."""

    def blocks(ranges: Iterable[range]) -> Iterator[NDArray[Any]]:
        return (array[rows.start : rows.stop] for rows in ranges)

    return ArrayRows(array.shape, array.dtype, blocks, names or _number_rows(array.shape), description)


def read_rows_of_file(path: Path) -> ArrayRows:
    """Return the image rows of a .npy or .npz file, which takes the memory of one block, whatever its size.

    It is never unpickled, and labels are never looked at.
    """
    member = None
    with _explain_unreadable(path):
        if _is_archive(path):
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                _check_members(archive.zip)
                key = _find_image_key(archive, path)
                member = f"{key}.npy" if f"{key}.npy" in archive.zip.namelist() else key
        with _open_stream(path, member) as stream:
            shape, column_first, dtype = _read_header(stream)
        if member is None and prod(shape) * dtype.itemsize > path.stat().st_size:
            raise EOFError
        if column_first or dtype.hasobject or not shape:  # objects are refused here
            return read_rows_of_array(_read_array_file(path)[0], str(path))

    def blocks(ranges: Iterable[range]) -> Iterator[NDArray[Any]]:
        with _explain_unreadable(path), _open_stream(path, member) as stream:
            _read_header(stream)
            first = stream.tell()
            for rows in ranges:
                # In an archive forward only: what is skipped is unpacked, but once for all ranges.
                stream.seek(first + rows.start * prod(shape[1:]) * dtype.itemsize)
                block = np.empty((len(rows), *shape[1:]), dtype)
                content = stream.read(block.nbytes)
                if len(content) < block.nbytes:
                    raise EOFError
                block.reshape(-1).view(np.uint8)[:] = np.frombuffer(content, np.uint8)
                yield block

    return ArrayRows(shape, dtype, blocks, _number_rows(shape), str(path))


def _build_source(
    pixels: Pixels, labels: Any, class_names: list[str] | None, description: str, digest: str
) -> ImageSource:
    if labels is not None:
        labels, expected = np.asarray(labels), (len(pixels),)
        labels = labels[:, 0] if labels.shape == (*expected, 1) else labels
        is_whole = np.issubdtype(labels.dtype, np.integer) or labels.dtype == bool
        if labels.shape != expected or not is_whole:
            raise DataError(
                f"{description}: expected one integer label per image, shape {expected}; found "
                f"{labels.dtype} {labels.shape}; mend the labels or leave them out"
            )
        labels = labels.astype(np.int64)
    return ImageSource(pixels, _number_rows(pixels.shape), labels, class_names, digest, description)


def _read_array_file(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return the image array and the labels of a file, as stored; never unpickles."""
    with _explain_unreadable(path):
        if not _is_archive(path):
            # Copy-on-write: the file is not read whole and torch may take the rows without a warning.
            return np.load(path, mmap_mode="c", allow_pickle=False), None
        # Opened here, since NumPy leaves a broken archive open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            _check_members(archive.zip)
            key = _find_image_key(archive, path)
            label_key = next((key for key in LABEL_KEYS if key in archive.files), None)
            return archive[key], None if label_key is None else archive[label_key]


def _check_members(archive: zipfile.ZipFile) -> None:
    """Refuse arrays that unpack to absurd sizes, and headers that state more than there is: before memory is taken."""
    for info in archive.infolist():
        if info.file_size > max(UNPACKED_FREELY, MOST_TIMES * info.compress_size):
            raise ValueError(f"{info.filename} unpacks to more than {MOST_TIMES} times its size")
        if info.filename.endswith(".npy"):
            with archive.open(info) as stream:
                shape, _, dtype = _read_header(stream)
            if prod(shape) * dtype.itemsize > info.file_size and not dtype.hasobject:
                raise ValueError(f"{info.filename} states the shape {shape}, which is more than it holds")


def _is_archive(path: Path) -> bool:
    """Return whether a file is a .npz; its content counts, not the extension."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


@contextlib.contextmanager
def _explain_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = "it ends early" if isinstance(error, EOFError) else error
        raise DataError(
            f"{path} cannot be read as a NumPy file ({reason}); expected an array of images without pickled "
            "objects, such as np.savez(path, x=images, y=labels) writes"
        ) from error


def _move_channels_last(array: NDArray[Any], description: str) -> NDArray[Any]:
    if array.ndim == 3:
        return array[..., None]
    if array.ndim == 4 and array.shape[3] in (1, 3, 4):
        return array
    if array.ndim == 4 and array.shape[1] in (1, 3, 4):
        return array.transpose(0, 2, 3, 1)
    raise DataError(
        f"{description}: expected images of shape {LAYOUTS}; found {array.shape}; "
        "reshape the array, or save the images as files"
    )


def _to_eight_bit(array: NDArray[Any], description: str) -> Pixels:
    if array.dtype == np.uint8:
        return array
    low, high = array.min(), array.max()
    if array.dtype == bool or (np.issubdtype(array.dtype, np.floating) and low >= 0 and high <= 1):
        return np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    if np.issubdtype(array.dtype, np.integer) and low >= 0 and high <= 255:
        return array.astype(np.uint8)
    raise DataError(
        f"{description}: expected uint8 from 0 to 255 or floats from 0 to 1; found {array.dtype} "
        f"from {low:g} to {high:g}; undo the normalisation and convert to uint8"
    )


def _find_image_key(archive: Any, path: Path) -> str:
    """Return which member of a .npz file holds the images."""
    for key in IMAGE_KEYS:
        if key in archive.files:
            return key
    # Looking at a member decompresses it; done only when no usual name is there.
    fitting = [key for key in archive.files if archive[key].ndim in (3, 4) and archive[key].dtype == np.uint8]
    if len(fitting) == 1:
        return fitting[0]
    raise DataError(
        f"{path}: expected the images under one of {', '.join(IMAGE_KEYS)}; found "
        f"{', '.join(archive.files)}; save them with np.savez(path, x=images, y=labels)"
    )


def _number_rows(shape: tuple[int, ...]) -> list[str]:
    return [str(index) for index in range(shape[0] if shape else 0)]


@contextlib.contextmanager
def _open_stream(path: Path, member: str | None) -> Iterator[IO[bytes]]:
    """Open a .npy file, or a member of a .npz file."""
    if member is None:
        with open(path, "rb") as stream:
            yield stream
    else:
        with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
            yield stream


def _read_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read shape, order and type that a .npy stream begins with."""
    version = npy_format.read_magic(stream)
    read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    return read(stream)
