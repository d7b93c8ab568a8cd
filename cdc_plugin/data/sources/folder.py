"""Image folders, flat or nested, with or without class sub-folders, and plain lists of image files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.decode import decode_file
from cdc_plugin.data.sources.base import ImageSource, labels_by_class, spread
from cdc_plugin.data.sources.folder_index import (
    EXTENSIONS,
    PATIENCE,
    FolderIndex,
    digest_of_states,
    index_of,
    is_image_name,
    state_of,
)
from cdc_plugin.errors import UserError

__all__ = ["ACCEPTED", "WORKERS", "files_source", "folder_source", "is_image_name", "list_images", "uniform_side"]

SPLITS = {"train", "val", "valid", "validation", "test"}
ACCEPTED = ", ".join(extension[1:] for extension in EXTENSIONS)
WORKERS = min(8, (os.cpu_count() or 1) + 1)


def folder_source(folder: Path, side: int) -> ImageSource:
    """Every image below a folder, sorted by path; labels from class sub-folders if there are any."""
    index = _index(folder)
    labels, class_names = labels_from_names(index.names)
    return ImageSource(
        content=_reader(os.fspath(folder), index.names, side),
        names=index.names,
        labels=labels,
        class_names=class_names,
        digest=index.digest,
        description=str(folder),
        workers=WORKERS,
    )


def files_source(
    paths: Sequence[str | os.PathLike[str]],
    side: int,
    description: str,
    names: list[str] | None = None,
    labels: NDArray[np.int64] | None = None,
    class_names: list[str] | None = None,
) -> ImageSource:
    """The given image files in the given order."""
    names = [Path(path).as_posix() for path in paths] if names is None else names
    states = np.array([state_of(path) for path in paths], dtype=np.int64).reshape(-1, 2)
    return ImageSource(
        content=_reader("", [os.fspath(path) for path in paths], side),
        names=names,
        labels=labels,
        class_names=class_names,
        digest=digest_of_states(names, states),
        description=description,
        workers=WORKERS,
    )


def list_images(folder: Path) -> list[str]:
    """Paths of all images relative to the folder, with forward slashes, sorted; for a first look.

    Hidden files and folders are left out. Links are followed, but every folder is entered once only.
    """
    return _index(folder, patience=0).names


def labels_from_names(names: Sequence[str]) -> tuple[NDArray[np.int64] | None, list[str] | None]:
    """Classes that a folder layout spells out, for reporting only.

    There are classes if every image lies in one of at least two first-level sub-folders. If these are all
    splits (train, val, test, ...), the level below is taken, and the splits are one data set.
    """
    level = 0
    if all("/" in name and name.split("/", 1)[0].lower() in SPLITS for name in names):
        level = 1
    if any(name.count("/") <= level for name in names):
        return None, None
    labels, class_names = labels_by_class(name.split("/", level + 1)[level] for name in names)
    return (labels, class_names) if len(class_names) >= 2 else (None, None)


def uniform_side(paths: Sequence[str | os.PathLike[str]], looks: int = 16, folder: str = "") -> int | None:
    """Side of the images if a few of them, evenly spread, are all squares of one size; reads headers only."""
    sizes = set()
    for index in spread(len(paths), looks):
        try:
            with Image.open(os.path.join(folder, paths[index])) as image:
                sizes.add(image.size)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            continue  # an unreadable file is reported when the images are read
    width, height = sizes.pop() if len(sizes) == 1 else (0, -1)
    return width if width == height else None


def _index(folder: Path, patience: float = PATIENCE) -> FolderIndex:
    if not folder.is_dir():
        raise UserError(f"no folder at {folder}; expected a folder of images ({ACCEPTED}); check the path")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"the folder {folder} can not be read; give yourself read permission (chmod -R u+rX)")
    index = index_of(folder, patience)
    if not index.names:
        raise UserError(_nothing_found(folder, index.others))
    return index


def _reader(folder: str, names: list[str], side: int) -> Callable[[int], Image.Image]:
    return lambda index: decode_file(os.path.join(folder, names[index]), side)


def _nothing_found(folder: Path, others: Counter[str]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common(5)) or "nothing else either"
    hint = "give the path of the folder that holds the images"
    if ".npz" in others or ".npy" in others:
        hint = "give the path of the .npz or .npy file itself"
    elif ".parquet" in others:
        hint = "give the path of a .parquet file, or of the folder it lies in"
    elif ".tar" in others:
        hint = f"name the shards themselves: {folder / '*.tar'}"
    elif {".zip", ".gz", ".tgz"} & set(others):
        hint = "unpack the archive first"
    return f"no images in {folder}: expected {ACCEPTED} files; found {kinds}; {hint}"
