"""Predictions in the formats of other tools: csv, parquet, folders of links, Label Studio, FiftyOne, CVAT.

``choose_format`` and ``check_source`` refuse what cannot be written before any image is read; ``write`` writes it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cdc_plugin.errors import ConfigError, OutputError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["FORMATS", "check_source", "choose_format", "explain_import", "write"]


@dataclass(frozen=True)
class Format:
    """Facts about a format."""

    suffixes: tuple[str, ...]  # of the file that ``--out`` names; none for a folder
    endings: tuple[str, ...] = ()  # of all files that are written, with the same stem
    needs_files: bool = True  # whether it points to image files, which arrays do not have


FORMATS = {
    "csv": Format((".csv",), (".csv",), needs_files=False),
    "parquet": Format((".parquet",), (".parquet",), needs_files=False),
    "folders": Format(()),
    "label-studio": Format((".json",), (".json", ".xml")),
    "fiftyone": Format((".json",), (".json",)),
    "cvat": Format((".xml", ".csv"), (".xml", ".csv", ".labels.json")),
}


def choose_format(to: str | None, out: Path, overwrite: bool) -> str:
    """Return the name of the format, from ``to`` or else from the suffix of ``out``; refuse what cannot be written."""
    name = _choose_by_suffix(out) if to is None else to
    if name not in FORMATS:
        raise ConfigError(f"--to takes one of {', '.join(FORMATS)}; found {name!r}")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise OutputError(f"there is no folder {parent} to write {out.name} to; create it, or give another --out")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"the folder {parent} is not writable; give another --out")
    if name == "folders":
        from cdc_plugin.evaluation.writers.folders import check_folder

        check_folder(out, overwrite)
    else:
        _check_files(name, out, overwrite)
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError('--to parquet needs pyarrow: pip install "cdc-plugin[parquet]", or write a .csv')
    return name


def check_source(to: str, source: str | Path, out: Path) -> None:
    """Refuse images that a format cannot point to: arrays, shards and named data sets have no image files."""
    if not FORMATS[to].needs_files:
        return
    from cdc_plugin.data.sources import has_files

    if not has_files(source):
        raise ConfigError(
            f"--to {to} points to image files and {source} has none; give a folder of images as --data, or write a .csv"
        )
    path = Path(os.path.expanduser(source))
    if to == "folders" and path.is_dir():
        from cdc_plugin.evaluation.writers.folders import check_links

        check_links(out, path)


def write(to: str, out: Path, tables: Iterable[np.recarray], source: str | Path) -> list[Path]:
    """Write a table that comes in parts, of which csv and parquet hold few at once, and return the files or links."""
    from cdc_plugin.evaluation.records import concatenate_tables, write_tables
    from cdc_plugin.evaluation.writers import cvat, files, folders

    if to == "csv":
        write_tables(out, tables)
        return [out]
    if to == "parquet":
        return files.write_parquet(out, tables)
    writers = {
        "folders": folders.write_folders,
        "label-studio": files.write_label_studio,
        "fiftyone": files.write_fiftyone,
        "cvat": cvat.write_cvat,
    }
    return writers[to](out, concatenate_tables(tables), _find_image_folder(source))


def explain_import(to: str, out: Path, source: str | Path) -> str | None:
    """Return one line on how to open the output in its tool; None where the file name says enough."""
    folder = _find_image_folder(source)
    hints = {
        "label-studio": (
            "start Label Studio with LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED=true and "
            f"LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT={folder.parent}, paste {out.stem}.xml as labelling interface, "
            f"add {folder} as local storage without syncing it, then import {out.name}"
        ),
        "fiftyone": (
            "open with fiftyone.Dataset.from_dir(dataset_type=fiftyone.types.FiftyOneImageClassificationDataset, "
            f"labels_path={str(out.absolute())!r})"
        ),
        "cvat": (
            f"create a CVAT task of the images with the labels of {out.stem}.labels.json (tab Raw), then upload "
            f"{out.stem}.xml to it as annotations, format CVAT 1.1; {out.stem}.csv is for other tools"
        ),
    }
    return hints.get(to)


def _find_image_folder(source: str | Path) -> Path:
    """Return the absolute folder that names in the table are relative to; for a single image its parent."""
    path = Path(os.path.expanduser(source))
    return Path(os.path.abspath(path if path.is_dir() else path.parent))


def _choose_by_suffix(out: Path) -> str:
    suffix = out.suffix.lower()
    if out.is_dir():
        raise OutputError(f"--out {out} is a folder; give a file such as {out / 'new.csv'}, or --to folders")
    if suffix in (".csv", ".parquet"):
        return suffix[1:]
    candidates = [name for name, format in FORMATS.items() if suffix in format.suffixes]
    if candidates:
        raise ConfigError(f"several tools read {suffix} files; add --to {' or --to '.join(candidates)}")
    raise ConfigError(f"--out takes a .csv or .parquet file, or give --to ({', '.join(FORMATS)}); found {out.name}")


def _check_files(name: str, out: Path, overwrite: bool) -> None:
    format = FORMATS[name]
    example = f"predictions{format.suffixes[0]}"
    if out.is_dir():
        raise OutputError(f"--out {out} is a folder; give the path of a file, such as {out / example}")
    if out.suffix.lower() not in format.suffixes:
        kinds = " or ".join(format.suffixes)
        raise OutputError(f"--to {name} writes a {kinds} file, such as --out {example}; found {out.name}")
    for file in (out, *(out.with_suffix(ending) for ending in format.endings)):
        if file.is_dir():
            raise OutputError(f"{file} is a folder and would be replaced by a file; give another --out")
        if file.exists() and not overwrite:
            raise OutputError(f"{file} already exists; give another --out, or --overwrite to replace it")
