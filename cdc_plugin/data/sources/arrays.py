"""Describe images in arrays: in memory, in tensors, and in .npy and .npz files, read at once or block by block."""

import contextlib
import hashlib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from cdc_plugin.data.decode import Pixels
from cdc_plugin.data.sources.base import ImageSource, number_classes, read_state
from cdc_plugin.errors import DataError

IMAGE_KEYS = ("x", "images", "data", "X")
LABEL_KEYS = ("y", "labels", "targets", "label", "Y")
LABELS_EXPECTED = "expected one integer or string per row; mend the labels, or ignore them (--no-labels)"
ONE_COLOUR = 1 << 63  # the bit of a fingerprint that blank images have
LAYOUTS = "(N, H, W), (N, H, W, 1), (N, H, W, 3), (N, H, W, 4) or (N, 3, H, W)"
UNPACKED_FREELY, MOST_TIMES = 1 << 30, 200  # bytes of an array, and times its packed size, beyond which it is a bomb
MOST_MEMBERS = 1000
LARGEST_IMAGE, BLOCK_BYTES = 1 << 29, 1 << 28  # bytes of an image, and of several that are read at once
FULL_DIGEST_BYTES = 1 << 30  # larger files are told apart by a sample of their rows, and their time of change


def describe_array(
    images: NDArray[Any] | torch.Tensor,
    labels: Any = None,
    description: str = "array",
    class_names: list[str] | None = None,
) -> ImageSource:
    """Return a source of images of one size in memory, named by their index."""
    return _build_source(to_pixels(images, description), labels, class_names, description)


def describe_array_file(path: Path, labels: bool = True) -> ImageSource:
    """Return a source of the images of a .npy file, or of a .npz file with their labels if it holds some."""
    images, known = _read_array_file(path, labels)
    pixels = to_pixels(images, str(path))
    # What would take long to read is known by a part of it, and the time when it was written.
    step = -(-pixels.nbytes // FULL_DIGEST_BYTES) if isinstance(images, np.memmap) else 1
    return _build_source(pixels, known, None, str(path), step, str(read_state(path)) if step > 1 else "")


def read_image_size(path: Path) -> tuple[int, ...]:
    """Return height and width of the images of a .npy or .npz file."""
    return to_pixels(np.atleast_1d(_read_array_file(path, labels=False)[0])[:1], str(path)).shape[1:3]


def fingerprint(images: Pixels, step: int = 1) -> NDArray[np.uint64]:
    """Return a number for each image (N, H, W, 3), or each k-th: equal for equal pixels, top bit set for one colour."""
    marks = []
    for image in images[::step]:
        pixels = np.ascontiguousarray(image).reshape(-1, 3)
        mark = int.from_bytes(hashlib.sha1(pixels.data, usedforsecurity=False).digest()[:8], "little") >> 1
        is_blank = (pixels[0] == pixels[-1]).all() and (pixels == pixels[0]).all()
        marks.append(mark | ONE_COLOUR if is_blank else mark)
    return np.array(marks, dtype=np.uint64)


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
    digest: str = ""  # where it is known

    def __len__(self) -> int:
        return len(self.names)

    def split(self, rows: range, size: int) -> Iterator[range]:
        """Yield consecutive blocks of ``size`` rows, fewer where images are large."""
        return split_rows(rows, size, prod(self.shape[1:]) * self.dtype.itemsize)


def split_rows(rows: range, size: int, row_bytes: int = 1) -> Iterator[range]:
    """Yield consecutive blocks of ``size`` rows, fewer where rows take many bytes; the last one is shorter."""
    size = max(1, min(size, BLOCK_BYTES // row_bytes))
    return (rows[start : start + size] for start in range(0, len(rows), size))


def read_rows_of_array(array: NDArray[Any], description: str, names: list[str] | None = None) -> ArrayRows:
    """Return the rows of an array in memory, named by their index where they have no other name."""
    names = names or number_rows(array.shape)
    return ArrayRows(
        array.shape, array.dtype, lambda ranges: (array[rows.start : rows.stop] for rows in ranges), names, description
    )


def read_rows_of_file(path: Path) -> ArrayRows:
    """Return the image rows of a .npy or .npz file, which takes the memory of one block, whatever its size.

    It is never unpickled, and labels are never looked at.
    """
    member = None
    with _explain_unreadable(path):
        if is_archive(path):
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                member = find_member(archive, _find_image_key(archive, path))
        with open_stream(path, member) as stream:
            shape, column_first, dtype = read_header(stream, path.stat().st_size if member is None else inf)
        if column_first or dtype.hasobject or not shape:  # objects are refused here
            return read_rows_of_array(_read_array_file(path, labels=False)[0], str(path))

    def blocks(ranges: Iterable[range]) -> Iterator[NDArray[Any]]:
        with _explain_unreadable(path), open_stream(path, member) as stream:
            read_header(stream)
            first = stream.tell()
            for rows in ranges:
                # In an archive forward only: what is skipped is unpacked, but once for all ranges.
                stream.seek(first + rows.start * prod(shape[1:]) * dtype.itemsize)
                block = np.empty((len(rows), *shape[1:]), dtype)
                if stream.readinto(block.reshape(-1).view(np.uint8)) < block.nbytes:
                    raise EOFError
                yield block

    return ArrayRows(shape, dtype, blocks, number_rows(shape), str(path))


def _build_source(
    pixels: Pixels, labels: Any, class_names: list[str] | None, description: str, step: int = 1, state: str = ""
) -> ImageSource:
    marks = fingerprint(pixels, step)
    digest = hashlib.blake2b(f"{pixels.shape} {state}".encode() + marks.tobytes(), digest_size=8).hexdigest()
    if labels is not None:
        labels, class_names = number_labels(labels, len(pixels), description, class_names)
    names, known = number_rows(pixels.shape), marks if step == 1 else None
    return ImageSource(pixels, names, labels, class_names, digest, description, marks=known)


def number_labels(
    labels: Any, count: int, description: str, class_names: list[str] | None = None
) -> tuple[NDArray[np.int64], list[str] | None]:
    """Return labels as (N,) numbers and the names of classes where they are words; refuse what is not one a sample."""
    labels, expected = np.asarray(labels), (count,)
    labels = labels[:, 0] if labels.shape == (*expected, 1) else labels
    is_text = labels.dtype.kind in "US"
    if labels.shape != expected or not (is_text or np.issubdtype(labels.dtype, np.integer) or labels.dtype == bool):
        raise DataError(f"{description} has {count} rows and labels {labels.dtype} {labels.shape}; {LABELS_EXPECTED}")
    if is_text:
        words = np.char.decode(labels, "utf-8", "replace") if labels.dtype.kind == "S" else labels
        labels, class_names = number_classes(words.tolist())
    return labels.astype(np.int64), class_names


def _read_array_file(path: Path, labels: bool) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return the image array and the labels of a file, as stored; never unpickles."""
    with _explain_unreadable(path):
        if not is_archive(path):
            with open_stream(path, None) as stream:
                read_header(stream, path.stat().st_size)
            # Copy-on-write: the file is not read whole and torch may take the rows without a warning.
            return np.load(path, mmap_mode="c", allow_pickle=False), None
        # Opened here, since NumPy leaves a broken archive open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            images = archive[_find_image_key(archive, path)]
            label_key = next((key for key in LABEL_KEYS if labels and key in archive.files), None)
            if label_key is not None and read_member_header(archive, label_key)[1].hasobject:
                raise DataError(f"{path}: {label_key} holds pickled objects; {LABELS_EXPECTED}")
            return images, None if label_key is None else archive[label_key]


def find_member(archive: Any, key: str) -> str:
    return f"{key}.npy" if f"{key}.npy" in archive.zip.namelist() else key


def read_member_header(archive: Any, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and type of an array; refuse one that unpacks to an absurd size or states more than it holds."""
    info = archive.zip.getinfo(find_member(archive, key))
    if info.file_size > max(UNPACKED_FREELY, MOST_TIMES * info.compress_size):
        raise ValueError(f"{info.filename} unpacks to more than {MOST_TIMES} times its size")
    with archive.zip.open(info) as stream:
        return read_header(stream, info.file_size)[::2]


def is_archive(path: Path) -> bool:
    """Return whether a file is a .npz; its content counts, not the extension."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


@contextlib.contextmanager
def _explain_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # damaged files make NumPy and zipfile raise nearly every kind of error
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
    low, high = (array.min(), array.max()) if array.dtype.kind in "biuf" else (np.nan, np.nan)
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
            read_member_header(archive, key)  # refused before memory is taken
            return key
    if len(archive.files) > MOST_MEMBERS:  # each of them would be opened
        raise ValueError(f"it holds {len(archive.files):,} arrays, none of them under {', '.join(IMAGE_KEYS)}")
    arrays = [key for key in archive.files if find_member(archive, key).endswith(".npy")]
    headers = {key: read_member_header(archive, key) for key in arrays}
    fitting = [key for key, (shape, dtype) in headers.items() if len(shape) in (3, 4) and dtype == np.uint8]
    if len(fitting) == 1:
        return fitting[0]
    raise DataError(
        f"{path}: expected the images under one of {', '.join(IMAGE_KEYS)}; found "
        f"{', '.join(archive.files)}; save them with np.savez(path, x=images, y=labels)"
    )


def number_rows(shape: tuple[int, ...]) -> list[str]:
    return [str(index) for index in range(shape[0] if shape else 0)]


@contextlib.contextmanager
def open_stream(path: Path, member: str | None) -> Iterator[Any]:
    """Open a .npy file, or a member of a .npz file."""
    if member is None:
        with open(path, "rb") as stream:
            yield stream
    else:
        with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
            yield stream


def read_header(stream: Any, size: float = inf) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read shape, order and type that a .npy stream begins with; refuse what does not fit into its size, or memory."""
    version = npy_format.read_magic(stream)
    read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    shape, column_first, dtype = read(stream)
    is_shape = all(type(side) is int and side >= 0 for side in shape)
    if not is_shape or (prod(shape) * dtype.itemsize > size and not dtype.hasobject):
        raise ValueError(f"it states the shape {shape}, which is more than it holds")
    if not 0 < prod(shape[1:]) * dtype.itemsize <= LARGEST_IMAGE:
        raise ValueError(f"rows of the shape {shape[1:]} are empty or take more than {LARGEST_IMAGE >> 20} MB each")
    return shape, column_first, dtype
