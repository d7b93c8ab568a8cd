"""Where the squares are kept: in memory, or beyond 2 GB in a memory-mapped file of the cache folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from cdc_plugin.data.resize import Pixels
from cdc_plugin.errors import UserError

MEMORY_LIMIT = 2 * 1024**3


@dataclass(frozen=True)
class CacheEntry:
    """A file of (count, side, side, 3) bytes and the notes beside it: what was skipped and the labels."""

    images: Path
    side: int

    @property
    def notes(self) -> Path:
        return self.images.with_suffix(".json")


def cache_entry(cache: str | os.PathLike[str] | None, digest: str, count: int, side: int) -> CacheEntry | None:
    """Where to keep the images on disk, or None if they belong in memory."""
    if cache is None or count * side * side * 3 <= MEMORY_LIMIT:
        return None
    # The side is part of the name, so that runs at two sizes can share a cache folder.
    return CacheEntry(Path(cache) / f"images-{digest}-{side}.u8", side)


def read_cached(entry: CacheEntry) -> tuple[Pixels, dict[str, Any]] | None:
    """Images and notes of an earlier run, or None if they are absent or not whole."""
    try:
        notes = json.loads(entry.notes.read_text(encoding="utf-8"))
        shape = (int(notes["count"]), entry.side, entry.side, 3)
        if entry.images.stat().st_size != int(np.prod(shape, dtype=np.int64)):
            return None
    except (OSError, ValueError, KeyError):
        return None
    # Copy-on-write: torch takes the rows without a warning, and nobody can harm the file.
    return np.memmap(entry.images, dtype=np.uint8, mode="c", shape=shape), notes


class MemoryStore:
    """Squares appended one after another to one array."""

    def __init__(self, count: int, side: int) -> None:
        try:
            self._images = np.empty((count, side, side, 3), dtype=np.uint8)
        except MemoryError as error:
            raise UserError(
                f"{count} images of {side} x {side} need {_gigabytes(count * side * side * 3)} of memory, "
                "more than there is; name a cache folder on disk, or choose a smaller input size"
            ) from error
        self._written = 0

    def append(self, squares: Pixels) -> None:
        self._images[self._written : self._written + len(squares)] = squares
        self._written += len(squares)

    def finish(self) -> Pixels:
        return self._images[: self._written]


class DiskStore:
    """Squares appended to a temporary file, which gets its name when it is whole.

    Plain writes, not a memory map: on a full disk a write raises, while a map ends the process.
    """

    def __init__(self, entry: CacheEntry, count: int) -> None:
        self._entry = entry
        self._written = 0
        self._file: BinaryIO | None = None
        folder = entry.images.parent
        # The process number keeps two runs that fill the same cache apart.
        self._temporary = entry.images.with_suffix(f".{os.getpid()}.tmp")
        needed = count * entry.side * entry.side * 3
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < needed:
                raise _no_room(folder, needed, free)
            self._file = open(self._temporary, "wb")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise UserError(
                f"the cache folder {folder} can not be written ({error}); name another cache folder"
            ) from error
        self._needed = needed

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def append(self, squares: Pixels) -> None:
        assert self._file is not None
        try:
            self._file.write(np.ascontiguousarray(squares).data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise _no_room(self._temporary.parent, self._needed, 0) from error
        self._written += len(squares)

    def finish(self, notes: dict[str, Any]) -> Pixels:
        """Name the file, write the notes and open both for reading."""
        assert self._file is not None
        try:
            self._file.close()
            os.replace(self._temporary, self._entry.images)
            self._temporary.write_text(json.dumps({**notes, "count": self._written}), encoding="utf-8")
            os.replace(self._temporary, self._entry.notes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise _no_room(self._temporary.parent, self._needed, 0) from error
        cached = read_cached(self._entry)
        if cached is None:
            raise UserError(f"{self._entry.images} was changed while it was written; start again")
        return cached[0]


def _no_room(folder: Path, needed: int, free: int) -> UserError:
    return UserError(
        f"the images take {_gigabytes(needed)} in the cache folder {folder}, and {_gigabytes(free)} are "
        "free there; make room, name a cache folder on another disk, or choose a smaller input size"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1024**3:.1f} GB"
