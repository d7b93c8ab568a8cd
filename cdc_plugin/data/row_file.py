"""Rows of one shape and type in a file on disk, read by seeking.

Not a memory map: mapped pages count as memory of the process, which would then grow with the data.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from itertools import pairwise
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cdc_plugin.errors import UserError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class RowFile:
    """An array (N, ...) on disk that is indexed like one in memory; what is read is a fresh array.

    The file is opened at once and stays open, so that the rows can be read even when the file is removed meanwhile.
    Threads and forked processes may read at once; a pickled copy opens the file again.

    Args:
        shape: of the whole array, the number of rows first.
        offset: bytes before the first row.
    """

    def __init__(self, path: str | os.PathLike[str], shape: tuple[int, ...], dtype: DTypeLike, offset: int = 0) -> None:
        self.path, self.shape, self.dtype, self.offset = Path(path), tuple(shape), np.dtype(dtype), offset
        self._row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        self._lock = threading.Lock()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with the object)
        found = os.fstat(self._file.fileno()).st_size
        if found < offset + self.nbytes:
            self._file.close()
            raise OSError(
                f"{path}: expected {offset + self.nbytes} bytes for rows of shape {self.shape}, found {found}"
            )

    @property
    def nbytes(self) -> int:
        return len(self) * self._row_bytes

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        """One row for a number; rows for a slice, a mask, or numbers in any order."""
        if isinstance(rows, slice):
            wanted = np.arange(len(self))[rows]
        else:
            wanted = np.asarray(rows)
            if wanted.dtype == bool:
                if wanted.shape != (len(self),):
                    raise IndexError(f"a mask of shape {wanted.shape} for {len(self)} rows")
                wanted = np.flatnonzero(wanted)
        if wanted.size and not np.issubdtype(wanted.dtype, np.integer):
            raise IndexError(f"rows are chosen by whole numbers, a slice or a mask; found {wanted.dtype}")
        flat = wanted.astype(np.int64).reshape(-1)
        if flat.size and not -len(self) <= flat.min() <= flat.max() < len(self):
            raise IndexError(f"{self.path.name} has {len(self)} rows; asked for {flat.min()} to {flat.max()}")
        read = self._read(np.where(flat < 0, flat + len(self), flat))
        return read.reshape(*wanted.shape, *self.shape[1:])

    def _read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        result = np.empty((len(rows), *self.shape[1:]), self.dtype)
        if result.nbytes:
            target = result.reshape(-1).view(np.uint8).data
            # Runs of consecutive rows are read at once.
            borders = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
            for start, end in pairwise(borders):
                place = self.offset + int(rows[start]) * self._row_bytes
                self._fill(target[start * self._row_bytes : end * self._row_bytes], place)
        return result

    def _fill(self, target: memoryview, place: int) -> None:
        done = 0
        while done < len(target):  # the system may give less than asked for
            if hasattr(os, "preadv"):  # has no position that threads and forked processes would share
                count = os.preadv(self._file.fileno(), [target[done:]], place + done)
            else:
                with self._lock:
                    self._file.seek(place + done)
                    count = self._file.readinto(target[done:]) or 0
            if count == 0:
                raise OSError(f"{self.path} has become shorter while it was read")
            done += count

    def __getstate__(self) -> tuple[Path, tuple[int, ...], str, int]:
        return self.path, self.shape, self.dtype.str, self.offset

    def __setstate__(self, state: tuple[Path, tuple[int, ...], str, int]) -> None:
        RowFile.__init__(self, *state)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


class RowPart:
    """Writes rows of a temporary file that a `RowWriter`, here or in another process, has made.

    Several processes may write at once, each rows of its own.
    """

    def __init__(self, temporary: str | os.PathLike[str], row_shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.temporary, self.row_shape, self.dtype = Path(temporary), tuple(row_shape), np.dtype(dtype)
        self._row_bytes = prod(self.row_shape) * self.dtype.itemsize
        self._file = open(temporary, "r+b", buffering=0)  # noqa: SIM115 (closed by __exit__)

    def put(self, first_row: int, rows: NDArray[Any]) -> None:
        """Write consecutive rows (n, ...) from ``first_row`` on."""
        if rows.shape[1:] != self.row_shape:
            raise ValueError(f"expected rows of shape {self.row_shape}, found {rows.shape[1:]}")
        waiting = np.ascontiguousarray(rows, self.dtype).reshape(-1).view(np.uint8).data
        try:
            self._file.seek(first_row * self._row_bytes)
            while len(waiting):
                waiting = waiting[self._file.write(waiting) or 0 :]
        except OSError as error:
            raise clear_error(error, self.temporary, len(rows) * self._row_bytes) from error

    def close(self) -> None:
        """What was written is on the disk then."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise clear_error(error, self.temporary, 0) from error
        finally:
            self._file.close()

    def __enter__(self) -> RowPart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RowWriter(RowPart):
    """Makes a file of ``count`` rows: full size under a temporary name, its own name by `finish`.

    A process that is killed therefore leaves no file that could be taken for whole. Other processes write their rows
    by ``RowPart(writer.temporary, row_shape, dtype)`` and close it before this one calls `finish`.
    """

    def __init__(self, path: str | os.PathLike[str], count: int, row_shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.path, self.count = Path(path), count
        size = count * prod(row_shape) * np.dtype(dtype).itemsize
        temporary = temporary_beside(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path.parent).free
            if free < size:
                raise no_room(self.path, size, free)
            with open(temporary, "wb") as file:
                file.truncate(size)
        except OSError as error:
            raise clear_error(error, self.path, size) from error
        super().__init__(temporary, row_shape, dtype)

    def finish(self, count: int | None = None) -> None:
        """Give the file its name; with a count, only so many rows are kept."""
        try:
            if count is not None:
                self._file.truncate(count * self._row_bytes)
            self.close()
            os.replace(self.temporary, self.path)
        except OSError as error:
            raise clear_error(error, self.path, 0) from error

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self.temporary.unlink(missing_ok=True)


def temporary_beside(path: Path) -> Path:
    """A name for a file that is being written; it tells whose it is, so that leftovers of the dead can be swept."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")


def clear_error(error: OSError, path: Path, needed: int) -> UserError:
    """What went wrong with the disk, in words."""
    if error.errno in DISK_FULL:
        return no_room(path, needed, 0)
    return UserError(f"{path} can not be written ({error.strerror or error}); name another cache folder by CDC_CACHE")


def no_room(path: Path, needed: int, free: int) -> UserError:
    return UserError(
        f"{path.name} takes {gigabytes(needed)} in {path.parent}, and {gigabytes(free)} are free there; make room, "
        "name a cache folder on another disk by CDC_CACHE, or choose a smaller input size"
    )


def gigabytes(size: int) -> str:
    return f"{size / 1024**3:.1f} GB"
