"""Tar shards, as webdataset writes them: images are read at their place in the archive, and nothing is unpacked."""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.data.cache import compute_digest, find_entry, lock_entry, make_room, mark_used
from cdc_plugin.data.decode import UnreadableImageError, decode_bytes
from cdc_plugin.data.sources.base import (
    LOG_INTERVAL,
    UNLABELLED,
    WORKERS,
    ImageSource,
    is_image_name,
    number_classes,
    read_state,
)
from cdc_plugin.errors import DataError, OutputError

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
LABEL_KEYS = ("label", "class", "cls")
LARGEST_NOTE = 1 << 20  # bytes of a .json that are read for a label
BLOCK = 512  # bytes; the end of an archive is at least one of zeros
KEPT_FROM = (
    10_000  # images; the list of so many is kept in the cache, as to read it off the shards takes a minute per million
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Members:
    """Images in shards, and one entry for each shard that is damaged.

    Args:
        names: N, of images and then of damaged shards.
        places: (N, 3) int64 shard, offset and size of each image; -1, -1, -1 for a damaged shard.
        labels: one per image, or none at all.
        damage: what is wrong, one text per damaged shard.
    """

    names: list[str]
    places: NDArray[np.int64]
    labels: list[str]
    damage: list[str]


def describe_shards(source: str, side: int) -> ImageSource:
    """Return a source of the images in tar files, in their order there.

    Labels are known where every image has a .cls or .json with one. A damaged shard gives what is before the damage,
    and counts as one more image, which cannot be read: so it is named where such images are.

    Args:
        source: a path, a pattern, a range, or a folder of nothing but shards.
    """
    shards = find_shards(source)
    members = _list_members(shards)
    count = len(members.names) - len(members.damage)
    if not count:
        reason = f"; {members.names[0]} {members.damage[0]}" if members.damage else ""
        raise DataError(f"no images in the {len(shards)} shards of {source}; expected .jpg, .png, ... members{reason}")
    paths, places = [os.fspath(shard) for shard in shards], members.places

    def read(index: int) -> Image.Image:
        if index >= count:
            raise UnreadableImageError(members.damage[index - count])
        shard, offset, size = places[index].tolist()
        try:
            with open(paths[shard], "rb") as file:  # opened for each: there may be more shards than open files
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise UnreadableImageError(f"{type(error).__name__}: {error.strerror}") from error
        if len(content) < size:
            raise UnreadableImageError("the shard ends within it")
        return decode_bytes(content, side)

    labels, class_names = _number_labels(members.labels)
    if labels is not None:
        labels = np.append(labels, np.full(len(members.damage), UNLABELLED))
    return ImageSource(
        content=read,
        names=members.names,
        labels=labels,
        class_names=class_names,
        digest=compute_digest(
            f"{name} {read_state(path)}" for name, path in zip(_name_shards(shards), paths, strict=True)
        ),
        description=source,
        workers=WORKERS,
    )


def find_shards(source: str) -> list[Path]:
    """Return the shards that a path, a pattern, a range such as ``part-{000..009}.tar`` or a folder names."""
    text = os.path.expanduser(source)
    if os.path.isdir(text):
        names = (name for name in os.listdir(text) if name.lower().endswith(".tar") and not name.startswith("."))
        return [Path(text) / name for name in sorted(names)]
    if text.lower().endswith(COMPRESSED):
        raise DataError(_explain_compressed(source))
    paths = [place for pattern in _expand_ranges(text) for place in _find_matches(pattern)]
    missing = next((path for path in paths if not os.path.isfile(path)), None)
    if missing is not None or not paths:
        raise DataError(f"no shard at {missing or source}; expected tar files such as 'shards/*.tar'; check the path")
    return [Path(path) for path in paths]


def _expand_ranges(text: str) -> Iterator[str]:
    """Yield ``a-{008..010}.tar`` as a-008.tar, a-009.tar, a-010.tar."""
    match = RANGE.search(text)
    if match is None:
        yield text
        return
    first, last = match.groups()
    for number in range(int(first), int(last) + 1):
        yield from _expand_ranges(f"{text[: match.start()]}{number:0{len(first)}d}{text[match.end() :]}")


def _find_matches(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern)) if glob.has_magic(pattern) and not os.path.exists(pattern) else [pattern]


def _name_shards(shards: list[Path]) -> list[str]:
    """Return what the shards are called in names of images: short, but each in its own way."""
    stems = [shard.stem for shard in shards]
    return stems if len(set(stems)) == len(stems) else [shard.with_suffix("").as_posix() for shard in shards]


def _list_members(shards: list[Path]) -> Members:
    """Return all images of the shards; from the cache if no shard has changed since they were listed."""
    states = np.array([read_state(shard) for shard in shards], dtype=np.int64)
    index = find_entry("index", compute_digest(["tar 3", *(os.path.realpath(shard) for shard in shards)]), "npz")
    members = None if index is None else _load_index(index, states)
    if members is None:
        members = _read_members(shards)
        if index is not None and len(members.names) >= KEPT_FROM:
            _save_index(index, members, states)
    return members


def _read_members(shards: list[Path]) -> Members:
    places: dict[str, tuple[int, int, int]] = {}
    notes: dict[str, str] = {}
    damage: dict[str, str] = {}
    next_log = time.monotonic() + LOG_INTERVAL
    for number, (shard, title) in enumerate(zip(shards, _name_shards(shards), strict=True)):
        if time.monotonic() > next_log:
            log.info("listing shards: %d of %d, %s images so far", number, len(shards), f"{len(places):,}")
            next_log = time.monotonic() + LOG_INTERVAL
        problem = _list_shard(shard, title, number, places, notes)
        if problem is not None:
            damage[f"{title}.tar"] = problem
    labels = [notes[_find_key(name)] for name in places if _find_key(name) in notes]
    if 0 < len(labels) < len(places):
        log.info("labels are not used: %d of %d images have none", len(places) - len(labels), len(places))
    rows = np.array([*places.values(), *[(-1, -1, -1)] * len(damage)], dtype=np.int64).reshape(-1, 3)
    return Members([*places, *damage], rows, labels if len(labels) == len(places) else [], list(damage.values()))


def _load_index(path: Path, states: NDArray[np.int64]) -> Members | None:
    """Return what `_save_index` kept; None if there is nothing, or a shard has changed since."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            if not np.array_equal(arrays["states"], states):
                return None
            texts = json.loads(arrays["texts"].tobytes())
            members = Members(texts["names"], arrays["places"], texts["labels"], texts["damage"])
    except Exception:  # a damaged archive makes NumPy and zipfile raise many kinds of error; it is made again
        return None
    mark_used(path)
    return members


def _save_index(path: Path, members: Members, states: NDArray[np.int64]) -> None:
    text = json.dumps({"names": members.names, "labels": members.labels, "damage": members.damage}).encode()

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            np.savez(file, texts=np.frombuffer(text, np.uint8), places=members.places, states=states)

    try:
        make_room(path, len(text) + members.places.nbytes)
        with lock_entry(path):
            write_atomically(path, write)
    except OutputError as error:
        log.debug("%s is not kept: %s", path, error)  # one can do without


def _list_shard(
    shard: Path, title: str, number: int, places: dict[str, tuple[int, int, int]], notes: dict[str, str]
) -> str | None:
    """Add the images of a shard, and the labels that its notes hold; links and the like are passed over.

    Returns:
        What is wrong with the shard; None for a complete one.
    """
    before = len(places)
    try:
        # "r:" is without compression, so that a place in the archive is a place in the file.
        with tarfile.open(shard, "r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else the archive remembers them all
                base = member.name.rsplit("/", 1)[-1]
                if not member.isreg() or member.sparse is not None or base.startswith("."):
                    continue
                name = f"{title}/{member.name.removeprefix('./')}"
                if is_image_name(base):
                    places[name] = (number, member.offset_data, member.size)
                elif base.endswith((".cls", ".json")) and member.size <= LARGEST_NOTE:
                    label = _read_label(archive.extractfile(member), base)
                    if label is not None:
                        notes[_find_key(name)] = label
            problem = _check_end(shard, archive.offset)
    except (tarfile.ReadError, OSError) as error:
        if _is_compressed(shard):
            raise DataError(_explain_compressed(shard)) from error
        problem = str(error)
    if problem is None:
        return None
    count = len(places) - before
    if not count:
        return f"is no tar file ({problem})"
    return f"is cut or damaged ({problem}); only what is before that is used, {count} images"


def _check_end(shard: Path, place: int) -> str | None:
    """Return what is wrong with the end of an archive: `tarfile` takes a damaged header for the end without a word."""
    with open(shard, "rb") as file:
        file.seek(place)
        end = file.read(BLOCK)
    if len(end) < BLOCK:
        return "it ends early"
    return None if not any(end) else f"no header at byte {place}"


def _explain_compressed(shard: str | Path) -> str:
    return f"{shard} is compressed, so images in it cannot be found by their place; gunzip it to .tar"


def _is_compressed(shard: Path) -> bool:
    try:
        with open(shard, "rb") as file:
            return file.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))
    except OSError:
        return False


def _find_key(name: str) -> str:
    """Return what the files of one sample have in common: all up to the first dot of the file's own name."""
    above, slash, base = name.rpartition("/")
    return above + slash + base.split(".", 1)[0]


def _read_label(content: IO[bytes] | None, base: str) -> str | None:
    if content is None:
        return None
    try:
        text = content.read().decode("utf-8").strip()
        value: Any = text
        if base.endswith(".json"):
            facts = json.loads(text)
            value = next((facts[key] for key in LABEL_KEYS if key in facts), None) if isinstance(facts, dict) else None
    except ValueError:
        return None
    usable = isinstance(value, str | int) and not isinstance(value, bool) and "\0" not in str(value)
    return str(value) if usable and str(value) else None


def _number_labels(labels: list[str]) -> tuple[NDArray[np.int64] | None, list[str] | None]:
    """Return integers as they are, words by the number of their class; for reporting only."""
    if not labels:
        return None, None
    if all(re.fullmatch(r"-?\d{1,18}", label) for label in labels):
        return np.array([int(label) for label in labels], dtype=np.int64), None
    return number_classes(labels)
