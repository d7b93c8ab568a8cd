"""Image folders, flat or nested, with or without class sub-folders, and plain lists of image files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.decode import decode_file
from cdc_plugin.data.source import ImageSource, digest_of, labels_by_class
from cdc_plugin.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
SPLITS = {"train", "val", "valid", "validation", "test"}
IGNORED_FOLDERS = {"__MACOSX", "__pycache__"}
ACCEPTED = ", ".join(extension[1:] for extension in EXTENSIONS)


def is_image_name(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def folder_source(folder: Path, side: int) -> ImageSource:
    """Every image below a folder, sorted by path; labels from class sub-folders if there are any."""
    names = list_images(folder)
    labels, class_names = labels_from_names(names)
    return files_source([folder / name for name in names], side, str(folder), names, labels, class_names)


def files_source(
    paths: Sequence[Path],
    side: int,
    description: str,
    names: list[str] | None = None,
    labels: NDArray[np.int64] | None = None,
    class_names: list[str] | None = None,
) -> ImageSource:
    """The given image files in the given order."""
    names = [path.as_posix() for path in paths] if names is None else names
    return ImageSource(
        content=_reader(list(paths), side),
        names=names,
        labels=labels,
        class_names=class_names,
        digest=digest_of(_file_states(paths, names)),
        description=description,
        workers=min(8, (os.cpu_count() or 1) + 1),
    )


def list_images(folder: Path) -> list[str]:
    """Paths of all images relative to the folder, with forward slashes, sorted.

    Hidden files and folders are left out. Links are followed, but every folder is entered once only, so that
    a link to a parent does not go round for ever.
    """
    if not folder.is_dir():
        raise UserError(f"no folder at {folder}; expected a folder of images ({ACCEPTED}); check the path")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"the folder {folder} can not be read; give yourself read permission (chmod -R u+rX)")
    found: list[str] = []
    others: Counter[str] = Counter()
    entered: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        state = os.stat(parent)
        if (state.st_dev, state.st_ino) in entered:
            folders.clear()
            continue
        entered.add((state.st_dev, state.st_ino))
        folders[:] = sorted(name for name in folders if _wanted(name))
        for name in files:
            if _wanted(name) and is_image_name(name):
                found.append(Path(parent, name).relative_to(folder).as_posix())
            elif _wanted(name):
                others[Path(name).suffix.lower() or "(no extension)"] += 1
    if not found:
        raise UserError(_nothing_found(folder, others))
    return sorted(found)


def labels_from_names(names: Sequence[str]) -> tuple[NDArray[np.int64] | None, list[str] | None]:
    """Classes that a folder layout spells out, for reporting only.

    There are classes if every image lies in one of at least two first-level sub-folders. If these are all
    splits (train, val, test, ...), the level below is taken, and the splits are one data set.
    """
    parts = [PurePosixPath(name).parts for name in names]
    level = 0
    if all(len(part) > 1 and part[0].lower() in SPLITS for part in parts):
        level = 1
    if any(len(part) < level + 2 for part in parts):
        return None, None
    labels, class_names = labels_by_class([part[level] for part in parts])
    return (labels, class_names) if len(class_names) >= 2 else (None, None)


def uniform_side(paths: Sequence[Path], looks: int = 16) -> int | None:
    """Side of the images if a few of them, evenly spread, are all squares of one size; reads headers only."""
    sizes = set()
    for index in sorted({round(i) for i in np.linspace(0, len(paths) - 1, min(looks, len(paths)))}):
        try:
            with Image.open(paths[index]) as image:
                sizes.add(image.size)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            continue  # an unreadable file is reported when the images are read
    width, height = sizes.pop() if len(sizes) == 1 else (0, -1)
    return width if width == height else None


def _reader(paths: list[Path], side: int) -> Callable[[int], Image.Image]:
    return lambda index: decode_file(paths[index], side)


def _file_states(paths: Sequence[Path], names: Sequence[str]) -> list[str]:
    states = []
    for path, name in zip(paths, names, strict=True):
        try:
            state = path.stat()
        except OSError:
            states.append(f"{name} absent")  # decoding will record the reason
        else:
            states.append(f"{name} {state.st_size} {state.st_mtime_ns}")
    return states


def _wanted(name: str) -> bool:
    return not name.startswith(".") and name not in IGNORED_FOLDERS


def _nothing_found(folder: Path, others: Counter[str]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common(5)) or "nothing else either"
    hint = "give the path of the folder that holds the images"
    if ".npz" in others or ".npy" in others:
        hint = "give the path of the .npz or .npy file itself"
    elif {".zip", ".tar", ".gz", ".tgz"} & set(others):
        hint = "unpack the archive first"
    return f"no images in {folder}: expected {ACCEPTED} files; found {kinds}; {hint}"
