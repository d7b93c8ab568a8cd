"""One folder of links a cluster, to look through with any file browser; images are never moved, copied or changed.

OUT/links.csv              every link and its row of the table
OUT/cluster 03/            links to its images
OUT/cluster 03/unsure/     those that were not selected, where the table says so
OUT/outliers/              those unlike anything the model was refined on, where the table says so
"""

from __future__ import annotations

import csv
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.writers.names import cluster_names

LINKS = "links.csv"
OUTLIERS, UNSURE = "outliers", "unsure"
# What a file system or an operating system answers that has no such links, or not to there.
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EXDEV, errno.EINVAL)


def check_folder(out: Path, overwrite: bool) -> None:
    """A new or empty folder, or with ``overwrite`` one that holds nothing but what an earlier export made."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"--out {out} is a file or a link; --to folders takes the path of a new folder")
    if out.suffix.lower() in (".csv", ".parquet", ".json", ".xml"):
        raise UserError(f"--to folders takes the path of a folder, such as --out {out.stem}; found {out.name}")
    if not out.is_dir():
        return
    if not overwrite and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give another --out, or --overwrite to replace an earlier export there")
    foreign = next(_foreign(out), None)
    if foreign is not None:
        raise UserError(
            f"{out} holds {foreign.relative_to(out)}, which no export made (or which was moved since); --overwrite "
            "replaces links of an earlier export only: give another --out"
        )


def check_links(out: Path, folder: Path) -> None:
    """Refuse a place that can hold no links to the images, and one among the images themselves."""
    from cdc_plugin.data.sources.folder import list_images

    target, images = Path(os.path.realpath(out)), Path(os.path.realpath(folder))
    if images in (target, *target.parents):
        raise UserError(
            f"{out} lies in the folder of the images, where links would be taken for more images; give another --out"
        )
    trial = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        _make_links(trial, ["trial/link"], list_images(images)[:1], images, target)
    finally:
        shutil.rmtree(trial)


def write(out: Path, table: np.recarray, folder: Path) -> list[Path]:
    """Make all links in a folder beside ``out`` and rename it, so that there is a whole export or none."""
    from cdc_plugin.evaluation.prediction_table import write_table

    check_folder(out, overwrite=True)  # once more: predicting takes a while, in which people put things there
    target, images = Path(os.path.realpath(out)), Path(os.path.realpath(folder))
    paths = table["path"].tolist()
    try:
        fresh = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            links = list(_unique(_places(table), paths))
            _make_links(fresh, links, paths, images, target)
            columns = table.dtype.names or ()
            listed = [np.array(links, dtype=object), *(table[column] for column in columns)]
            write_table(Path(fresh, LINKS), np.rec.fromarrays(listed, names=["link", *columns]))  # type: ignore[call-overload]
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(fresh, 0o777 & ~mask)  # mkdtemp makes private folders
            _put_in_place(fresh, target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}; give another --out") from error
    return [out / LINKS]


def _places(table: np.recarray) -> list[str]:
    """The folder of each row, relative to the export."""
    names = cluster_names(table)
    places = [names[cluster] for cluster in table["cluster"].tolist()]
    columns = table.dtype.names or ()
    if "selected" in columns:
        selected = table["selected"].tolist()
        places = [place if chosen else f"{place}/{UNSURE}" for place, chosen in zip(places, selected, strict=True)]
    if "outlier" in columns:
        outlier = table["outlier"].tolist()
        places = [OUTLIERS if far else place for place, far in zip(places, outlier, strict=True)]
    return places


def _unique(places: list[str], paths: list[str]) -> Iterator[str]:
    """A link's path a row: the name of the image, numbered where its folder has one of that name already."""
    taken: set[str] = set()
    counts: dict[str, int] = {}
    for place, path in zip(places, paths, strict=True):
        name = path.rsplit("/", 1)[-1]
        link = f"{place}/{name}"
        key = link.casefold()  # some file systems tell no case apart
        stem, suffix = os.path.splitext(name)
        while link.casefold() in taken:
            counts[key] = counts.get(key, 1) + 1
            link = f"{place}/{_shortened(stem, suffix, counts[key])}"
        taken.add(link.casefold())
        yield link


def _shortened(stem: str, suffix: str, number: int) -> str:
    """``stem (number)suffix`` within the 255 bytes that a name may have."""
    room = 255 - len(os.fsencode(f" ({number}){suffix}"))
    while len(os.fsencode(stem)) > room:
        stem = stem[:-1]
    return f"{stem} ({number}){suffix}"


def _make_links(root: str, links: list[str], paths: list[str], images: Path, target: Path) -> None:
    """Make the links below ``root``, which will be renamed to ``target`` beside it."""
    ways: dict[str, str] = {}
    for link, path in zip(links, paths, strict=True):
        place = link.rpartition("/")[0]
        if place not in ways:
            os.makedirs(os.path.join(root, place), exist_ok=True)
            ways[place] = _way(target / place, images)
        _link(os.path.join(ways[place], path), os.path.join(images, path), os.path.join(root, link))


def _way(start: Path, end: Path) -> str:
    """A relative path, so that images and export can be moved together."""
    try:
        return os.path.relpath(end, start)
    except ValueError:  # another drive
        return str(end)


def _link(pointer: str, image: str, link: str) -> None:
    """A symbolic link, or a hard link where there are none (Windows keeps them from ordinary users)."""
    try:
        os.symlink(pointer, link)
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        os.link(os.path.realpath(image), link)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise UserError(
            f"no links to {image} can be made there; give an --out on the disk that holds the images, or write a .csv"
        ) from error


def _put_in_place(fresh: str, target: Path) -> None:
    if not target.exists():
        os.rename(fresh, target)
        return
    aside = Path(f"{fresh}.old")
    os.rename(target, aside)
    try:
        os.rename(fresh, target)
    except OSError:
        os.rename(aside, target)
        raise
    _remove_export(aside)


def _foreign(out: Path) -> Iterator[Path]:
    """Everything that is not a link of the export that is listed there, and so may be somebody's only copy."""
    listed = _listed(out)
    for parent, folders, files in os.walk(out):
        for name in sorted([*files, *(each for each in folders if os.path.islink(os.path.join(parent, each)))]):
            file = Path(parent, name)
            inside = file.relative_to(out).as_posix()
            is_link = file.is_symlink() or file.stat().st_nlink > 1
            if not (inside in listed and (is_link or inside == LINKS)):
                yield file


def _listed(out: Path) -> set[str]:
    """What ``links.csv`` names, itself included; nothing where there is no such list."""
    try:
        with open(out / LINKS, encoding="utf-8", errors="surrogateescape", newline="") as file:
            rows = csv.reader(file)
            if next(rows, [""])[0] != "link":
                return set()
            return {LINKS, *(row[0] for row in rows)}
    except (OSError, csv.Error, IndexError):
        return set()


def _remove_export(folder: Path) -> None:
    """Remove links, their list and folders left empty; whatever else got in there stays."""
    foreign = set(_foreign(folder))
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            if Path(parent, name) not in foreign:
                os.unlink(os.path.join(parent, name))
        if not os.listdir(parent):
            os.rmdir(parent)
