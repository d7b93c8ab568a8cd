"""Read images of any source chunk by chunk: memory does not grow with their number, and labels are never looked at."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cdc_plugin.data.decode import Pixels, squares_from_array
from cdc_plugin.data.sources import describe_source, find_kind
from cdc_plugin.data.sources.arrays import ArrayRows, read_rows_of_array, read_rows_of_file, to_pixels
from cdc_plugin.data.sources.base import ImageSource
from cdc_plugin.data.sources.features import FeatureSource, name_sample
from cdc_plugin.data.store import CHUNK, Skipped, check_readable, read_squares
from cdc_plugin.errors import DataError


class Chunk(NamedTuple):
    """Images that were read: names, (n,) which of the source they are, squares (n, side, side, 3) or vectors (n, D)."""

    names: list[str]
    places: NDArray[np.int64]
    squares: NDArray[Any]


@dataclass(frozen=True)
class ImageStream:
    """Images that are known but not kept; made by `open_stream`."""

    source: ImageSource | ArrayRows
    side: int  # of the squares they are read as; 0 where vectors stand in their place
    unreadable: Skipped = field(default_factory=list)  # complete after the last chunk
    noun: str = "image"  # what messages call one of them

    def __len__(self) -> int:
        """Count all images, whether they can be read or not."""
        return len(self.source)

    @property
    def description(self) -> str:
        return self.source.description

    def chunks(self, size: int = CHUNK, pieces: Sequence[range] | None = None) -> Iterator[Chunk]:
        """Yield the readable images in order, ``size`` at once; the next chunk is read while this one is used.

        ``pieces`` are rising ranges of places to read, not empty; no chunk spans two of them. None is all images.
        """
        self.unreadable.clear()
        pieces = [range(len(self))] if pieces is None else pieces
        if isinstance(self.source, ArrayRows):
            return _read_ahead(self._array_chunks(self.source, size, pieces))
        chunks = self._image_chunks(self.source, size, pieces)
        # A reader that is not known to be thread-safe stays in the thread of the caller.
        return chunks if self.source.workers == 1 else _read_ahead(chunks)

    def read(self, places: Sequence[int] | NDArray[np.int64]) -> tuple[Pixels, list[tuple[str, str]]]:
        """Return squares (n, side, side, 3) of a few images in this order, and name and reason of the others."""
        wanted = np.asarray(places, dtype=np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"{self.description} has images 0 to {len(self) - 1}, asked for {wanted.tolist()[:5]}")
        squares = np.empty((len(wanted), self.side, self.side, 3), dtype=np.uint8)
        if isinstance(self.source, ImageSource):
            skipped: Skipped = []
            read = [squares[:0], *read_squares(self.source.choose(wanted), self.side, skipped)]
            return np.concatenate(read), [(self.source.names[wanted[index]], reason) for index, reason in skipped]
        start = 0
        for block in self.source.blocks(self.source.split(range(len(self)), CHUNK)):
            inside = np.flatnonzero((wanted >= start) & (wanted < start + len(block)))
            if len(inside):
                squares[inside] = self._make_squares(block[wanted[inside] - start])
            start += len(block)
        return squares, []

    def _array_chunks(self, rows: ArrayRows, size: int, pieces: Sequence[range]) -> Iterator[Chunk]:
        ranges = [block for piece in pieces for block in rows.split(piece, size)]
        for places, block in zip(ranges, rows.blocks(ranges), strict=True):
            names = rows.names[places.start : places.stop]
            yield Chunk(names, np.array(places, dtype=np.int64), np.array(self._make_squares(block)))

    def _make_squares(self, block: NDArray[Any]) -> Pixels:
        return squares_from_array(to_pixels(block, self.description), self.side) if self.side else block

    def _image_chunks(self, source: ImageSource, size: int, pieces: Sequence[range]) -> Iterator[Chunk]:
        wanted = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
        piece_of = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        lost: Skipped = []
        places: list[int] = []
        squares: list[Pixels] = []
        piece = 0
        for number, square in enumerate(self._read(source, wanted, lost)):
            index = number + len(lost)  # all before it were yielded or skipped
            if squares and (piece_of[index] != piece or len(squares) == size):
                yield _make_chunk(source, places, squares)
                places, squares = [], []
            piece = piece_of[index]
            places.append(int(wanted[index]))
            squares.append(square)
        if squares:
            yield _make_chunk(source, places, squares)

    def _read(self, source: ImageSource, wanted: NDArray[np.int64], lost: Skipped) -> Iterator[Pixels]:
        """Yield squares of some images; the others are appended to ``lost`` by their place among these."""
        reported = 0
        for square in read_squares(source.choose(wanted), self.side, lost):
            self.unreadable.extend((int(wanted[index]), reason) for index, reason in lost[reported:])
            reported = len(lost)
            yield square
        check_readable(source, lost)  # that none of some images can be read does not condemn the source
        self.unreadable.extend((int(wanted[index]), reason) for index, reason in lost[reported:])


def open_stream(source: Any, side: int) -> ImageStream:
    """Open a source of any kind that ``open_images`` takes, and read nothing of it yet but its names.

    >>> stream = open_stream("digits", 32)
    >>> [len(chunk.names) for chunk in stream.chunks(1000)]
    [1000, 797]
    """
    if isinstance(source, FeatureSource):

        def blocks(ranges: Iterable[range]) -> Iterator[NDArray[Any]]:
            return (source[rows.start : rows.stop] for rows in ranges)

        rows = ArrayRows(source.shape, np.dtype(np.float32), blocks, source.names, source.description, source.digest)
        return ImageStream(rows, 0, noun=name_sample(source))
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu().numpy()
    if isinstance(source, np.ndarray):
        rows = read_rows_of_array(source, "array")
    elif isinstance(source, str | os.PathLike) and find_kind(source) == "array":
        rows = read_rows_of_file(Path(os.path.expanduser(source)))
    else:
        described = describe_source(source, side, None, labels=False)
        if callable(described.content):
            return ImageStream(described, side)
        rows = read_rows_of_array(described.content, described.description, described.names)
    # Layouts that are no images are refused here, before anything is computed.
    to_pixels(next(rows.blocks(rows.split(range(len(rows)), 1)), np.empty(rows.shape, rows.dtype)), rows.description)
    return ImageStream(rows, side)


def read_images(source: Any, side: int, places: Sequence[int] | NDArray[np.int64]) -> Pixels:
    """Return squares (n, side, side, 3) of a few images of a source, in the order asked for."""
    squares, skipped = open_stream(source, side).read(places)
    if skipped:
        raise DataError(f"cannot read {skipped[0][0]}: {skipped[0][1]}")
    return squares


def _make_chunk(source: ImageSource, places: list[int], squares: list[Pixels]) -> Chunk:
    return Chunk([source.names[place] for place in places], np.array(places), np.concatenate(squares))


def _read_ahead(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yield the same chunks; a thread makes the next one while the caller has the last."""
    with ThreadPoolExecutor(1, "read-ahead") as reader:
        ahead = reader.submit(next, chunks, None)
        while (chunk := ahead.result()) is not None:
            ahead = reader.submit(next, chunks, None)
            yield chunk
