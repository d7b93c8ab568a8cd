"""Read the images of a source as squares of one size, and keep them: in memory, or beyond 64 MB in the cache."""

import contextlib
import json
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data import cache
from cdc_plugin.data.atomic import write_text
from cdc_plugin.data.decode import Pixels, UnreadableImageError, square_from_pil, squares_from_array
from cdc_plugin.data.side import describe_side
from cdc_plugin.data.sources.arrays import fingerprint, split_rows
from cdc_plugin.data.sources.base import ImageSource
from cdc_plugin.errors import DataError

CHUNK = 256  # images resized at once when they come as an array
BLOCK = 8  # images that a thread reads at once: handing over each alone takes longer than decoding a small one
# Seconds per image, below which one thread reads: several would wait for each other more than for the disk. For small
# images on a disk that is awake, two take twice the work of one and as long.
QUICK = 0.001
MEASURED, SLOW_MEASUREMENTS = 16, 3  # images over which that is measured, and how many times in a row
MEMORY_LIMIT = 64 * 1024**2
VERSION = 4  # of how squares are made; files of another one are made again
RETRIED = 16  # images that could not be read, and are tried again before a kept file is trusted

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
Skipped = list[tuple[int, str]]
Marks = NDArray[np.uint64]
HOPELESS = 5_000  # images without a readable one among them, at the start
# Squares (N, side, side, 3), index and reason of the images that were skipped, the labels of all images, and the (N,)
# fingerprints, which mapped arrays of many GB do not have.
Squares = tuple[Pixels, Skipped, NDArray[np.int64] | None, Marks | None]


def read_once(
    source: ImageSource, side: int, folder: str | os.PathLike[str] | None, progress: Progress | None
) -> Squares:
    """Return the squares of a source; large ones are read by one process and found by all others.

    These are kept in the ``folder``; None is the cache that all runs share.
    """
    if not callable(source.content) and source.content.shape[1:3] == (side, side):
        return source.content, [], source.labels, source.marks
    size = len(source) * side * side * 3
    if size <= MEMORY_LIMIT:
        return _read_into_memory(source, side, progress)
    place = cache.find_cache_folder() if folder is None else Path(folder)
    if place is None or (folder is None and not source.exact):
        return _read_into_private_file(source, side, progress)
    # The side is part of the name, so that runs at two sizes can share a cache folder.
    digest = cache.compute_digest([source.digest, how]) if (how := describe_side(side)) else source.digest
    path = place / f"images-{digest}-{side}.npy"

    def make() -> Squares:
        if folder is None:
            cache.make_room(path, size)
        return _read_into_file(source, side, path, progress)

    return cache.find_or_make(path, lambda: _find_squares(source, side, path), make)


def read_squares(
    source: ImageSource, side: int, skipped: Skipped, progress: Progress | None = None
) -> Iterator[Pixels]:
    """Yield squares (n, side, side, 3) in order; what cannot be read is appended to ``skipped`` instead."""
    show = progress or (lambda steps, total, description: steps)
    description = f"reading {source.description}"
    if not callable(source.content):
        array = source.content
        blocks = list(split_rows(range(len(array)), CHUNK, max(array[:1].nbytes, 3 * side**2)))
        for block in show(blocks, len(blocks), description):
            yield squares_from_array(array[block.start : block.stop], side)
        return
    with warnings.catch_warnings():
        # Large scans are wanted here; what passes twice Pillow's limit raises and is skipped.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        results = _read_in_order(source.content, len(source), side, source.workers)
        for index, result in enumerate(show(results, len(source), description)):
            if isinstance(result, str):
                skipped.append((index, result))
                if len(skipped) == index + 1 == HOPELESS:
                    check_readable(source, skipped)
            else:
                yield result[None]


def check_readable(source: ImageSource, skipped: Skipped) -> None:
    """Refuse a source of which every image was skipped, or so many of the first that it can be no mishap."""
    if skipped and len(skipped) in (len(source), HOPELESS) and skipped[-1][0] == len(skipped) - 1:
        first = "" if len(skipped) == len(source) else f"first {len(skipped):,} of the "
        raise DataError(
            f"none of the {first}{len(source)} images of {source.description} can be read; {source.names[0]}: "
            f"{skipped[0][1]}; open one of them in an image viewer to see whether the files are complete"
        )


def _read_in_order(read: Callable[[int], Image.Image], count: int, side: int, workers: int) -> Iterator[Pixels | str]:
    """Yield the square of every image, or the reason why there is none."""

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


def _start_reading(
    source: ImageSource, side: int, progress: Progress | None
) -> tuple[Iterator[Pixels], Skipped, list[Marks]]:
    """Return all squares, and two lists that grow with them: what was skipped, and fingerprints."""
    skipped: Skipped = []
    marks: list[Marks] = []

    def read() -> Iterator[Pixels]:
        for squares in read_squares(source, side, skipped, progress):
            marks.append(fingerprint(squares))
            yield squares
        check_readable(source, skipped)  # here, so that no file is kept

    return read(), skipped, marks


def _read_into_memory(source: ImageSource, side: int, progress: Progress | None) -> Squares:
    shape = (len(source), side, side, 3)
    try:
        images = np.empty(shape, dtype=np.uint8)
    except MemoryError as error:
        raise DataError(
            f"{len(source)} images of {side} x {side} need {cache.format_bytes(prod(shape))} of memory, "
            "more than there is; set CDC_CACHE to a folder on disk, or choose a smaller input size"
        ) from error
    parts, skipped, marks = _start_reading(source, side, progress)
    count = 0
    for squares in parts:
        images[count : count + len(squares)] = squares
        count += len(squares)
    return images[:count], skipped, source.labels, np.concatenate(marks)


def _read_into_private_file(source: ImageSource, side: int, progress: Progress | None) -> Squares:
    """Read into a file that goes with this process, so that memory does not grow with the images; else into memory."""
    parts, skipped, marks = _start_reading(source, side, progress)
    images = cache.write_private_rows("images", parts, (len(source), side, side, 3), np.uint8)
    if images is None:
        return _read_into_memory(source, side, progress)
    return cache.protect(images), skipped, source.labels, np.concatenate(marks)


def _read_into_file(source: ImageSource, side: int, path: Path, progress: Progress | None) -> Squares:
    """Read into a file and write notes beside it: what was skipped, labels that were read, and fingerprints."""
    notes = path.with_suffix(".json")
    notes.unlink(missing_ok=True)  # should this process be killed, old notes must not be taken for those of new images
    parts, skipped, marks = _start_reading(source, side, progress)
    images = cache.write_rows(path, parts, (len(source), side, side, 3), np.uint8)
    labels, numbers = None if source.labels is None else source.labels.tolist(), np.concatenate(marks)
    write_text(notes, json.dumps({"version": VERSION, "skipped": skipped, "labels": labels, "marks": numbers.tolist()}))
    return cache.protect(images), skipped, source.labels, numbers


def _find_squares(source: ImageSource, side: int, path: Path) -> Squares | None:
    """Return what an earlier run kept; None if it is absent, not complete, or skipped images can be read by now."""
    try:
        notes: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if notes["version"] != VERSION:
            return None
        marks = np.array(notes["marks"], dtype=np.uint64)
        skipped = [(int(index), str(reason)) for index, reason in notes["skipped"]]
        labels = None if notes["labels"] is None else np.array(notes["labels"], dtype=np.int64)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    images = cache.open_rows(path, (len(marks), side, side, 3), np.uint8)
    if images is None:
        return None
    for index, _ in skipped[:RETRIED]:
        with contextlib.suppress(UnreadableImageError):
            source.read(index)
            return None
    return cache.protect(images), skipped, labels, marks
