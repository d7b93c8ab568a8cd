"""Rows of one shape and type in a file on disk, read by seeking.

Not a memory map: mapped pages count as memory of the process, which would then grow with the data, and a map of a file
that is cut meanwhile ends the process. A file that is finished ends with a checksum of its rows, its seal.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import threading
import zlib
from itertools import pairwise
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cdc_plugin.errors import UserError

log = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
SEAL = 8  # bytes at the end of a finished file: SEALED and the CRC-32 of all rows
SEALED = b"rows"
AT_ONCE = 1 << 22  # bytes that are read at once to be summed up


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
            try:
                count = self._read_some(target[done:], place + done)
            except OSError as error:
                raise UserError(f"{self.path} can not be read any more ({error.strerror or error})") from error
            if count == 0:
                raise UserError(f"{self.path} has become shorter while it was in use; make it whole and run again")
            done += count

    def _read_some(self, target: memoryview, place: int) -> int:
        if hasattr(os, "preadv"):  # has no position that threads and forked processes would share
            return os.preadv(self._file.fileno(), [target], place)
        with self._lock:
            self._file.seek(place)
            return self._file.readinto(target) or 0

    def is_whole(self) -> bool:
        """Whether the rows end the file but for the seal of the `RowWriter` that wrote them, and fit that seal."""
        end = self.offset + self.nbytes
        if os.fstat(self._file.fileno()).st_size != end + SEAL:
            return False
        block, checksum, place = np.empty(AT_ONCE, np.uint8).data, 0, self.offset
        while place < end:
            part = block[: min(AT_ONCE, end - place)]
            self._fill(part, place)
            checksum, place = zlib.crc32(part, checksum), place + len(part)
        return self.seal() == _seal(checksum)

    def seal(self) -> bytes:
        """What follows the rows of a file that a `RowWriter` has finished; it tells their content."""
        found = np.empty(SEAL, np.uint8)
        self._fill(found.data, self.offset + self.nbytes)
        return found.tobytes()

    def __getstate__(self) -> tuple[Path, tuple[int, ...], str, int]:
        return self.path, self.shape, self.dtype.str, self.offset

    def __setstate__(self, state: tuple[Path, tuple[int, ...], str, int]) -> None:
        RowFile.__init__(self, *state)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


def open_whole(path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> RowFile | None:
    """Rows that a `RowWriter` has finished; None if they are not there, of another shape, cut or damaged."""
    try:
        rows = RowFile(path, shape, dtype)
        if rows.is_whole():
            return rows
    except FileNotFoundError:
        return None
    except (OSError, UserError) as error:
        log.debug("%s: %s", path, error)
    log.warning("%s is cut, damaged or of an earlier release; it is made again", path)
    return None


class RowPart:
    """Writes rows of a temporary file that a `RowWriter`, here or in another process, has made.

    Several processes may write at once, each rows of its own.
    """

    def __init__(self, temporary: str | os.PathLike[str], row_shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.path = self.temporary = Path(temporary)
        self.row_shape, self.dtype = tuple(row_shape), np.dtype(dtype)
        self._row_bytes = prod(self.row_shape) * self.dtype.itemsize
        self._file = open(temporary, "r+b", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._sum = self._summed = 0  # checksum of the first rows, as far as they were put in order

    def put(self, first_row: int, rows: NDArray[Any]) -> None:
        """Write consecutive rows (n, ...) from ``first_row`` on."""
        if rows.shape[1:] != self.row_shape:
            raise ValueError(f"expected rows of shape {self.row_shape}, found {rows.shape[1:]}")
        waiting = np.ascontiguousarray(rows, self.dtype).reshape(-1).view(np.uint8).data
        if first_row == self._summed:
            self._sum, self._summed = zlib.crc32(waiting, self._sum), first_row + len(rows)
        elif first_row < self._summed:  # written once more
            self._sum = self._summed = 0
        try:
            self._file.seek(first_row * self._row_bytes)
            while len(waiting):
                waiting = waiting[self._file.write(waiting) or 0 :]
        except OSError as error:
            raise clear_error(error, self.path) from error

    def close(self) -> None:
        """What was written is on the disk then."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise clear_error(error, self.path) from error
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
        path = Path(path)
        size = count * prod(row_shape) * np.dtype(dtype).itemsize
        temporary = temporary_beside(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(path.parent).free
            if free < size:
                raise no_room(path, size, free)
            with open(temporary, "wb") as file:
                file.truncate(size)
        except OSError as error:
            raise clear_error(error, path, size) from error
        super().__init__(temporary, row_shape, dtype)
        self.path, self.count = path, count

    def finish(self, count: int | None = None) -> None:
        """Give the file its name; with a count, only so many rows are kept."""
        count = self.count if count is None else count
        size = count * self._row_bytes
        try:
            self._file.truncate(size)
            checksum = self._sum if self._summed == count else self._sum_of(size)
            self._file.seek(size)
            self._file.write(_seal(checksum))
            self.close()
            os.replace(self.temporary, self.path)
        except OSError as error:
            raise clear_error(error, self.path) from error

    def _sum_of(self, size: int) -> int:
        """Checksum of so many bytes, of which other processes or this one in another order have written some."""
        checksum = 0
        with open(self.temporary, "rb", buffering=0) as file:
            while size and (content := file.read(min(size, AT_ONCE))):
                checksum, size = zlib.crc32(content, checksum), size - len(content)
        return checksum

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


def clear_error(error: OSError, path: Path, needed: int = 0) -> UserError:
    """What went wrong with the disk, in words.

    Args:
        needed: bytes that the file takes; 0 where that is not the point.
    """
    if error.errno in DISK_FULL:
        return no_room(path, needed, 0)
    return UserError(f"{path} can not be written ({error.strerror or error}); name another cache folder by CDC_CACHE")


def no_room(path: Path, needed: int, free: int) -> UserError:
    takes = f"{path.name} takes {format_bytes(needed)}" if needed else f"no space is left for {path.name}"
    return UserError(
        f"{takes} in {path.parent}, and {format_bytes(free)} are free there; make room, name a cache folder on another "
        "disk by CDC_CACHE, or choose a smaller input size"
    )


def format_bytes(size: int) -> str:
    """A number of bytes as people say it."""
    for unit, scale in (("GB", 1024**3), ("MB", 1024**2), ("KB", 1024)):
        if size >= scale:
            return f"{size / scale:.{1 if unit == 'GB' else 0}f} {unit}"
    return f"{size} bytes"


def _seal(checksum: int) -> bytes:
    return SEALED + checksum.to_bytes(4, "little")
