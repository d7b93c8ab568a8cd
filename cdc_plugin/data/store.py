"""Where the squares are kept: in memory, or beyond 64 MB in a file of the cache, which later runs use again.

Without a cache it is a file that goes with the process.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.data.cache import cache_folder, made_once, make_room, scratch_folder, sweep, used, write_whole
from cdc_plugin.data.reading import Progress, Skipped, read_squares
from cdc_plugin.data.resize import Pixels
from cdc_plugin.data.row_file import RowFile, RowWriter, clear_error, format_bytes, open_whole
from cdc_plugin.data.sources.base import ImageSource, UnreadableImageError
from cdc_plugin.errors import UserError

AT_ONCE = 1 << 20  # bytes that are written at once
MEMORY_LIMIT = 64 * 1024**2
VERSION = 2  # of how squares are made; files of another one are made again
RETRIED = 16  # images that could not be read, and are looked at again before a kept file is trusted

Labels = NDArray[np.int64] | None
Squares = tuple[Pixels | RowFile, Skipped, Labels]


@dataclass(frozen=True)
class ImageFile:
    """A file of (count, side, side, 3) bytes and the notes beside it: what was skipped and the labels."""

    path: Path
    side: int

    @property
    def notes(self) -> Path:
        return self.path.with_suffix(".json")


def read_once(
    known: ImageSource, side: int, folder: str | os.PathLike[str] | None, progress: Progress | None
) -> Squares:
    """The squares (N, side, side, 3), which images were skipped, and the labels of all images.

    Args:
        folder: to keep large ones in; None is the cache that all runs share.
    """
    size = len(known) * side * side * 3
    if not callable(known.content) and known.content.shape[1:3] == (side, side):
        return known.content, [], known.labels
    if size <= MEMORY_LIMIT:
        return _into_memory(known, side, progress)
    place = cache_folder() if folder is None else Path(folder)
    if place is None:
        return _without_cache(known, side, progress)
    # The side is part of the name, so that runs at two sizes can share a cache folder.
    file = ImageFile(place / f"images-{known.digest}-{side}.u8", side)

    def make() -> Squares:
        if folder is None:
            make_room(file.path, size)
        return _into_file(known, file, progress)

    if folder is None and not known.exact:
        private = _private(place, side)
        make_room(private.path, size)
        squares = _into_file(known, private, progress)
        _forget(private)
        return squares
    _prepare(file.path)
    squares = made_once(file.path, lambda: _kept(known, file), make)
    used(file.notes)
    return squares


def _private(place: Path, side: int) -> ImageFile:
    """A file that only this process will use."""
    return ImageFile(place / f"images-{uuid.uuid4().hex[:16]}-{side}.u8", side)


def _without_cache(known: ImageSource, side: int, progress: Progress | None) -> Squares:
    """In a file that is gone when this process ends, so that memory does not grow with the images; else in memory."""
    size, place = len(known) * side * side * 3, scratch_folder()
    if place is None or shutil.disk_usage(place).free < size:
        return _into_memory(known, side, progress)
    private = _private(place, side)
    squares = _into_file(known, private, progress)
    _forget(private)
    return squares


def _into_memory(known: ImageSource, side: int, progress: Progress | None) -> Squares:
    try:
        images = np.empty((len(known), side, side, 3), dtype=np.uint8)
    except MemoryError as error:
        raise UserError(
            f"{len(known)} images of {side} x {side} need {format_bytes(len(known) * side * side * 3)} of memory, "
            "more than there is; set CDC_CACHE to a folder on disk, or choose a smaller input size"
        ) from error
    skipped: Skipped = []
    written = 0
    for squares in read_squares(known, side, skipped, progress):
        images[written : written + len(squares)] = squares
        written += len(squares)
    return images[:written], skipped, known.labels


def _into_file(known: ImageSource, file: ImageFile, progress: Progress | None) -> Squares:
    skipped: Skipped = []
    with RowWriter(file.path, len(known), (file.side, file.side, 3), np.uint8) as writer:
        written = _put_all(writer, read_squares(known, file.side, skipped, progress))
        writer.finish(written)
    labels = None if known.labels is None else known.labels.tolist()
    try:
        images = RowFile(file.path, (written, file.side, file.side, 3), np.uint8)
        facts = {"version": VERSION, "count": written, "seal": images.seal().hex()}
        text = _with_checksum({**facts, "skipped": skipped, "labels": labels})
        write_whole(file.notes, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise clear_error(error, file.notes) from error
    return images, skipped, known.labels


def _put_all(writer: RowWriter, chunks: Iterable[Pixels]) -> int:
    written = 0
    waiting: list[Pixels] = []
    size = 0
    for squares in chunks:
        waiting.append(squares)
        size += squares.nbytes
        if size >= AT_ONCE:
            written += _put(writer, written, waiting)
            waiting, size = [], 0
    return written + _put(writer, written, waiting) if waiting else written


def _put(writer: RowWriter, first: int, squares: list[Pixels]) -> int:
    together = np.concatenate(squares)
    writer.put(first, together)
    return len(together)


def _kept(known: ImageSource, file: ImageFile) -> Squares | None:
    """What an earlier run kept, or None if it is absent, not whole, or some of the skipped can be read by now."""
    try:
        text = file.notes.read_text(encoding="utf-8")
        notes: dict[str, Any] = json.loads(text)
        del notes["checksum"]
        if notes["version"] != VERSION or text != _with_checksum(notes):
            return None
        shape, seal = (int(notes["count"]), file.side, file.side, 3), bytes.fromhex(notes["seal"])
        skipped = [(int(index), str(reason)) for index, reason in notes["skipped"]]
        labels = None if notes["labels"] is None else np.array(notes["labels"], dtype=np.int64)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    images = open_whole(file.path, shape, np.uint8)
    if images is None or images.seal() != seal:
        return None
    if any(_is_readable(known, index) for index, _ in skipped[:RETRIED]):
        return None
    return images, skipped, labels


def _with_checksum(notes: dict[str, Any]) -> str:
    return json.dumps({**notes, "checksum": zlib.crc32(json.dumps(notes).encode())})


def _is_readable(known: ImageSource, index: int) -> bool:
    try:
        if callable(known.content):
            known.content(index)
    except UnreadableImageError:
        return False
    return True


def _prepare(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
    except OSError as error:
        raise clear_error(error, path) from error


def _forget(file: ImageFile) -> None:
    """Unlink a file that only this process can use, and has open; Windows keeps it until the cache is full."""
    for path in (file.path, file.notes):
        try:
            path.unlink(missing_ok=True)
        except PermissionError:
            continue
