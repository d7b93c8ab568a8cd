"""Any source of images as one square uint8 array, so that views are computed in batches on the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdc_plugin.data.reading import CHUNK, Progress, Skipped, read_squares
from cdc_plugin.data.resize import SMALL_SIDE, Pixels, storage_size
from cdc_plugin.data.row_file import RowFile
from cdc_plugin.data.sources.base import ImageSource, digest_of, digest_of_array
from cdc_plugin.data.sources.describe import describe_source, native_size
from cdc_plugin.data.sources.objects import UNLABELLED
from cdc_plugin.data.store import read_once
from cdc_plugin.errors import UserError

__all__ = [
    "CHUNK",
    "ImageSet",
    "Progress",
    "Skipped",
    "Survey",
    "describe_source",
    "native_size",
    "open_images",
    "read_squares",
    "storage_size",
    "survey_images",
]

DEFAULT_SIZE = 224


@dataclass(frozen=True)
class ImageSet:
    """Images ready for training, and what is known about them.

    Args:
        images: uint8 (N, S, S, 3), in memory or on disk.
        names: path relative to the source folder with forward slashes, or the index as text.
        labels: (N,) int64 for reporting only, or None.
        skipped: name and reason of every image that could not be read; these are not counted in N.
        source: what the images were opened from.
        digest: short hash that changes when the source changes.
    """

    images: Pixels | RowFile
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


@dataclass(frozen=True)
class Survey:
    """What is known of images before they are read.

    Args:
        count: all images, whether they can be read or not.
        labels: whether they have labels; unknown ones of a Python data set count as none.
        looked_at: how many were read, and ``skipped``: name and reason of those that could not be.
    """

    count: int
    labels: bool
    source: str
    looked_at: int
    skipped: list[tuple[str, str]]


def survey_images(
    source: Any,
    input_size: int,
    *,
    labels: bool = True,
    root: str | os.PathLike[str] | None = None,
    looks: int = 64,
) -> Survey:
    """How many images there are, and whether some of them, evenly spread, can be read; arguments as in `open_images`.

    Of a million files it takes seconds, where they are listed in the cache or the disk is fast.
    """
    side = storage_size(input_size)
    known = describe_source(source, side, root)
    some = known.sample(looks)
    skipped: Skipped = []
    try:
        for _ in read_squares(some, side, skipped, None):
            pass
    except UserError:
        if len(some) == len(known) or len(skipped) < len(some):
            raise  # but that none of some images can be read does not condemn the source
    lost = [(some.names[index], reason) for index, reason in skipped]
    told = labels and known.labels is not None and not (known.labels == UNLABELLED).all()
    return Survey(len(known), told, known.description, len(some), lost)


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

    Several processes may open the same images at once: one reads them, the others wait for it.

    Args:
        source: the name of a registered data set (a folder of the same name is written ``./name``); the path
            of a folder, an image, a .npz, .npy or .parquet file, of tar shards (``shards/*.tar``,
            ``part-{000..009}.tar``) or of a saved Hugging Face data set; ``hf:NAME:SPLIT``; a uint8 array or
            tensor; a map-style torch or Hugging Face data set; a list of paths or PIL images; or an ``ImageSource``.
        input_size: side that the network takes. None keeps square images of one size up to 96 pixels as they
            are and takes 224 otherwise.
        labels: False drops labels that the source has.
        root: folder that named data sets are looked for in; see ``cdc_plugin.data.sources.named``.
        cache: folder for images that take more than 64 MB; None is the cache that all runs share
            (``cdc_plugin.data.cache``), and memory where there is none.
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
    images, skipped, read_labels = read_once(known, side, cache, progress)
    lost = {index for index, _ in skipped}
    kept = [index for index in range(len(known)) if index not in lost] if lost else None
    found_labels = read_labels if labels else None
    if found_labels is not None and kept is not None:
        found_labels = found_labels[kept]
    if found_labels is not None and (found_labels == UNLABELLED).any():
        found_labels = None
    return ImageSet(
        images=images,
        names=known.names if kept is None else [known.names[index] for index in kept],
        labels=found_labels,
        class_names=known.class_names if found_labels is not None else None,
        skipped=[(known.names[index], reason) for index, reason in skipped],
        source=known.description,
        digest=_digest(known, images, skipped),
    )


def _digest(known: ImageSource, images: Pixels | RowFile, skipped: Skipped) -> str:
    """Of the images that were read: the same files give others if other ones could not be."""
    parts = [] if known.exact else [digest_of_array(images)]
    parts += [str(index) for index, _ in skipped]
    return digest_of([known.digest, *parts]) if parts else known.digest


def _default_size(source: Any) -> int:
    native = native_size(source)
    return native if native is not None and native <= SMALL_SIDE else DEFAULT_SIZE
