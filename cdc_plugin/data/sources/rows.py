"""Image arrays read block by block, so that a file of any size takes the memory of one block."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.lib import format as numpy_format
from numpy.typing import NDArray

from cdc_plugin.data.row_file import RowFile
from cdc_plugin.data.sources.arrays import image_key, unreadable_file

UNREADABLE = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class ArrayRows:
    """An array of images (N, ...) that need not be in memory.

    Args:
        shape, dtype: as stored, in any layout that images come in.
        blocks: from rising ranges of rows to their content; what lies between them is not kept.
        names: one a row.
        description: what to call the array in messages.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    blocks: Callable[[Iterable[range]], Iterator[NDArray[Any]]]
    names: list[str]
    description: str

    def __len__(self) -> int:
        return len(self.names)


def in_blocks(rows: range, size: int) -> Iterator[range]:
    """Consecutive blocks of ``size`` rows, the last one shorter."""
    return (rows[start : start + size] for start in range(0, len(rows), size))


def rows_in_memory(array: NDArray[Any] | RowFile, description: str, names: list[str] | None = None) -> ArrayRows:
    """An array that is there already, or its rows on disk; named by their index where they have no other name."""

    def blocks(ranges: Iterable[range]) -> Iterator[NDArray[Any]]:
        return (array[rows.start : rows.stop] for rows in ranges)

    return ArrayRows(array.shape, array.dtype, blocks, names or _numbers(array.shape), description)


def rows_of_file(path: Path) -> ArrayRows:
    """The images of a .npy or .npz file; never unpickles, and never looks at labels."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"PK"  # what is inside counts, not the extension
        return _packed_rows(path) if packed else _plain_rows(path)
    except UNREADABLE as error:
        raise unreadable_file(path, error) from error


def _plain_rows(path: Path) -> ArrayRows:
    whole = np.load(path, mmap_mode="c", allow_pickle=False)
    if not whole.flags.c_contiguous or whole.ndim == 0 or whole.size == 0:
        return rows_in_memory(whole, str(path))
    # Read by seeking: the file may be removed or cut meanwhile.
    return rows_in_memory(RowFile(path, whole.shape, whole.dtype, whole.offset), str(path))


def _packed_rows(path: Path) -> ArrayRows:
    # Opened here, since NumPy leaves a broken archive open.
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
        key = image_key(archive, path)
        member = f"{key}.npy" if f"{key}.npy" in archive.zip.namelist() else key
        with archive.zip.open(member) as stream:
            shape, column_first, dtype = _header(stream)
        if column_first or dtype.hasobject:  # the latter is refused here
            return rows_in_memory(archive[key], str(path))

    def blocks(ranges: Iterable[range]) -> Iterator[NDArray[Any]]:
        try:
            with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
                _header(stream)
                first = stream.tell()
                for rows in ranges:
                    # Forward only: what is skipped is unpacked, but once for all ranges.
                    stream.seek(first + rows.start * prod(shape[1:]) * dtype.itemsize)
                    block = (len(rows), *shape[1:])
                    content = stream.read(prod(block) * dtype.itemsize)
                    yield np.frombuffer(bytearray(content), dtype).reshape(block)
        except UNREADABLE as error:
            raise unreadable_file(path, error) from error

    return ArrayRows(shape, dtype, blocks, _numbers(shape), str(path))


def _numbers(shape: tuple[int, ...]) -> list[str]:
    return [str(index) for index in range(shape[0] if shape else 0)]


def _header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and type that a .npy stream begins with."""
    version = numpy_format.read_magic(cast(BinaryIO, stream))
    read = numpy_format.read_array_header_1_0 if version == (1, 0) else numpy_format.read_array_header_2_0
    return read(cast(BinaryIO, stream))
