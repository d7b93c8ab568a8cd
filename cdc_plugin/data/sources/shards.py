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

from cdc_plugin.data.cache import entry, load_arrays, save_arrays, used
from cdc_plugin.data.decode import decode_bytes
from cdc_plugin.data.sources.base import ImageSource, UnreadableImageError, digest_of, labels_by_class
from cdc_plugin.data.sources.folder import WORKERS
from cdc_plugin.data.sources.folder_index import KEPT_FROM, is_image_name, pack_names, state_of, unpack_names
from cdc_plugin.data.sources.objects import UNLABELLED
from cdc_plugin.errors import UserError

PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
LABEL_KEYS = ("label", "class", "cls")
LARGEST_NOTE = 1 << 20  # bytes of a .json that are read for a label
BLOCK = 512  # bytes; the end of an archive is at least one of zeros
TELL = 10.0  # seconds after which a listing says how far it is

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Members:
    """Images in shards, and what is left of the images of shards that are damaged.

    Args:
        names: N, of images and then of damaged shards.
        places: (N, 3) int64 shard, offset and size of each image; -1, -1, -1 for a damaged shard.
        labels: one an image, or none at all.
        damage: what is wrong, one text a damaged shard.
    """

    names: list[str]
    places: NDArray[np.int64]
    labels: list[str]
    damage: list[str]


def shard_files(source: str) -> list[Path] | None:
    """The shards that a path, a pattern, a range or a folder of nothing else names; None for any other path."""
    text = os.path.expanduser(source)
    if text.lower().endswith(PACKED) and (os.path.isfile(text) or RANGE.search(text) or "*" in text):
        raise UserError(_compressed(source))
    if os.path.isdir(text):
        with os.scandir(text) as found:
            items = [item for item in found if not item.name.startswith(".")]
        tars = sorted(item.path for item in items if item.name.lower().endswith(".tar"))
        alone = not any(item.is_dir() or is_image_name(item.name) for item in items)
        return [Path(path) for path in tars] if tars and alone else None
    if not text.lower().endswith(".tar"):
        return None
    paths = [place for pattern in _expanded(text) for place in _matching(pattern)]
    missing = next((path for path in paths if not os.path.isfile(path)), None)
    if missing is not None or not paths:
        raise UserError(f"no shard at {missing or source}; expected tar files such as 'shards/*.tar'; check the path")
    return [Path(path) for path in paths]


def shards_source(shards: list[Path], side: int, description: str) -> ImageSource:
    """The images in tar files, in their order there; labels where every image has a .cls or .json with one.

    A shard that is damaged gives what is before the damage, and counts as one more image, which can not be read: so it
    is named where such images are.
    """
    members = _members(shards)
    images = len(members.names) - len(members.damage)
    if not images:
        reason = f"; {members.names[0]} {members.damage[0]}" if members.damage else ""
        raise UserError(
            f"no images in the {len(shards)} shards of {description}; expected .jpg, .png, ... members{reason}"
        )
    paths, places = [os.fspath(shard) for shard in shards], members.places

    def read(index: int) -> Image.Image:
        if index >= images:
            raise UnreadableImageError(members.damage[index - images])
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

    labels, class_names = _numbered(members.labels)
    if labels is not None:
        labels = np.append(labels, np.full(len(members.damage), UNLABELLED))
    return ImageSource(
        content=read,
        names=members.names,
        labels=labels,
        class_names=class_names,
        digest=digest_of(f"{name} {state_of(path)}" for name, path in zip(_titles(shards), paths, strict=True)),
        description=description,
        workers=WORKERS,
    )


def _expanded(text: str) -> Iterator[str]:
    """``a-{008..010}.tar`` as a-008.tar, a-009.tar, a-010.tar."""
    match = RANGE.search(text)
    if match is None:
        yield text
        return
    first, last = match.groups()
    for number in range(int(first), int(last) + 1):
        yield from _expanded(f"{text[: match.start()]}{number:0{len(first)}d}{text[match.end() :]}")


def _matching(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern)) if glob.has_magic(pattern) and not os.path.exists(pattern) else [pattern]


def _titles(shards: list[Path]) -> list[str]:
    """What the shards are called in names of images: short, but each in its own way."""
    stems = [shard.stem for shard in shards]
    return stems if len(set(stems)) == len(stems) else [shard.with_suffix("").as_posix() for shard in shards]


def _members(shards: list[Path]) -> Members:
    """All images of the shards; from the cache if no shard has changed since they were listed."""
    titles, states = _titles(shards), np.array([state_of(shard) for shard in shards], dtype=np.int64)
    kept = entry("index", digest_of(["tar 2", *(os.path.realpath(shard) for shard in shards)]), "npz")
    arrays = None if kept is None or not kept.is_file() else load_arrays(kept)
    if kept is not None and arrays is not None and np.array_equal(arrays.get("states", ()), states):
        used(kept)
        names, labels, told = (unpack_names(arrays[name]) for name in ("names", "labels", "damage"))
        return Members(names, arrays["places"], labels, told)
    found: dict[str, tuple[int, int, int]] = {}
    notes: dict[str, str] = {}
    damage: dict[str, str] = {}
    tell = time.monotonic() + TELL
    for number, (shard, title) in enumerate(zip(shards, titles, strict=True)):
        if time.monotonic() > tell:
            log.info("listing shards: %d of %d, %s images so far", number, len(shards), f"{len(found):,}")
            tell = time.monotonic() + TELL
        wrong = _list_shard(shard, title, number, found, notes)
        if wrong is not None:
            damage[f"{title}.tar"] = wrong
    said = [notes.get(_key(name)) for name in found]
    whole = [label for label in said if label is not None]
    if 0 < len(whole) < len(said):
        log.info("labels are not used: %d of %d images have none", len(said) - len(whole), len(said))
    places = np.array([*found.values(), *[(-1, -1, -1)] * len(damage)], dtype=np.int64).reshape(-1, 3)
    labels = whole if len(whole) == len(said) else []
    members = Members([*found, *damage], places, labels, list(damage.values()))
    if kept is not None and len(found) >= KEPT_FROM:
        texts = {"names": members.names, "labels": members.labels, "damage": members.damage}
        packed = {name: pack_names(values) for name, values in texts.items()}
        save_arrays(kept, {**packed, "places": places, "states": states})
    return members


def _list_shard(
    shard: Path, title: str, number: int, found: dict[str, tuple[int, int, int]], notes: dict[str, str]
) -> str | None:
    """Add the images of a shard, and the labels that its notes hold; links and the like are passed over.

    Returns:
        What is wrong with the shard; None for a whole one.
    """
    before = len(found)
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
                    found[name] = (number, member.offset_data, member.size)
                elif base.endswith((".cls", ".json")) and member.size <= LARGEST_NOTE:
                    label = _label(archive.extractfile(member), base)
                    if label is not None:
                        notes[_key(name)] = label
            wrong = _at_end(shard, archive.offset)
    except (tarfile.ReadError, OSError) as error:
        if _is_compressed(shard):
            raise UserError(_compressed(shard)) from error
        wrong = str(error)
    if wrong is None:
        return None
    count = len(found) - before
    if not count:
        return f"is no tar file ({wrong})"
    return f"is cut or damaged ({wrong}); only what is before that is used, {count} images"


def _at_end(shard: Path, place: int) -> str | None:
    """What is wrong with the end of an archive: `tarfile` takes a damaged header for the end without a word."""
    with open(shard, "rb") as file:
        file.seek(place)
        end = file.read(BLOCK)
    if len(end) < BLOCK:
        return "it ends early"
    return None if not any(end) else f"no header at byte {place}"


def _compressed(shard: str | Path) -> str:
    return f"{shard} is compressed, so images in it can not be found by their place; gunzip it to .tar"


def _is_compressed(shard: Path) -> bool:
    try:
        with open(shard, "rb") as file:
            return file.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))
    except OSError:
        return False


def _key(name: str) -> str:
    """What the files of one sample have in common: all up to the first dot of the file's own name."""
    above, slash, base = name.rpartition("/")
    return above + slash + base.split(".", 1)[0]


def _label(content: IO[bytes] | None, base: str) -> str | None:
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


def _numbered(labels: list[str]) -> tuple[NDArray[np.int64] | None, list[str] | None]:
    """Whole numbers as they are, words by their class; for reporting only."""
    if not labels:
        return None, None
    if all(re.fullmatch(r"-?\d{1,18}", label) for label in labels):
        return np.array([int(label) for label in labels], dtype=np.int64), None
    return labels_by_class(labels)
