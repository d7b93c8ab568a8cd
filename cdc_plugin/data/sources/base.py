"""Describe images before they are read: a count, a reader, names and labels, whatever kind of source they come from."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, features

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".jpe", ".jfif")
HEIF = (".heic", ".heif")
# What to do about files beside these; notes about images are no loss.
NOTES = {".txt", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".yaml", ".yml", ".md", ".html", ".cls", ".db", ".ini"}
HINTS = {
    HEIF: 'for .heic: pip install "cdc-plugin[heic]", or convert to .jpg',
    (".avif",): 'for .avif: pip install "pillow>=11.3", or convert to .jpg',
    (".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".raf", ".rw2"): "develop raw photos to .jpg",
    (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v"): "take frames of videos: ffmpeg -i VIDEO -vf fps=1 %06d.jpg",
    (".svg", ".pdf", ".eps", ".psd", ".ai"): "render drawings and pages to .png",
}
ACCEPTED = ", ".join(extension[1:] for extension in EXTENSIONS)
WORKERS = min(8, (os.cpu_count() or 1) + 1)  # threads that read images
LOG_INTERVAL = 10.0  # seconds after which a listing logs how many images it has found
UNLABELLED = np.iinfo(np.int64).min


@dataclass(frozen=True)
class ImageSource:
    """Images that are known but not read yet.

    ``content`` is an array (N, H, W, 3) in memory or mapped from disk, or a function from index to an RGB image, which
    raises ``UnreadableImageError`` for an image to be skipped. It is ``exact`` if the digest changes with each of the
    images: what has only a sample of them in its digest is not taken from the cache that all runs share, and gets
    another digest when it is read.
    """

    content: NDArray[np.uint8] | Callable[[int], Image.Image]
    names: list[str]
    labels: NDArray[np.int64] | None  # (N,); a reader may fill them in while it reads
    class_names: list[str] | None
    digest: str
    description: str  # what to call the source in messages
    workers: int = 1  # threads that may read at once; 1 for a reader that is not known to be thread-safe
    exact: bool = True
    marks: NDArray[np.uint64] | None = None  # (N,) of `fingerprint`, where the images were read for the digest
    left_aside: Mapping[str, int] = field(default_factory=dict)  # number of files that are no images, by extension

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Image.Image:
        """Return an image of a source that has not been read yet."""
        return self.content(index) if callable(self.content) else Image.fromarray(self.content[index])

    def sample(self, count: int) -> ImageSource:
        """Return at most ``count`` of the images, evenly spread."""
        if len(self) <= count:
            return self
        chosen = np.linspace(0, len(self) - 1, count).astype(np.int64)
        return replace(self.choose(chosen), digest=f"{self.digest}-{count}")

    def choose(self, places: NDArray[np.int64]) -> ImageSource:
        """Return the images at these places; only these are ever read."""
        content = self.content
        return replace(
            self,
            content=(lambda index: content(int(places[index]))) if callable(content) else content[places],
            names=[self.names[place] for place in places],
            labels=None if self.labels is None else self.labels[places],
            marks=None if self.marks is None else self.marks[places],
        )


def is_image_name(name: str) -> bool:
    """Return whether a file is taken for an image."""
    return name.lower().endswith(find_extensions())


@functools.cache
def find_extensions() -> tuple[str, ...]:
    """Return the extensions of images that can be read here, which depends on Pillow and on pillow-heif."""
    avif = (".avif",) if "avif" in features.modules and features.check("avif") else ()
    return (*EXTENSIONS, *avif, *(HEIF if importlib.util.find_spec("pillow_heif") is not None else ()))


def find_extension(name: str) -> str:
    """Return the extension of a file name in lower case."""
    return os.path.splitext(name)[1].lower() or "(no extension)"


def explain_left_aside(files: Mapping[str, int]) -> tuple[int, str]:
    """Return how many files are neither images that can be read nor notes, and which, with what to do about them."""
    kinds = sorted((kind for kind in files if kind not in NOTES), key=lambda kind: (-files[kind], kind))
    hints = [hint for extensions, hint in HINTS.items() if set(extensions) & set(kinds)]
    named = ", ".join(f"{files[kind]:,} {kind}" for kind in kinds[:5]) + (", ..." if len(kinds) > 5 else "")
    text = f"left aside: {named}; {'; '.join(hints) or f'images are {ACCEPTED} files'}"
    return sum(files[kind] for kind in kinds), text if kinds else ""


def read_state(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return size and time of change in ns of a file; (-1, -1) for one that is absent."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):  # a NUL in the path
        return -1, -1
    return state.st_size, state.st_mtime_ns


def spread_evenly(count: int, looks: int) -> list[int]:
    """Return at most ``looks`` of ``count`` places, evenly spread, first and last among them.

    >>> spread_evenly(9, 3), spread_evenly(2, 3)
    ([0, 4, 8], [0, 1])
    """
    return sorted({round(place) for place in np.linspace(0, count - 1, min(looks, count))})


def number_classes(names: Iterable[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Return the (N,) number of each class name and the class names in alphabetical order.

    >>> number_classes(["dog", "cat", "dog"])
    (array([1, 0, 1]), ['cat', 'dog'])
    """
    seen: dict[str, int] = {}
    numbers = np.fromiter((seen.setdefault(name, len(seen)) for name in names), np.int64)
    class_names = sorted(seen)
    order = np.empty(len(seen), dtype=np.int64)
    order[[seen[name] for name in class_names]] = np.arange(len(seen))
    return order[numbers], class_names
