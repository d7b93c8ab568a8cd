"""Any source of images as one square uint8 array, so that views are computed in batches on the device."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.arrays import array_file_source, array_source, as_pixels, read_array_file
from cdc_plugin.data.folder import (
    ACCEPTED,
    files_source,
    folder_source,
    is_image_name,
    list_images,
    uniform_side,
)
from cdc_plugin.data.named import data_root, datasets
from cdc_plugin.data.objects import UNLABELLED, dataset_source, image_list_source, is_dataset, item_size
from cdc_plugin.data.resize import SMALL_SIDE, Pixels, square_from_pil, squares_from_array, storage_size
from cdc_plugin.data.source import ImageSource, UnreadableImageError
from cdc_plugin.data.store import DiskStore, MemoryStore, cache_entry, read_cached
from cdc_plugin.errors import UserError

__all__ = ["ImageSet", "describe_source", "native_size", "open_images", "read_squares", "storage_size"]

DEFAULT_SIZE = 224
CHUNK = 256  # images resized at once when they come as an array

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
Skipped = list[tuple[int, str]]


@dataclass(frozen=True)
class ImageSet:
    """Images ready for training, and what is known about them.

    Args:
        images: uint8 (N, S, S, 3), in memory or memory-mapped.
        names: path relative to the source folder with forward slashes, or the index as text.
        labels: (N,) int64 for reporting only, or None.
        skipped: name and reason of every image that could not be read; these are not counted in N.
        source: what the images were opened from.
        digest: short hash that changes when the source changes.
    """

    images: Pixels
    names: list[str]
    labels: NDArray[np.int64] | None = None
    class_names: list[str] | None = None
    skipped: list[tuple[str, str]] = field(default_factory=list)
    source: str = ""
    digest: str = ""

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """The images at the given indices as uint8 (B, 3, S, S)."""
        rows = self.images[np.asarray(indices)]
        return torch.from_numpy(np.asarray(rows)).permute(0, 3, 1, 2)


def open_images(
    source: Any,
    input_size: int | None = None,
    *,
    labels: bool = True,
    root: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    limit: int | None = None,
) -> ImageSet:
    """Read images from any source, make them square and of one size.

    Args:
        source: the name of a registered data set (a folder of the same name is written ``./name``); the path
            of a folder, an image, a .npz or .npy file; a uint8 array or tensor; a map-style torch data set;
            a list of paths or PIL images; or an ``ImageSource``.
        input_size: side that the network takes. None keeps square images of one size up to 96 pixels as they
            are and takes 224 otherwise.
        labels: False drops labels that the source has.
        root: folder that named data sets are looked for in; see ``cdc_plugin.data.named``.
        cache: folder for images that would take more than 2 GB of memory; None keeps them in memory.
        progress: wraps an iterable, given its length and a description, to show how far it is.
        limit: read at most so many images, evenly spread over the source.
    """
    size = _default_size(source) if input_size is None else input_size
    if size < 8:
        raise UserError(f"the input size is at least 8 pixels; found {size}")
    side = storage_size(size)
    known = describe_source(source, side, root)
    if limit is not None:
        known = known.sample(limit)
    images, skipped, read_labels = _materialise(known, side, cache, progress)
    lost = {index for index, _ in skipped}
    kept = np.array([index for index in range(len(known)) if index not in lost], dtype=np.int64)
    found_labels = read_labels[kept] if labels and read_labels is not None else None
    if found_labels is not None and (found_labels == UNLABELLED).any():
        found_labels = None
    return ImageSet(
        images=images,
        names=[known.names[index] for index in kept],
        labels=found_labels,
        class_names=known.class_names if found_labels is not None else None,
        skipped=[(known.names[index], reason) for index, reason in skipped],
        source=known.description,
        digest=known.digest,
    )


def native_size(source: Any) -> int | None:
    """Side of the images if they are squares of one size, as far as a cheap look can tell; else None."""
    if isinstance(source, str) and source in datasets:
        return datasets.get(source).native_size
    if isinstance(source, ImageSource):
        source = source.content if isinstance(source.content, np.ndarray) else None
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        if path.is_dir():
            return uniform_side([path / name for name in list_images(path)])
        if path.suffix.lower() not in (".npz", ".npy"):
            return uniform_side([path])
        source = read_array_file(path)[0]
    if isinstance(source, np.ndarray | torch.Tensor):
        height, width = as_pixels(source[:1], "array").shape[1:3]
        return height if height == width else None
    if isinstance(source, list | tuple) and source and all(isinstance(entry, str | Path) for entry in source):
        return uniform_side([Path(entry) for entry in source])
    if is_dataset(source) and len(source) > 0:
        first, last = item_size(source[0]), item_size(source[len(source) - 1])
        return first[0] if first == last and first[0] == first[1] else None
    return None


def _default_size(source: Any) -> int:
    native = native_size(source)
    return native if native is not None and native <= SMALL_SIDE else DEFAULT_SIZE


def describe_source(source: Any, side: int, root: str | os.PathLike[str] | None) -> ImageSource:
    """Find out what kind of source this is, without reading more than it takes."""
    if isinstance(source, ImageSource):
        return source
    if isinstance(source, str) and source in datasets:
        return datasets.get(source).load(data_root(root), side)
    if isinstance(source, str | os.PathLike):
        return _describe_path(source, side)
    if isinstance(source, np.ndarray | torch.Tensor):
        return array_source(source)
    if isinstance(source, list | tuple) and source:
        if all(isinstance(entry, str | os.PathLike) for entry in source):
            return files_source([Path(entry) for entry in source], side, f"{len(source)} files")
        if all(isinstance(entry, Image.Image) for entry in source):
            return image_list_source(source)
    if is_dataset(source) and not isinstance(source, dict):
        return dataset_source(source)
    raise UserError(
        "expected a folder, a .npz or .npy file, the name of a data set, an array or tensor, a list of paths "
        f"or images, or a data set with __len__ and __getitem__; found {type(source).__name__}"
    )


def _describe_path(source: str | os.PathLike[str], side: int) -> ImageSource:
    path = Path(source).expanduser()
    if path.is_dir():
        return folder_source(path, side)
    if not path.exists():
        raise UserError(
            f"nothing at {source}; expected a folder of images, a .npz or .npy file, or one of the data sets "
            f"{', '.join(datasets.names())}; check the path"
        )
    if path.suffix.lower() in (".npz", ".npy"):
        return array_file_source(path)
    if is_image_name(path.name):
        return files_source([path], side, str(path), [path.name])
    raise UserError(
        f"{path} is of no known kind: expected a folder, a .npz or .npy file, or an image ({ACCEPTED}); "
        "unpack archives first"
    )


def _materialise(
    known: ImageSource, side: int, cache: str | os.PathLike[str] | None, progress: Progress | None
) -> tuple[Pixels, Skipped, NDArray[np.int64] | None]:
    """The squares (N, side, side, 3), which images were skipped, and the labels of all images."""
    if isinstance(known.content, np.ndarray) and known.content.shape[1:3] == (side, side):
        return known.content, [], known.labels
    entry = cache_entry(cache, known.digest, len(known), side)
    skipped: Skipped = []
    if entry is None:
        memory = MemoryStore(len(known), side)
        for squares in read_squares(known, side, skipped, progress):
            memory.append(squares)
        return memory.finish(), skipped, known.labels
    cached = read_cached(entry)
    if cached is not None:
        images, notes = cached
        stored = notes["labels"]
        read_labels = None if stored is None else np.array(stored, dtype=np.int64)
        return images, [(int(index), str(reason)) for index, reason in notes["skipped"]], read_labels
    with DiskStore(entry, len(known)) as disk:
        for squares in read_squares(known, side, skipped, progress):
            disk.append(squares)
        label_list = None if known.labels is None else known.labels.tolist()
        images = disk.finish({"skipped": skipped, "labels": label_list})
    return images, skipped, known.labels


def read_squares(known: ImageSource, side: int, skipped: Skipped, progress: Progress | None) -> Iterator[Pixels]:
    """Squares (n, side, side, 3) in order; what can not be read is appended to ``skipped`` instead."""
    show = progress or (lambda steps, total, description: steps)
    description = f"reading {known.description}"
    if isinstance(known.content, np.ndarray):
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
    """The square of every image or the reason why there is none, in order; threads decode ahead."""

    def square(index: int) -> Pixels | str:
        try:
            return square_from_pil(read(index), side)
        except UnreadableImageError as error:
            return str(error)

    if workers == 1:
        yield from map(square, range(count))
        return
    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[Future[Pixels | str]] = deque()
        for index in range(count):
            ahead.append(pool.submit(square, index))
            if len(ahead) > 8 * workers:  # a bound, so that memory does not grow with the data set
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
