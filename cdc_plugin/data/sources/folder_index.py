"""What is in a folder of images: names, sizes and times, kept in the cache when there are many.

A kept index is trusted if no folder's time of change has changed and the files have the size and time they had: a
spread sample of them, and all others as far as they can be looked at within seconds. A known limit: on a slow disk, an
image that is written again in place, under its old name, can go unseen; ``CDC_CACHE=off`` looks at every file.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.data.cache import entry, load_arrays, save_arrays, used
from cdc_plugin.data.sources.base import digest_of, spread

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
IGNORED_FOLDERS = {"__MACOSX", "__pycache__"}
KEPT_FROM = 10_000  # images; fewer are listed as fast as an index is read
SAMPLE = 200
PATIENCE = 15.0  # seconds for all others; a million files of a local disk take 3
TELL = 10.0  # seconds after which a listing says how far it is
SETTLED = 2 * 10**9  # ns: file systems do not tell two changes apart that are closer


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FolderIndex:
    """Images below a folder.

    Args:
        names: paths relative to the folder with forward slashes, sorted.
        states: (N, 2) int64, size and time of change in ns of each.
        others: how many files of which extension are there besides.
    """

    names: list[str]
    states: NDArray[np.int64]
    digest: str
    others: Counter[str]


def is_image_name(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def index_of(folder: Path, patience: float = PATIENCE) -> FolderIndex:
    """All images below a folder; from the cache if nothing has changed since they were listed.

    Args:
        patience: seconds for a look at files beyond a sample, before a kept index is trusted.
    """
    key = digest_of(["folder", os.path.realpath(folder)])
    kept = entry("index", key, "npz")
    index = None if kept is None or not kept.is_file() else _read(kept, folder, patience)
    if index is not None and kept is not None:
        used(kept)
        return index
    started = time.time_ns()
    index, folders = _scan(folder)
    if kept is not None and len(index.names) >= KEPT_FROM:
        newest = max(max(folders.values()), int(index.states[:, 1].max()))
        if newest < started - SETTLED:  # else a change right after the listing could bear the same time
            save_arrays(kept, _as_arrays(index, folders))
    return index


def state_of(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Size and time of change in ns; (-1, -1) for what is not there."""
    try:
        state = os.stat(path)
    except OSError:
        return -1, -1
    return state.st_size, state.st_mtime_ns


def digest_of_states(names: list[str], states: NDArray[np.int64]) -> str:
    """Changes when a file is added, removed, renamed or written."""
    return digest_of(
        f"{names[place]} {size} {changed}" if size >= 0 else f"{names[place]} absent"
        for some in _in_turn(len(names))
        for place, (size, changed) in zip(some, states[some].tolist(), strict=True)
    )


def pack_names(names: list[str]) -> NDArray[np.uint8]:
    return np.frombuffer("\0".join(names).encode("utf-8", "surrogateescape"), dtype=np.uint8)


def unpack_names(packed: NDArray[np.uint8]) -> list[str]:
    return packed.tobytes().decode("utf-8", "surrogateescape").split("\0") if len(packed) else []


def _scan(folder: Path) -> tuple[FolderIndex, dict[str, int]]:
    """The index, and the time of change of every folder in it by its relative name.

    Links are followed, but every folder is entered once only, so that a link to a parent does not go round for ever.
    """
    root = os.fspath(folder)
    names: list[str] = []
    sizes = array("q")
    others: Counter[str] = Counter()
    folders: dict[str, int] = {}
    entered: set[tuple[int, int]] = set()
    waiting = [""]
    tell = time.monotonic() + TELL
    while waiting:
        if time.monotonic() > tell:
            log.info("listing %s: %s images so far", folder, f"{len(names):,}")
            tell = time.monotonic() + TELL
        inside = waiting.pop()
        try:
            state = os.stat(os.path.join(root, inside))
            if (state.st_dev, state.st_ino) in entered:
                continue
            entered.add((state.st_dev, state.st_ino))
            folders[inside] = state.st_mtime_ns
            below = []
            with os.scandir(os.path.join(root, inside)) as found:
                for item in found:
                    name = item.name
                    if name.startswith(".") or name in IGNORED_FOLDERS:
                        continue
                    path = f"{inside}/{name}" if inside else name
                    if item.is_dir():
                        below.append(path)
                    elif is_image_name(name):
                        names.append(path)
                        sizes.extend(_state(item))
                    else:
                        others[os.path.splitext(name)[1].lower() or "(no extension)"] += 1
            waiting += sorted(below, reverse=True)
        except OSError:
            continue  # a folder that can not be read, or has just gone, is passed over
    order = sorted(range(len(names)), key=names.__getitem__)
    names = [names[place] for place in order]
    states = np.frombuffer(sizes, dtype=np.int64).reshape(-1, 2)[order]
    return FolderIndex(names, states, digest_of_states(names, states), others), folders


def _state(item: os.DirEntry[str]) -> tuple[int, int]:
    try:
        state = item.stat()
    except OSError:  # a dangling link; decoding will record the reason
        return -1, -1
    return state.st_size, state.st_mtime_ns


def _as_arrays(index: FolderIndex, folders: dict[str, int]) -> dict[str, NDArray[Any]]:
    return {
        "names": pack_names(index.names),
        "states": index.states,
        "digest": pack_names([index.digest]),
        "folders": pack_names(list(folders)),
        "folder_times": np.array(list(folders.values()), dtype=np.int64),
    }


def _read(kept: Path, folder: Path, patience: float) -> FolderIndex | None:
    arrays = load_arrays(kept)
    if arrays is None:
        return None
    try:
        folders = unpack_names(arrays["folders"]) or [""]
        for name, changed in zip(folders, arrays["folder_times"].tolist(), strict=True):
            if state_of(folder / name)[1] != changed:
                return None
        names, states = unpack_names(arrays["names"]), arrays["states"]
        if len(names) != len(states) or not _unchanged(os.fspath(folder), names, states, patience):
            return None
        return FolderIndex(names, states, unpack_names(arrays["digest"])[0], Counter())
    except (KeyError, ValueError, IndexError):
        return None


def _unchanged(folder: str, names: list[str], states: NDArray[np.int64], patience: float) -> bool:
    """Whether files have the size and time they had: a spread sample, and the others until patience ends."""
    end = time.monotonic() + patience
    for some in (spread(len(names), SAMPLE), *_in_turn(len(names))):
        for place, known in zip(some, states[some].tolist(), strict=True):
            if state_of(f"{folder}/{names[place]}") != tuple(known):
                return False
        if time.monotonic() > end:
            break
    return True


def _in_turn(count: int) -> Iterator[range]:
    return (range(start, min(start + SAMPLE, count)) for start in range(0, count, SAMPLE))
