"""The cache folder: decoded images, features and indices that later runs use again.

It is the folder that CDC_CACHE names, else ``cdc-plugin`` in XDG_CACHE_HOME or ~/.cache; ``CDC_CACHE=off`` does
without. It holds at most CDC_CACHE_GB (20) gigabytes: what was not used for longest goes first. All entries are whole
or not there, and may be removed at any time: processes that use one have it open.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.data.locks import is_dead, locked
from cdc_plugin.data.row_file import clear_error, format_bytes, no_room, temporary_beside
from cdc_plugin.errors import UserError

DEFAULT_GIGABYTES = 20.0
KINDS = ("images", "features", "index")
ABANDONED = 24 * 3600  # seconds without a change after which a half-written file of another machine is swept

log = logging.getLogger(__name__)
Found = TypeVar("Found")


def cache_folder() -> Path | None:
    """The cache folder, which need not be there yet; None if caching is off, or impossible, which is logged."""
    wish = os.environ.get("CDC_CACHE", "").strip()
    if wish.lower() == "off":
        return None
    try:
        above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(wish).expanduser() if wish else Path(above) / "cdc-plugin"
        present = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        if present.is_dir() and os.access(present, os.W_OK | os.X_OK):
            return folder
        reason = f"{present} can not be written"
    except (OSError, RuntimeError) as error:  # the latter: there is no home
        reason = str(error)
    _warn_once(f"no cache folder ({reason}); set CDC_CACHE to a folder that can be written")
    return None


def scratch_folder() -> Path | None:
    """Where large files of this process alone go: the cache, else a folder of the system; None if there is neither.

    They are unlinked while they are in use. What killed processes left is swept now.
    """
    folder = cache_folder()
    try:
        if folder is None:
            user = os.getuid() if hasattr(os, "getuid") else 0
            folder = Path(tempfile.gettempdir()) / f"cdc-plugin-{user}"
            folder.mkdir(mode=0o700, exist_ok=True)
            if hasattr(os, "getuid") and folder.stat().st_uid != user:
                return None  # somebody else could change what is in it
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
    except OSError:
        return None
    return folder


def entry(kind: str, key: str, suffix: str) -> Path | None:
    """Where something of one of the KINDS is kept, whether it is there or not; None if there is no cache."""
    assert kind in KINDS
    folder = cache_folder()
    return None if folder is None else folder / f"{kind}-{key}.{suffix}"


def used(path: Path) -> None:
    """Mark an entry as used just now, so that others are removed before it."""
    try:
        os.utime(path)
    except OSError:
        log.debug("%s belongs to somebody else or is gone", path)


def made_once(path: Path, find: Callable[[], Found | None], make: Callable[[], Found]) -> Found:
    """What ``find`` gives; where it gives nothing, one process calls ``make`` and the others wait for it.

    Args:
        path: of the entry; the lock lies beside it.
    """
    found = find()
    if found is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise clear_error(error, path) from error
        with locked(path):
            found = find()  # another process may have made it meanwhile
            if found is None:
                found = make()
    used(path)
    return found


def make_room(path: Path, size: int) -> None:
    """Remove what was not used for longest until an entry of ``size`` bytes fits, and what dead processes left.

    It has to fit into what the cache may hold and onto the disk.

    Raises:
        UserError: it does not, whatever goes.
    """
    limit = _limit()
    if size > limit:
        raise UserError(
            f"{path.name} takes {format_bytes(size)}, more than the cache {path.parent} may hold "
            f"({format_bytes(limit)}); "
            f"set CDC_CACHE_GB={math.ceil(size / 1024**3) + 1} if the disk has room, or choose a smaller input size"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise clear_error(error, path, size) from error
    entries, total = _entries(path.parent)
    entries.pop(_stem(path.name), None)
    if size > free + sum(weight for _, weight, _ in entries.values()):
        raise no_room(path, size, free)  # before anything is removed in vain
    for _, weight, files in sorted(entries.values(), key=lambda kept: kept[0]):
        if total + size <= limit and size <= free:
            break
        try:
            for file in files:
                file.unlink(missing_ok=True)
        except OSError as error:
            log.debug("%s stays (%s)", files[0], error)  # in use, on Windows
        else:
            total -= weight
            free += weight


def sweep(folder: Path) -> None:
    """Remove half-written files and locks of processes that are no more."""
    for file in folder.iterdir():
        if file.suffix not in (".part", ".lock") or not _is_ours(file):
            continue
        try:
            age = time.time() - file.stat().st_mtime
            if is_dead(file) or age > ABANDONED:
                file.unlink(missing_ok=True)
        except OSError:
            continue  # gone already, or somebody else's


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a temporary file, and give it its name when it is whole."""
    temporary = temporary_beside(path)
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Keep small arrays, an index say, if that can be done; whoever asks for them can also do without."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    try:
        make_room(path, sum(array.nbytes for array in arrays.values()))
        write_whole(path, write)
    except (OSError, UserError) as error:
        log.debug("%s is not kept: %s", path, error)


def load_arrays(path: Path) -> dict[str, NDArray[Any]] | None:
    """What `save_arrays` kept, or None if it is not there."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception:  # a damaged archive makes NumPy and zipfile raise many kinds of error; it is made again
        return None


@functools.cache
def _warn_once(text: str) -> None:
    log.warning(text)


def _limit() -> int:
    wish = os.environ.get("CDC_CACHE_GB", "").strip() or str(DEFAULT_GIGABYTES)
    try:
        size = float(wish)
    except ValueError:
        size = math.nan
    if not (math.isfinite(size) and size >= 0):
        raise UserError(f"CDC_CACHE_GB is the size of the cache in gigabytes, 20 say; found {wish!r}")
    return int(size * 1024**3)


def _entries(folder: Path) -> tuple[dict[str, tuple[float, int, list[Path]]], int]:
    """Time of last use, bytes and files of every entry, and the bytes of all with those under way."""
    entries: dict[str, tuple[float, int, list[Path]]] = {}
    total = 0
    for file in folder.iterdir():
        if not _is_ours(file):
            continue
        try:
            state = file.stat()
        except OSError:
            continue
        total += state.st_size
        if file.suffix not in (".part", ".lock"):
            stem = _stem(file.name)
            time_of_use, weight, files = entries.get(stem, (0.0, 0, []))
            entries[stem] = (max(time_of_use, state.st_mtime), weight + state.st_size, [*files, file])
    return entries, total


def _is_ours(file: Path) -> bool:
    """Nothing else is ever removed: the user may have named a folder with other files."""
    return file.name.startswith(tuple(f"{kind}-" for kind in KINDS))


def _stem(name: str) -> str:
    """Images and the notes beside them are one entry."""
    return name.rsplit(".", 1)[0]
