"""Describe tar shards, as webdataset writes them: images are read at their place there, and nothing is unpacked."""

import glob
import json
import logging
import os
import re
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.atomic import has_content
from cdc_plugin.data.cache import compute_digest
from cdc_plugin.data.decode import UnreadableImageError, decode_bytes
from cdc_plugin.data.sources.base import (
    LOG_INTERVAL,
    UNLABELLED,
    WORKERS,
    ImageSource,
    explain_left_aside,
    find_extension,
    is_image_name,
    number_classes,
    read_state,
)
from cdc_plugin.errors import DataError

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
RANGE = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")
MOST_SHARDS = 100_000
LABEL_KEYS = ("label", "class", "cls")
LARGEST_MEMBER = 1 << 62
LARGEST_NOTE = 1 << 20  # bytes of a .json that are read for a label
BLOCK = 512  # bytes; the end of an archive is at least one of zeros
COMPRESSED_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd

log = logging.getLogger(__name__)

Place = tuple[int, int, int]  # shard, offset and size of an image
# The places of images by name, labels by key of the sample, and how many other files there are by extension.
Found = tuple[dict[str, Place], dict[str, str], Counter[str]]


def describe_shards(source: str, side: int, labels: bool = True) -> ImageSource:
    """Return a source of the images in tar files, in their order there.

    Labels are known where every image has a .cls or .json with one. A damaged shard gives what is before the damage,
    and counts as one more image, which cannot be read: so it is named where such images are.
    """
    shards = find_shards(source)
    titles = [shard.stem for shard in shards]  # in names of images: short, but each in its own way
    if len(set(titles)) < len(titles):
        titles = [shard.with_suffix("").as_posix() for shard in shards]
    (places, notes, others), damage = _list_members(shards, titles)
    if not places:
        reason = "".join(f"; {shard} {problem}" for shard, problem in list(damage.items())[:1])
        reason += f"; {left}" if (left := explain_left_aside(others)[1]) else ""
        raise DataError(f"no images in the {len(shards)} shards of {source}; expected .jpg, .png, ... members{reason}")
    rows, problems = np.array(list(places.values()), dtype=np.int64), list(damage.values())

    def read(index: int) -> Image.Image:
        if index >= len(rows):
            raise UnreadableImageError(problems[index - len(rows)])
        shard, offset, size = rows[index].tolist()
        try:
            with open(shards[shard], "rb") as file:  # opened for each: there may be more shards than open files
                file.seek(offset)
                content = file.read(min(size, os.fstat(file.fileno()).st_size))  # a header may state any size
        except OSError as error:
            raise UnreadableImageError(f"{type(error).__name__}: {error.strerror}") from error
        if len(content) < size:
            raise UnreadableImageError("the shard ends within it")
        return decode_bytes(content, side)

    known, class_names = _number_labels(list(places), notes) if labels else (None, None)
    if known is not None:
        known = np.append(known, np.full(len(damage), UNLABELLED))
    return ImageSource(
        content=read,
        names=[*places, *damage],
        labels=known,
        class_names=class_names,
        digest=compute_digest(f"{title} {read_state(shard)}" for title, shard in zip(titles, shards, strict=True)),
        description=source,
        workers=WORKERS,
        left_aside=others,
    )


def find_shards(source: str) -> list[Path]:
    """Return the shards that a path, a pattern, a range such as ``part-{000..009}.tar`` or a folder names."""
    text = os.path.expanduser(source)
    if os.path.isdir(text):
        names = (name for name in os.listdir(text) if name.lower().endswith(".tar") and not name.startswith("."))
        return [Path(text) / name for name in sorted(names)]
    if text.lower().endswith(COMPRESSED):
        raise DataError(_explain_compressed(source))
    count = prod(max(0, int(last) - int(first) + 1) for first, last in RANGE.findall(text))
    if count > MOST_SHARDS:
        raise DataError(
            f"{source} names more than {MOST_SHARDS:,} shards; expected a range such as part-{{000..009}}.tar"
        )
    paths: list[str] = []
    for pattern in _expand_ranges(text):
        is_pattern = glob.has_magic(pattern) and not os.path.exists(pattern)
        paths += sorted(glob.glob(pattern)) if is_pattern else [pattern]
    missing = next((path for path in paths if not has_content(path)), None)
    if missing is not None or not paths:
        raise DataError(
            f"no shard with content at {missing or source}; expected tar files such as 'shards/*.tar'; check the path"
        )
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


def _list_members(shards: list[Path], titles: list[str]) -> tuple[Found, dict[str, str]]:
    """Return what is in all shards, and what is wrong by damaged shard."""
    found: Found = ({}, {}, Counter())
    damage: dict[str, str] = {}
    next_log = time.monotonic() + LOG_INTERVAL
    for number, (shard, title) in enumerate(zip(shards, titles, strict=True)):
        if time.monotonic() > next_log:
            log.info("listing shards: %d of %d, %s images so far", number, len(shards), f"{len(found[0]):,}")
            next_log = time.monotonic() + LOG_INTERVAL
        problem = _list_shard(shard, title, number, found)
        if problem is not None:
            damage[f"{title}.tar"] = problem
    return found, damage


def _list_shard(shard: Path, title: str, number: int, found: Found) -> str | None:
    """Add what is in a shard, without links and the like; return what is wrong."""
    if not has_content(shard):  # a pipe would never end
        return "is no tar file (it is empty, or not a regular file)"
    places, notes, others = found
    before = len(places)
    try:
        # "r:" is without compression, so that a place in the archive is a place in the file.
        with tarfile.open(shard, "r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else the archive remembers them all
                if not 0 <= member.size < LARGEST_MEMBER:  # below 0 it would lead back, without end
                    raise ValueError(f"a header states a size of {member.size} bytes")
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
                else:
                    others[find_extension(base)] += 1
            problem = _check_end(shard, archive.offset)
    except Exception as error:  # damage makes tarfile raise nearly every kind, MemoryError for a name of a terabyte
        if _is_compressed(shard):
            raise DataError(_explain_compressed(shard)) from error
        problem = str(error) or "a header states more than memory holds"
    if problem is None:
        return None
    count = len(places) - before
    damaged = f"is cut or damaged ({problem}); only what is before that is used, {count} images"
    return damaged if count else f"is no tar file ({problem})"


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
            return file.read(6).startswith(COMPRESSED_MAGIC)
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
    except (ValueError, RecursionError):
        return None
    usable = isinstance(value, str | int) and not isinstance(value, bool) and "\0" not in str(value)
    return str(value) if usable and str(value) else None


def _number_labels(names: list[str], notes: dict[str, str]) -> tuple[NDArray[np.int64] | None, list[str] | None]:
    """Return integers as they are, words by the number of their class; None unless every image has a label."""
    labels = [notes[key] for key in map(_find_key, names) if key in notes]
    if len(labels) < len(names):
        if labels:
            log.info("labels are not used: %d of %d images have none", len(names) - len(labels), len(names))
        return None, None
    if all(re.fullmatch(r"-?\d{1,18}", label) for label in labels):
        return np.array([int(label) for label in labels], dtype=np.int64), None
    return number_classes(labels)
