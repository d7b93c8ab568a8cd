"""Describe image folders, flat or nested, with or without class sub-folders, and plain lists of image files."""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.atomic import has_content
from cdc_plugin.data.cache import compute_digest
from cdc_plugin.data.decode import decode_file
from cdc_plugin.data.sources.base import (
    ACCEPTED,
    HINTS,
    LOG_INTERVAL,
    WORKERS,
    ImageSource,
    find_extension,
    is_image_name,
    number_classes,
    read_state,
    spread_evenly,
)
from cdc_plugin.errors import DataError

SPLITS = {"train", "val", "valid", "validation", "test"}
IGNORED_FOLDERS = {"__MACOSX", "__pycache__"}

log = logging.getLogger(__name__)


def describe_folder(folder: Path, side: int) -> ImageSource:
    """Return a source of every image below a folder, sorted by path; labels from class sub-folders if there are any."""
    others: Counter[str] = Counter()
    names = list_images(folder, others)
    source = describe_files(names, side, str(folder), names, *find_class_folders(names), folder=os.fspath(folder))
    return replace(source, left_aside=others)


def describe_files(
    paths: Sequence[str | os.PathLike[str]],
    side: int,
    description: str,
    names: list[str] | None = None,
    labels: NDArray[np.int64] | None = None,
    class_names: list[str] | None = None,
    folder: str = "",
) -> ImageSource:
    """Return a source of image files in the order of their paths, which may be relative to the folder."""
    names = [Path(path).as_posix() for path in paths] if names is None else names
    # Paths stay relative: of a million images they take little memory.
    states = (read_state(os.path.join(folder, path)) for path in paths)
    return ImageSource(
        content=lambda index: decode_file(os.path.join(folder, paths[index]), side),
        names=names,
        labels=labels,
        class_names=class_names,
        digest=compute_digest(f"{name} {state}" for name, state in zip(names, states, strict=True)),
        description=description,
        workers=WORKERS,
    )


def list_images(folder: Path, others: Counter[str] | None = None) -> list[str]:
    """Return the paths of all images relative to the folder, with forward slashes, sorted; count others by extension.

    Hidden files and folders are left out. Links are followed, but every folder is entered once only.
    """
    others = Counter() if others is None else others
    names = sorted(_walk(folder, others))
    if names:
        return names
    kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common(5)) or "nothing else either"
    hints = {
        **HINTS,
        (".npz", ".npy"): "give the path of the .npz or .npy file itself",
        (".parquet",): "give the path of a .parquet file, or of the folder it lies in",
        (".tar",): f"name the shards themselves: {folder / '*.tar'}",
        (".zip", ".gz", ".tgz"): "unpack the archive first",
    }
    common = [kind for kind, _ in others.most_common()]
    fitting = (hint for kind in common for extensions, hint in hints.items() if kind in extensions)
    hint = next(fitting, "give the path of the folder that holds the images")
    raise DataError(f"no images in {folder}: expected {ACCEPTED} files; found {kinds}; {hint}")


def find_class_folders(names: Sequence[str]) -> tuple[NDArray[np.int64] | None, list[str] | None]:
    """Return the labels and classes that a folder layout spells out, for reporting only.

    There are classes if every image lies in one of at least two first-level sub-folders. If these are all
    splits (train, val, test, ...), the level below is taken, and the splits are one data set.

    >>> find_class_folders(["cat/1.png", "dog/1.png"])
    (array([0, 1]), ['cat', 'dog'])
    """
    level = 1 if all("/" in name and name.split("/", 1)[0].lower() in SPLITS for name in names) else 0
    if any(name.count("/") <= level for name in names):
        return None, None
    labels, class_names = number_classes(name.split("/", level + 1)[level] for name in names)
    return (labels, class_names) if len(class_names) >= 2 else (None, None)


def find_uniform_side(paths: Sequence[str | os.PathLike[str]], looks: int = 16, folder: str = "") -> int | None:
    """Return the side of the images if a few of them, evenly spread, are squares of one size; reads headers only."""
    sizes = set()
    for index in spread_evenly(len(paths), looks):
        try:
            if has_content(path := os.path.join(folder, paths[index])):
                with Image.open(path) as image:
                    sizes.add(image.size)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            continue  # an unreadable file is reported when the images are read
    width, height = sizes.pop() if len(sizes) == 1 else (0, -1)
    return width if width == height else None


def _walk(folder: Path, others: Counter[str]) -> Iterator[str]:
    """Yield the relative name of every image; other files are counted by extension in ``others``."""
    if not folder.is_dir():
        raise DataError(f"no folder at {folder}; expected a folder of images ({ACCEPTED}); check the path")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise DataError(f"the folder {folder} cannot be read; give yourself read permission (chmod -R u+rX)")
    count = 0
    entered: set[tuple[int, int]] = set()  # so that a link to a parent does not go round for ever
    waiting = [""]
    next_log = time.monotonic() + LOG_INTERVAL
    while waiting:
        if time.monotonic() > next_log:
            log.info("listing %s: %s images so far", folder, f"{count:,}")
            next_log = time.monotonic() + LOG_INTERVAL
        inside = waiting.pop()
        below = []
        for entry in _list_folder(os.path.join(folder, inside), entered):
            name = f"{inside}/{entry.name}" if inside else entry.name
            if entry.name.startswith(".") or entry.name in IGNORED_FOLDERS:
                continue
            # Without looking at the file unless it is a link, which may point to where one may not look.
            if os.path.isdir(entry) if entry.is_symlink() else entry.is_dir(follow_symlinks=False):
                below.append(name)
            elif is_image_name(entry.name):
                count += 1
                yield name
            else:
                others[find_extension(entry.name)] += 1
        waiting += sorted(below, reverse=True)  # in a fixed order: of two links to a folder the first one counts


def _list_folder(path: str, entered: set[tuple[int, int]]) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a folder, if it was not entered before; one that cannot be read, or has gone, is passed over."""
    with contextlib.suppress(OSError):
        state = os.stat(path)
        if (state.st_dev, state.st_ino) not in entered:
            entered.add((state.st_dev, state.st_ino))
            with os.scandir(path) as entries:
                yield from entries
