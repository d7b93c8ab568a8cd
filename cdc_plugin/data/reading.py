"""Reads the images of a source as squares of one size, with threads that decode ahead where that is of use."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from PIL import Image

from cdc_plugin.data.resize import Pixels, square_from_pil, squares_from_array
from cdc_plugin.data.sources.base import ImageSource, UnreadableImageError
from cdc_plugin.errors import UserError

CHUNK = 256  # images resized at once when they come as an array
BLOCK = 8  # images that a thread reads at once: handing over each alone takes longer than decoding a small one
# Seconds an image, below which one thread reads: several would wait for each other more than for the disk. For small
# images on a disk that is awake, two take twice the work of one and as long.
QUICK = 0.001
LOOKED_AT, HICCUPS = 16, 3  # images over which that is measured, and how many times in a row

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
Skipped = list[tuple[int, str]]


def read_squares(known: ImageSource, side: int, skipped: Skipped, progress: Progress | None) -> Iterator[Pixels]:
    """Squares (n, side, side, 3) in order; what can not be read is appended to ``skipped`` instead."""
    show = progress or (lambda steps, total, description: steps)
    description = f"reading {known.description}"
    if not callable(known.content):
        array = known.content
        starts = range(0, len(array), CHUNK)
        for start in show(starts, len(starts), description):
            yield squares_from_array(array[start : start + CHUNK], side)
        return
    with warnings.catch_warnings():
        # Large scans are wanted here; what passes twice Pillow's limit raises and is skipped.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        results = _read_in_order(known.content, len(known), side, known.workers)
        for index, result in enumerate(show(results, len(known), description)):
            if isinstance(result, str):
                skipped.append((index, result))
            else:
                yield result[None]
    if len(skipped) == len(known):
        name, reason = known.names[0], skipped[0][1]
        raise UserError(
            f"none of the {len(known)} images of {known.description} can be read; the first, {name}: "
            f"{reason}; open one of them in an image viewer to see whether the files are whole"
        )


def _read_in_order(read: Callable[[int], Image.Image], count: int, side: int, workers: int) -> Iterator[Pixels | str]:
    """The square of every image or the reason why there is none, in order; threads decode ahead if it takes long."""

    def square(index: int) -> Pixels | str:
        try:
            return square_from_pil(read(index), side)
        except UnreadableImageError as error:
            return str(error)

    if workers == 1:
        yield from map(square, range(count))
        return
    done, slow = 0, 0
    while done < count and slow < HICCUPS:
        began = time.monotonic()
        some = [square(index) for index in range(done, min(done + LOOKED_AT, count))]
        slow = slow + 1 if time.monotonic() - began > QUICK * len(some) else 0
        done += len(some)
        yield from some
    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[Future[list[Pixels | str]]] = deque()
        for start in range(done, count, BLOCK):
            indices = range(start, min(start + BLOCK, count))
            ahead.append(pool.submit(lambda some: [square(index) for index in some], indices))
            if len(ahead) > 2 * workers:  # a bound, so that memory does not grow with the data set
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()
