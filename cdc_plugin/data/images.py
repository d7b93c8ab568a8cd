"""Open any source of images as one square uint8 array, so that views are computed in batches on the device."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdc_plugin.data.cache import compute_digest, copy_rows
from cdc_plugin.data.decode import Pixels
from cdc_plugin.data.sources import describe_source, native_size
from cdc_plugin.data.sources.arrays import ONE_COLOUR, fingerprint
from cdc_plugin.data.sources.base import UNLABELLED, explain_left_aside, spread_evenly
from cdc_plugin.data.sources.features import FeatureSource, name_sample
from cdc_plugin.data.store import Progress, Skipped, check_readable, read_once, read_squares
from cdc_plugin.data.views import SMALL_SIDE, storage_size
from cdc_plugin.errors import ConfigError, shorten

DEFAULT_SIZE = 224
EXAMPLES = 3  # images that a warning names


@dataclass(frozen=True)
class ImageSet:
    """Images ready for training, and what is known about them.

    The short hash ``digest`` changes when the source does: with the content of arrays, with name, size and time of
    change of files, and with which images could not be read.
    """

    images: Pixels | FeatureSource  # (N, S, S, 3), in memory or mapped from disk; or vectors (N, D) in their place
    names: list[str]  # path relative to the source folder with forward slashes, or the index as text
    labels: NDArray[np.int64] | None = None  # (N,) for reporting only
    class_names: list[str] | None = None
    skipped: list[tuple[str, str]] = field(default_factory=list)  # name of what could not be read, and why; not in N
    source: str = ""
    digest: str = ""
    warnings: list[dict[str, Any]] = field(default_factory=list)  # about the images themselves
    count: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", len(self.images))

    def __len__(self) -> int:
        return self.count

    @property
    def noun(self) -> str:
        """What messages call one of them."""
        return name_sample(self.images)

    def batch(self, indices: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Return the images at these indices as uint8 (B, 3, S, S), or their vectors as float32 (B, D), a copy."""
        images, places = self.images, np.asarray(indices)
        rows = torch.from_numpy(images[places] if isinstance(images, FeatureSource) else copy_rows(images, places))
        return rows if rows.ndim == 2 else rows.permute(0, 3, 1, 2)

    def picture(self, index: int) -> Pixels | None:
        """Return an image (H, W, 3) to look at; None where there is only a vector."""
        images = self.images
        return images.picture(index) if isinstance(images, FeatureSource) else np.asarray(images[index])


@dataclass(frozen=True)
class Survey:
    """What is known of images before they are read."""

    count: int  # of all images, whether they can be read or not
    labels: bool  # whether they have labels; unknown ones of a Python data set count as none
    source: str
    looked_at: int  # how many images were read
    skipped: list[tuple[str, str]]  # name and reason of those that could not be
    left_aside: str  # which files are no images that can be read; empty if there are none
    noun: str = "image"


def survey_images(
    source: Any, input_size: int, *, labels: bool = True, root: str | os.PathLike[str] | None = None, looks: int = 64
) -> Survey:
    """Count the images, and try to read some of them, evenly spread; arguments as in `open_images`.

    >>> survey_images("digits", 32, looks=8).count
    1797
    """
    if isinstance(source, FeatureSource):
        return Survey(len(source), source.labels is not None, source.description, 0, [], "", name_sample(source))
    side = storage_size(input_size)
    described = describe_source(source, side, root, labels)
    sample = described.sample(looks)
    skipped: Skipped = []
    for _ in read_squares(sample, side, skipped):
        pass
    check_readable(described, skipped)  # that none of some images can be read does not condemn the source
    unreadable = [(sample.names[index], reason) for index, reason in skipped]
    has_labels = labels and described.labels is not None and not (described.labels == UNLABELLED).all()
    _, left_aside = explain_left_aside(described.left_aside)
    return Survey(len(described), has_labels, described.description, len(sample), unreadable, left_aside)


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

    >>> images = open_images("digits")
    >>> len(images), images.batch([0, 1]).shape
    (1797, torch.Size([2, 3, 32, 32]))

    Args:
        source: the name of a data set (a folder of the same name is written ``./name``); the path
            of a folder, an image, a .npz, .npy or .parquet file, of tar shards (``shards/*.tar``,
            ``part-{000..009}.tar``) or of a saved Hugging Face data set; ``hf:NAME:SPLIT``; a uint8 array or
            tensor; a map-style torch or Hugging Face data set; a list of paths or PIL images; or an ``ImageSource``.
            A ``FeatureSource`` has vectors in place of images.
        input_size: side that the network takes. None keeps square images of one size up to 96 pixels as they
            are and takes 224 otherwise.
        labels: False does not look at labels that the source may have.
        root: folder that named data sets are looked for in; see ``cdc_plugin.data.sources.named``.
        cache: folder for images that take more than 64 MB; None is the cache that all runs share
            (``cdc_plugin.data.cache``), and memory where there is none.
        progress: wraps an iterable, given its length and a description, to show how far it is.
        limit: read at most so many images, evenly spread over the source.
    """
    if isinstance(source, FeatureSource):
        names, known, classes = source.names, source.labels if labels else None, source.class_names
        return ImageSet(source, names, known, classes, source=source.description, digest=source.digest)
    size = input_size
    if size is None:
        native = native_size(source)
        size = native if native is not None and native <= SMALL_SIDE else DEFAULT_SIZE
    if size < 8:
        raise ConfigError(f"the input size is at least 8 pixels; found {size}")
    side = storage_size(size)
    described = describe_source(source, side, root, labels)
    described = described if limit is None else described.sample(limit)
    pixels, skipped, known_labels, marks = read_once(described, side, cache, progress)
    names, kept_labels = described.names, known_labels if labels else None
    if skipped:
        readable = np.delete(np.arange(len(names)), [index for index, _ in skipped])
        names = [names[index] for index in readable]
        kept_labels = None if kept_labels is None else kept_labels[readable]
    if kept_labels is not None and (kept_labels == UNLABELLED).any():
        kept_labels = None
    # It differs if others of the same images could not be read.
    parts: list[str | bytes] = [] if described.exact or marks is None else [marks.tobytes()]
    parts += [str(index) for index, _ in skipped]
    return ImageSet(
        images=pixels,
        names=names,
        labels=kept_labels,
        class_names=described.class_names if kept_labels is not None else None,
        skipped=[(described.names[index], reason) for index, reason in skipped],
        source=described.description,
        digest=compute_digest([described.digest, *parts]) if parts else described.digest,
        warnings=find_warnings(described.left_aside, marks, names),
    )


def find_warnings(
    left_aside: Mapping[str, int], marks: NDArray[np.uint64] | None, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return what report.json warns of: files beside the images, and by their fingerprints blank ones and copies."""
    count, text = explain_left_aside(left_aside) if left_aside else (0, "")
    warnings: list[dict[str, Any]] = []
    if text:
        warnings.append({"kind": "left_aside", "count": count, "examples": [], "text": text})
    if marks is None:
        return warnings
    _, first, group = np.unique(marks, return_index=True, return_inverse=True)
    original, is_blank = first[group], marks >= ONE_COLOUR
    blank = np.flatnonzero(is_blank)
    copies = np.flatnonzero((original < np.arange(len(marks))) & ~is_blank)
    pair = [*original[copies[:1]], *copies[:1]]
    for kind, places, shown, text in (
        ("blank", blank, blank[:EXAMPLES], "blank (of one colour, transparent or a single pixel)"),
        ("copies", copies, pair, "copies (pixel by pixel; they count again in training and in every figure)"),
    ):
        if len(places):
            examples = [names[place] for place in shown]
            text = f"{len(places):,} of {len(marks):,} images, such as {', '.join(map(shorten, examples))}: {text}"
            text += "; remove what is not intended"
            warnings.append({"kind": kind, "count": len(places), "examples": examples, "text": text})
    return warnings


def digest_image_list(images: ImageSet, looks: int = 64) -> str:
    """Return a short hash of the list of images, by which processes of one run make sure that they see the same ones.

    It covers the names in their order, the size, which images could not be read, and the pixels of some images, evenly
    spread. Unlike `ImageSet.digest` it does not depend on times of change, which differ between copies of the same
    files on two machines.
    """
    sample = images.images[spread_evenly(len(images), looks)]
    skipped = [name for name, _ in images.skipped]
    parts: list[str | bytes] = [
        str(images.images.shape),
        sample.tobytes() if sample.ndim == 2 else fingerprint(sample.astype(np.uint8, copy=False)).tobytes(),
        str(len(skipped)),
        *skipped,
        *images.names,
    ]
    return compute_digest(parts)
