"""Read the images of a source as squares of one size, and keep them: in memory, or beyond 64 MB in a .npy file.

The file lies in the cache, where later runs use it again; without a cache it goes with the process. Rows on disk are
mapped into memory, so that the system decides which of them stay there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import DTypeLike, NDArray
from PIL import Image

from cdc_plugin.data.atomic import replace_atomically, write_atomically
from cdc_plugin.data.cache import (
    explain_disk_error,
    explain_no_room,
    find_cache_folder,
    find_or_make,
    find_scratch_folder,
    format_bytes,
    lock_entry,
    make_room,
    mark_used,
)
from cdc_plugin.data.decode import Pixels, UnreadableImageError, square_from_pil, squares_from_array
from cdc_plugin.data.sources.base import ImageSource
from cdc_plugin.errors import DataError

CHUNK = 256  # images resized at once when they come as an array
BLOCK = 8  # images that a thread reads at once: handing over each alone takes longer than decoding a small one
# Seconds per image, below which one thread reads: several would wait for each other more than for the disk. For small
# images on a disk that is awake, two take twice the work of one and as long.
QUICK = 0.001
MEASURED, SLOW_MEASUREMENTS = 16, 3  # images over which that is measured, and how many times in a row
WRITE_BUFFER = 1 << 20  # bytes that are written at once
MEMORY_LIMIT = 64 * 1024**2
VERSION = 3  # of how squares are made; files of another one are made again
RETRIED = 16  # images that could not be read, and are tried again before a kept file is trusted

log = logging.getLogger(__name__)

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
Skipped = list[tuple[int, str]]
# Squares (N, side, side, 3), index and reason of the images that were skipped, and the labels of all images.
Squares = tuple[Pixels, Skipped, NDArray[np.int64] | None]


def open_rows(path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any] | None:
    """Map the rows that `write_rows` wrote; None if they are absent, cut, or of another shape or type.

    The map is copy-on-write: torch takes it without a warning, and the file never changes.
    """
    try:
        rows = np.load(path, mmap_mode="c", allow_pickle=False)
        if (rows.shape, rows.dtype) == (shape, np.dtype(dtype)):
            return rows
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        log.debug("%s: %s", path, error)
    log.warning("%s is cut or holds something else; it is made again", path)
    return None


def write_rows(path: Path, parts: Iterable[NDArray[Any]], shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Write parts of an array one after another to a .npy file, complete or not at all, and return it mapped.

    They are written, not put into a map: a full disk then raises an error, where a map would end the process.

    Args:
        shape: of the whole array; there may turn out to be fewer rows.

    Raises:
        OutputError: the disk is full, or the folder cannot be written.
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise explain_no_room(path, size, free)
        with replace_atomically(path) as temporary, open(temporary, "wb", buffering=WRITE_BUFFER) as file:
            _write_header(file, shape, dtype)
            for part in parts:
                if part.shape[1:] != shape[1:]:
                    raise ValueError(f"expected rows of shape {shape[1:]}, found {part.shape[1:]}")
                file.write(np.ascontiguousarray(part, dtype).data)
                count += len(part)
            file.seek(0)
            _write_header(file, (count, *shape[1:]), dtype)
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except OSError as error:
        raise explain_disk_error(error, path) from error


def write_private_rows(
    path: Path, parts: Iterable[NDArray[Any]], shape: tuple[int, ...], dtype: DTypeLike
) -> NDArray[Any]:
    """Write rows as `write_rows` does, to a file that nobody else finds and that goes with this process."""
    with lock_entry(path):
        rows = write_rows(path, parts, shape, dtype)
        with contextlib.suppress(OSError):  # Windows keeps it until the cache is full
            path.unlink()
    return rows


def read_once(
    source: ImageSource, side: int, folder: str | os.PathLike[str] | None, progress: Progress | None
) -> Squares:
    """Return the squares of a source; large ones are read by one process and found by all others.

    Args:
        folder: to keep large ones in; None is the cache that all runs share.
    """
    if not callable(source.content) and source.content.shape[1:3] == (side, side):
        return source.content, [], source.labels
    size = len(source) * side * side * 3
    if size <= MEMORY_LIMIT:
        return _read_into_memory(source, side, progress)
    place = find_cache_folder() if folder is None else Path(folder)
    if place is None or (folder is None and not source.exact):
        return _read_into_private_file(source, side, progress)
    # The side is part of the name, so that runs at two sizes can share a cache folder.
    path = place / f"images-{source.digest}-{side}.npy"

    def make() -> Squares:
        if folder is None:
            make_room(path, size)
        return _read_into_file(source, side, path, progress)

    squares = find_or_make(path, lambda: _find_squares(source, side, path), make)
    mark_used(path.with_suffix(".json"))
    return squares


def read_squares(source: ImageSource, side: int, skipped: Skipped, progress: Progress | None) -> Iterator[Pixels]:
    """Yield squares (n, side, side, 3) in order; what cannot be read is appended to ``skipped`` instead.

    Threads decode ahead where that is of use.
    """
    show = progress or (lambda steps, total, description: steps)
    description = f"reading {source.description}"
    if not callable(source.content):
        array = source.content
        starts = range(0, len(array), CHUNK)
        for start in show(starts, len(starts), description):
            yield squares_from_array(array[start : start + CHUNK], side)
        return
    with warnings.catch_warnings():
        # Large scans are wanted here; what passes twice Pillow's limit raises and is skipped.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        results = _read_in_order(source.content, len(source), side, source.workers)
        for index, result in enumerate(show(results, len(source), description)):
            if isinstance(result, str):
                skipped.append((index, result))
            else:
                yield result[None]
    if len(skipped) == len(source):
        name, reason = source.names[0], skipped[0][1]
        raise DataError(
            f"none of the {len(source)} images of {source.description} can be read; the first, {name}: "
            f"{reason}; open one of them in an image viewer to see whether the files are complete"
        )


def _read_in_order(read: Callable[[int], Image.Image], count: int, side: int, workers: int) -> Iterator[Pixels | str]:
    """Yield the square of every image, or the reason why there is none; threads decode ahead if it takes long."""

    def read_square(index: int) -> Pixels | str:
        try:
            return square_from_pil(read(index), side)
        except UnreadableImageError as error:
            return str(error)

    if workers == 1:
        yield from map(read_square, range(count))
        return
    done, slow = 0, 0
    while done < count and slow < SLOW_MEASUREMENTS:
        began = time.monotonic()
        results = [read_square(index) for index in range(done, min(done + MEASURED, count))]
        slow = slow + 1 if time.monotonic() - began > QUICK * len(results) else 0
        done += len(results)
        yield from results
    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[Future[list[Pixels | str]]] = deque()
        for start in range(done, count, BLOCK):
            indices = range(start, min(start + BLOCK, count))
            ahead.append(pool.submit(lambda indices: [read_square(index) for index in indices], indices))
            if len(ahead) > 2 * workers:  # a bound, so that memory does not grow with the data set
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()


def _read_into_memory(source: ImageSource, side: int, progress: Progress | None) -> Squares:
    shape = (len(source), side, side, 3)
    try:
        images = np.empty(shape, dtype=np.uint8)
    except MemoryError as error:
        raise DataError(
            f"{len(source)} images of {side} x {side} need {format_bytes(prod(shape))} of memory, "
            "more than there is; set CDC_CACHE to a folder on disk, or choose a smaller input size"
        ) from error
    skipped: Skipped = []
    count = 0
    for squares in read_squares(source, side, skipped, progress):
        images[count : count + len(squares)] = squares
        count += len(squares)
    return images[:count], skipped, source.labels


def _read_into_private_file(source: ImageSource, side: int, progress: Progress | None) -> Squares:
    """Read into a file that goes with this process, so that memory does not grow with the images; else into memory."""
    shape, folder = (len(source), side, side, 3), find_scratch_folder()
    if folder is None:
        return _read_into_memory(source, side, progress)
    path = folder / f"images-{uuid.uuid4().hex[:16]}-{side}.npy"
    if folder == find_cache_folder():
        make_room(path, prod(shape))
    elif shutil.disk_usage(folder).free < prod(shape):
        return _read_into_memory(source, side, progress)
    skipped: Skipped = []
    images = write_private_rows(path, read_squares(source, side, skipped, progress), shape, np.uint8)
    return images, skipped, source.labels


def _read_into_file(source: ImageSource, side: int, path: Path, progress: Progress | None) -> Squares:
    """Read into a file and write notes beside it: what was skipped, and the labels that were read."""
    notes = path.with_suffix(".json")
    notes.unlink(missing_ok=True)  # should this process be killed, old notes must not be taken for those of new images
    skipped: Skipped = []
    shape = (len(source), side, side, 3)
    images = write_rows(path, read_squares(source, side, skipped, progress), shape, np.uint8)
    labels = None if source.labels is None else source.labels.tolist()
    text = json.dumps({"version": VERSION, "count": len(images), "skipped": skipped, "labels": labels})
    write_atomically(notes, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return images, skipped, source.labels


def _find_squares(source: ImageSource, side: int, path: Path) -> Squares | None:
    """Return what an earlier run kept; None if it is absent, not complete, or skipped images can be read by now."""
    try:
        notes: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if notes["version"] != VERSION:
            return None
        count = int(notes["count"])
        skipped = [(int(index), str(reason)) for index, reason in notes["skipped"]]
        labels = None if notes["labels"] is None else np.array(notes["labels"], dtype=np.int64)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    images = open_rows(path, (count, side, side, 3), np.uint8)
    if images is None or any(_is_readable(source, index) for index, _ in skipped[:RETRIED]):
        return None
    return images, skipped, labels


def _is_readable(source: ImageSource, index: int) -> bool:
    try:
        if callable(source.content):
            source.content(index)
    except UnreadableImageError:
        return False
    return True


def _write_header(file: Any, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    """Write the header of a .npy file; NumPy leaves space in it, so that it is as long for any number of rows."""
    header = {"descr": npy_format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    npy_format.write_array_header_1_0(file, header)
