"""One folder of links per cluster, for any file browser; images are never moved, copied or changed.

OUT/links.csv              every link with its row of the table
OUT/cluster 03/            links to its images
OUT/cluster 03/unsure/     those not selected, if the table has that column
OUT/outliers/              those unlike the images of the run, if the table has that column
OUT/new kind 00/           those of a new kind, outliers or not, if the table has that column
"""

import csv
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cdc_plugin.data.atomic import has_content, unescape_cell
from cdc_plugin.errors import OutputError
from cdc_plugin.evaluation.writers.files import name_clusters

LINKS = "links.csv"
OUTLIERS, UNSURE, NEW_KIND = "outliers", "unsure", "new kind {:02d}"
# Errors of a file system or an operating system that does not support such a link.
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EXDEV, errno.EINVAL)


def check_folder(out: Path, overwrite: bool) -> None:
    """Refuse anything but a new or empty folder, or with ``overwrite`` one that holds only an earlier export."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputError(f"--out {out} is a file or a link; --to folders takes the path of a new folder")
    if out.suffix.lower() in (".csv", ".parquet", ".json", ".xml"):
        raise OutputError(f"--to folders takes the path of a folder, such as --out {out.stem}; found {out.name}")
    if not out.is_dir():
        return
    if Path.cwd().is_relative_to(os.path.realpath(out)):
        raise OutputError(f"{out} is or holds the current folder, which would be replaced; give another --out")
    if not overwrite and any(out.iterdir()):
        raise OutputError(f"{out} is not empty; give another --out, or --overwrite to replace an earlier export there")
    foreign = next(_find_foreign(out), None)
    if foreign is not None:
        raise OutputError(
            f"{out} holds {foreign.relative_to(out)}, which no export made (or which was moved since); --overwrite "
            "replaces only links of an earlier export: give another --out"
        )


def check_links(out: Path, folder: Path) -> None:
    """Refuse an output that cannot hold links to the images, or that lies among the images themselves."""
    from cdc_plugin.data.sources.folder import list_images

    target, images = Path(os.path.realpath(out)), Path(os.path.realpath(folder))
    if images in (target, *target.parents):
        raise OutputError(
            f"{out} lies in the folder of the images, where links would count as more images; give another --out"
        )
    trial = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        _create_links(trial, ["trial/link"], list_images(images)[:1], images, target)
    finally:
        shutil.rmtree(trial)


def write_folders(out: Path, table: np.recarray, folder: Path) -> list[Path]:
    """Create all links in a folder beside ``out`` and rename it, so that the export is complete or absent."""
    from cdc_plugin.evaluation.records import write_tables

    check_folder(out, overwrite=True)  # again: people may have put files there during the prediction
    target, images = Path(os.path.realpath(out)), Path(os.path.realpath(folder))
    paths = table["path"].tolist()
    try:
        fresh = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            links = list(_choose_links(_choose_folders(table), paths))
            _create_links(fresh, links, paths, images, target)
            columns = table.dtype.names or ()
            listed = [np.array(links, dtype=object), *(table[column] for column in columns)]
            content = np.rec.fromarrays(listed, names=["link", *columns])  # type: ignore[call-overload]
            write_tables(Path(fresh, LINKS), [content])
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(fresh, 0o777 & ~mask)  # mkdtemp makes private folders
            _put_in_place(fresh, target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror or error}; give another --out") from error
    return [out / LINKS]


def _choose_folders(table: np.recarray) -> list[str]:
    """Return the folder of each row, relative to the export."""
    names, columns = name_clusters(table), table.dtype.names or ()
    folders = np.array([names[cluster] for cluster in table["cluster"].tolist()], dtype=object)
    if "selected" in columns:
        folders[~table["selected"]] += f"/{UNSURE}"
    if "outlier" in columns:
        folders[table["outlier"]] = OUTLIERS
    if "new_kind" in columns:
        new = table["new_kind"] >= 0
        folders[new] = [NEW_KIND.format(kind) for kind in table["new_kind"][new].tolist()]
    return folders.tolist()


def _choose_links(folders: list[str], paths: list[str]) -> Iterator[str]:
    """Yield a link per row: the name of the image, numbered where its folder already has that name."""
    taken: set[str] = set()
    counts: dict[str, int] = {}
    for folder, path in zip(folders, paths, strict=True):
        name = path.rsplit("/", 1)[-1]
        link = f"{folder}/{name}"
        key = link.casefold()  # some file systems ignore case
        stem, suffix = os.path.splitext(name)
        while link.casefold() in taken:
            counts[key] = counts.get(key, 1) + 1
            link = f"{folder}/{_number_name(stem, suffix, counts[key])}"
        taken.add(link.casefold())
        yield link


def _number_name(stem: str, suffix: str, number: int) -> str:
    """Return ``stem (number)suffix``, shortened to the 255 bytes that a name may have."""
    room = 255 - len(os.fsencode(f" ({number}){suffix}"))
    while len(os.fsencode(stem)) > room:
        stem = stem[:-1]
    return f"{stem} ({number}){suffix}"


def _create_links(root: str, links: list[str], paths: list[str], images: Path, target: Path) -> None:
    """Create the links below ``root``, which will be renamed to ``target`` beside it."""
    routes: dict[str, str] = {}
    for link, path in zip(links, paths, strict=True):
        folder = link.rpartition("/")[0]
        if folder not in routes:
            os.makedirs(os.path.join(root, folder), exist_ok=True)
            try:  # relative, so that images and export can be moved together
                routes[folder] = os.path.relpath(images, target / folder)
            except ValueError:  # another drive
                routes[folder] = str(images)
        _create_link(os.path.join(routes[folder], path), os.path.join(images, path), os.path.join(root, link))


def _create_link(pointer: str, image: str, link: str) -> None:
    """Create a symbolic link, or a hard link where that fails (Windows denies them to ordinary users)."""
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
        raise OutputError(
            f"cannot create a link to {image}; give an --out on the disk that holds the images, or write a .csv"
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


def _find_foreign(out: Path) -> Iterator[Path]:
    """Yield everything that is not a listed link of the export, and so may be somebody's only copy."""
    listed = _read_listed(out)
    for parent, folders, files in os.walk(out):
        for name in sorted([*files, *(folder for folder in folders if os.path.islink(os.path.join(parent, folder)))]):
            file = Path(parent, name)
            inside = file.relative_to(out).as_posix()
            is_link = file.is_symlink() or file.stat().st_nlink > 1
            if not (inside in listed and (is_link or inside == LINKS)):
                yield file


def _read_listed(out: Path) -> set[str]:
    """Return what ``links.csv`` lists, itself included; nothing where there is no such list."""
    if not has_content(out / LINKS):  # a pipe would never end
        return set()
    try:
        with open(out / LINKS, encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            if next(rows, [""])[0] != "link":
                return set()
            return {LINKS, *(unescape_cell(row[0]) for row in rows)}
    except (OSError, ValueError, csv.Error, IndexError):
        return set()


def _remove_export(folder: Path) -> None:
    """Remove links, their list and empty folders; anything else stays."""
    foreign = set(_find_foreign(folder))
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            if Path(parent, name) not in foreign:
                os.unlink(os.path.join(parent, name))
        if not os.listdir(parent):
            os.rmdir(parent)
