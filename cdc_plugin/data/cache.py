"""Keep decoded images and features in a cache folder, where later runs find them.

It is the folder that CDC_CACHE names, else the one that the system has for caches (``~/.cache/cdc-plugin`` or below
XDG_CACHE_HOME on Linux); ``CDC_CACHE=off`` does without. It holds at most CDC_CACHE_GB (20) gigabytes: the least
recently used entries are removed first. All entries are complete or absent, and may be removed at any time: processes
that use one have it open. Rows are mapped into memory, so that the system decides which of them stay there.
"""

import contextlib
import functools
import hashlib
import logging
import math
import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import platformdirs
from filelock import FileLock, Timeout
from numpy.lib import format as npy_format
from numpy.typing import DTypeLike, NDArray

from cdc_plugin.data.atomic import DISK_FULL, replace_atomically
from cdc_plugin.errors import ConfigError, OutputError

KINDS = ("images", "features")
WRITE_BUFFER = 1 << 20  # bytes that are written at once
SCATTERED = 256  # rows that are read at once from all over a map, of which the system brings 64 KB around each

log = logging.getLogger(__name__)
T = TypeVar("T")


def compute_digest(parts: Iterable[str | bytes]) -> str:
    """Return a short hash of a sequence of texts, by which an entry is found again; their borders count.

    >>> compute_digest(["ab", "c"]) == compute_digest(["a", "bc"])
    False
    """
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def find_cache_folder() -> Path | None:
    """Return the cache folder, which need not exist yet; None if caching is off, or impossible, which is logged."""
    choice = os.environ.get("CDC_CACHE", "").strip()
    if choice.lower() == "off":
        return None
    try:
        folder = Path(choice).expanduser() if choice else platformdirs.user_cache_path("cdc-plugin", appauthor=False)
        if not choice and not folder.is_absolute():
            raise RuntimeError("there is no home folder")
        existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            return folder
        reason = f"{existing} cannot be written"
    except (OSError, RuntimeError) as error:
        reason = str(error)
    _warn_once(f"no cache folder ({reason}); set CDC_CACHE to a folder that can be written")
    return None


def find_entry(kind: str, key: str) -> Path | None:
    """Return the path of an entry of one of the KINDS, whether it exists or not; None if there is no cache."""
    folder = find_cache_folder()
    return None if folder is None else folder / f"{kind}-{key}.npy"


def mark_used(path: Path) -> None:
    """Mark an entry as used just now, so that others are removed before it."""
    with contextlib.suppress(OSError):  # somebody else's, or gone
        os.utime(path)


def find_or_make(path: Path, find: Callable[[], T | None], make: Callable[[], T]) -> T:
    """Return the entry that ``find`` returns; where it is None, one process calls ``make`` and the others wait."""
    entry = find()
    if entry is None:
        with lock_entry(path):
            entry = find()  # another process may have made it meanwhile
            if entry is None:
                entry = make()
    mark_used(path)
    return entry


@contextlib.contextmanager
def lock_entry(path: Path) -> Iterator[None]:
    """Hold the lock of an entry while writing it; wait for the process that has it.

    Without a lock, on a disk too full for one, two processes do the same work twice and harm nothing.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("another process makes %s; waiting for it", path.name)
            lock.acquire()
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise _explain_disk_error(error, path) from error
        log.debug("no lock (%s)", error)
        yield
        return
    try:
        _remove_temporary_files(path)
        yield
    finally:
        _release(lock)


def make_room(path: Path, size: int) -> None:
    """Remove leftovers of killed processes, and the least recently used entries until one of ``size`` bytes fits.

    Raises:
        OutputError: it fits neither into what the cache may hold nor onto the disk, whatever is removed.
    """
    limit = _read_limit()
    if size > limit:
        raise OutputError(
            f"{path.name} takes {format_bytes(size)}, more than the cache {path.parent} may hold "
            f"({format_bytes(limit)}); "
            f"set CDC_CACHE_GB={math.ceil(size / 1024**3) + 1} if the disk has room, or choose a smaller input size"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise _explain_disk_error(error, path, size) from error
    entries, total = _list_entries(path.parent)
    entries.pop(path.stem, None)
    if size > free + sum(weight for _, weight, _ in entries.values()):
        raise _explain_no_room(path, size, free)  # before anything is removed in vain
    for _, weight, files in sorted(entries.values(), key=lambda entry: entry[0]):
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


def remove_leftovers(folder: Path) -> None:
    """Remove half-written files and locks of killed processes: nobody holds the lock of what they belong to."""
    leftovers = (file.name for file in folder.iterdir() if _is_ours(file.name) and not _is_entry(file.name))
    # From .NAME.npy.xxxxxxxx or NAME.lock to NAME.
    for name in {leftover.removeprefix(".").split(".")[0] for leftover in leftovers}:
        lock = FileLock(folder / f"{name}.lock")
        with contextlib.suppress(Timeout, OSError):  # in use, or somebody else's
            lock.acquire(timeout=0)
            _remove_temporary_files(folder / name)
            _release(lock)


def open_rows(path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any] | None:
    """Map the rows that `write_rows` wrote; None if they are absent, cut, or of another shape or type.

    The map is copy-on-write: torch takes it without a warning, and the file never changes.
    """
    try:
        rows = np.load(path, mmap_mode="c", allow_pickle=False)
        if (rows.shape, rows.dtype) == (shape, np.dtype(dtype)):
            return rows
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        log.debug("%s: %s", path, error)
    log.warning("%s is cut or holds something else; it is made again", path)
    return None


def protect(rows: NDArray[Any]) -> NDArray[Any]:
    """Return mapped rows that nobody will change, so that `copy_rows` may give their memory back."""
    rows.flags.writeable = False
    return rows


def copy_rows(rows: NDArray[Any], places: Any) -> NDArray[Any]:
    """Return a copy of some rows; memory of a map that cannot be changed is given back, and does not grow with it."""
    array, mapped = np.asarray(rows), getattr(rows, "_mmap", None)
    if mapped is None or rows.flags.writeable or not hasattr(mapped, "madvise"):
        return np.array(array[places])
    scattered = isinstance(places, np.ndarray) and places.dtype.kind in "iu"
    chosen = np.empty((len(places), *array.shape[1:]), array.dtype) if scattered else np.array(array[places])
    for start in range(0, len(places) if scattered else 0, SCATTERED):
        chosen[start : start + SCATTERED] = array[places[start : start + SCATTERED]]
        mapped.madvise(mmap.MADV_DONTNEED)
    mapped.madvise(mmap.MADV_DONTNEED)
    return chosen


def write_rows(path: Path, parts: Iterable[NDArray[Any]], shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Write parts of an array one after another to a .npy file, complete or not at all, and return it mapped.

    They are written, not put into a map: a full disk then raises an error, where a map would end the process. There may
    turn out to be fewer rows than in ``shape``.

    Raises:
        OutputError: the disk is full, or the folder cannot be written.
    """
    size = _count_bytes(shape, dtype)
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise _explain_no_room(path, size, free)
        with replace_atomically(path) as temporary, open(temporary, "wb", buffering=WRITE_BUFFER) as file:
            _write_header(file, shape, dtype)
            for part in parts:
                if part.shape[1:] != shape[1:]:
                    raise ValueError(f"expected rows of shape {shape[1:]}, found {part.shape[1:]}")
                file.write(np.ascontiguousarray(part, dtype).data)
                count += len(part)
            file.seek(0)
            _write_header(file, (count, *shape[1:]), dtype)
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except OSError as error:
        raise _explain_disk_error(error, path) from error


def write_private_rows(
    kind: str, parts: Iterable[NDArray[Any]], shape: tuple[int, ...], dtype: DTypeLike
) -> NDArray[Any] | None:
    """Write rows as `write_rows` does, to a file that nobody else finds and that goes with this process.

    It lies in the cache, else in a folder of the system. Where neither has room, nothing is written and None returned.
    """
    folder, size = _find_scratch_folder(), _count_bytes(shape, dtype)
    if folder is None:
        return None
    path = folder / f"{kind}-{uuid.uuid4().hex[:16]}.npy"
    if folder == find_cache_folder():
        make_room(path, size)
    elif shutil.disk_usage(folder).free < size:
        return None
    with lock_entry(path):
        rows = write_rows(path, parts, shape, dtype)
        with contextlib.suppress(OSError):  # Windows keeps it until the cache is full
            path.unlink()
    return rows


def format_bytes(size: int) -> str:
    """Return a number of bytes in a unit that suits it.

    >>> [format_bytes(size) for size in (0, 3000, 83 << 20, 3 << 29)]
    ['0 bytes', '3 KB', '83 MB', '1.5 GB']
    """
    for unit, scale in (("GB", 1024**3), ("MB", 1024**2), ("KB", 1024)):
        if size >= scale:
            return f"{size / scale:.{1 if unit == 'GB' else 0}f} {unit}"
    return f"{size} bytes"


def _find_scratch_folder() -> Path | None:
    """Return the cache, else a folder of this user among the temporary ones; None without both."""
    folder = find_cache_folder()
    try:
        if folder is None:
            user = os.getuid() if hasattr(os, "getuid") else 0
            folder = Path(tempfile.gettempdir()) / f"cdc-plugin-{user}"
            folder.mkdir(mode=0o700, exist_ok=True)
            if hasattr(os, "getuid") and folder.stat().st_uid != user:
                return None  # somebody else could change what is in it
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
    except OSError:
        return None
    return folder


def _explain_disk_error(error: OSError, path: Path, needed: int = 0) -> OutputError:
    if error.errno in DISK_FULL:
        return _explain_no_room(path, needed, 0)
    return OutputError(f"{path} cannot be written ({error.strerror or error}); name another cache folder by CDC_CACHE")


def _explain_no_room(path: Path, needed: int, free: int) -> OutputError:
    takes = f"{path.name} takes {format_bytes(needed)}" if needed else f"no space is left for {path.name}"
    return OutputError(
        f"{takes} in {path.parent}, and {format_bytes(free)} are free there; make room, name a cache folder on another "
        "disk by CDC_CACHE, or choose a smaller input size"
    )


@functools.cache
def _warn_once(text: str) -> None:
    log.warning(text)


def _read_limit() -> int:
    text = os.environ.get("CDC_CACHE_GB", "").strip() or "20"
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not (math.isfinite(size) and size >= 0):
        raise ConfigError(f"CDC_CACHE_GB is the size of the cache in gigabytes, 20 for example; found {text!r}")
    return int(size * 1024**3)


def _list_entries(folder: Path) -> tuple[dict[str, tuple[float, int, list[Path]]], int]:
    """Return last use, bytes and files of every entry, images with their notes, and the bytes of all files."""
    entries: dict[str, tuple[float, int, list[Path]]] = {}
    total = 0
    for file in folder.iterdir():
        if not _is_ours(file.name):
            continue
        try:
            state = file.stat()
        except OSError:
            continue
        total += state.st_size
        if _is_entry(file.name):
            last_use, weight, files = entries.get(file.stem, (0.0, 0, []))
            entries[file.stem] = (max(last_use, state.st_mtime), weight + state.st_size, [*files, file])
    return entries, total


def _is_ours(name: str) -> bool:
    # Nothing else is ever removed: the user may have named a folder with other files.
    return name.removeprefix(".").startswith(tuple(f"{kind}-" for kind in KINDS))


def _is_entry(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(".lock")


def _release(lock: FileLock) -> None:
    # Unlinked while it is held: who waits for it sees that its file is gone, and makes a new one.
    with contextlib.suppress(OSError):  # Windows keeps open files
        os.unlink(lock.lock_file)
    lock.release()


def _remove_temporary_files(path: Path) -> None:
    # The names that `replace_atomically` gives.
    for file in path.parent.glob(f".{path.stem}.*"):
        with contextlib.suppress(OSError):
            file.unlink()


def _count_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _write_header(file: Any, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    # NumPy leaves space in it, so that it is as long for any number of rows.
    header = {"descr": npy_format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    npy_format.write_array_header_1_0(file, header)
