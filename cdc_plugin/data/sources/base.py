"""What every kind of source becomes before its images are read: a count, a reader, names and labels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.row_file import RowFile

WHOLE_HASH_BYTES = 1 << 30  # larger files are told apart by a sample of their rows, and their time of change


@dataclass(frozen=True)
class ImageSource:
    """Images that are known but not read yet.

    Args:
        content: uint8 (N, H, W, 3) in memory or on disk, or a function from index to an RGB image. The function
            raises ``UnreadableImageError`` for an image to be skipped.
        names: one name an image.
        labels: (N,) int64, or None; a reader may fill them in while it reads.
        digest: changes when the images change.
        description: what to call the source in messages.
        workers: threads that may read at once; 1 for a reader that is not known to be thread-safe.
        exact: the digest changes with each of the images. What has only a sample of them in its digest is not taken
            from the cache that all runs share, and gets another digest when it is read.
    """

    content: NDArray[np.uint8] | RowFile | Callable[[int], Image.Image]
    names: list[str]
    labels: NDArray[np.int64] | None
    class_names: list[str] | None
    digest: str
    description: str
    workers: int = 1
    exact: bool = True

    def __len__(self) -> int:
        return len(self.names)

    def sample(self, count: int) -> ImageSource:
        """At most ``count`` of the images, evenly spread; only these are ever read."""
        if len(self) <= count:
            return self
        chosen = np.linspace(0, len(self) - 1, count).astype(np.int64)
        content = self.content
        return replace(
            self,
            content=(lambda index: content(int(chosen[index]))) if callable(content) else content[chosen],
            names=[self.names[index] for index in chosen],
            labels=None if self.labels is None else self.labels[chosen],
            digest=f"{self.digest}-{count}",
        )


class UnreadableImageError(Exception):
    """This one image can not be used; the text is the reason that is reported."""


def digest_of(parts: Iterable[str | bytes]) -> str:
    """Short hash of a sequence of texts; their borders count."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def digest_of_array(images: NDArray[np.uint8] | RowFile, step: int = 1) -> str:
    """Short hash of shape and content, or of every k-th row and the last."""
    chunk = 1024 * step
    state = hashlib.blake2b(repr(images.shape).encode(), digest_size=8)
    for start in range(0, len(images), chunk):
        state.update(np.ascontiguousarray(images[start : start + chunk : step]).data)
    state.update(np.ascontiguousarray(images[-1:]).data)
    return state.hexdigest()


def spread(count: int, looks: int) -> list[int]:
    """At most ``looks`` of ``count`` places, evenly spread, first and last among them."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(looks, count))})


def labels_by_class(names: Iterable[str]) -> tuple[NDArray[np.int64], list[str]]:
    """(N,) index of each class name and the class names in alphabetical order."""
    seen: dict[str, int] = {}
    numbers = np.fromiter((seen.setdefault(name, len(seen)) for name in names), np.int64)
    class_names = sorted(seen)
    order = np.empty(len(seen), dtype=np.int64)
    order[[seen[name] for name in class_names]] = np.arange(len(seen))
    return order[numbers], class_names
