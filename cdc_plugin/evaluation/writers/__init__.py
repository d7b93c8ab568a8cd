"""Predictions in the formats of other tools: csv, parquet, folders of links, Label Studio, FiftyOne, CVAT.

``check`` and ``check_source`` refuse what can not be written before any image is read; ``write`` writes it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cdc_plugin.errors import UserError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["FORMATS", "advice", "check", "check_source", "write", "write_parts"]


@dataclass(frozen=True)
class Format:
    """What is known of a format before it is written.

    Args:
        suffixes: of the file that ``--out`` names; none for a folder. Other files get the same stem.
        endings: of all files that are written.
        of_files: whether it points to image files, so that arrays will not do.
    """

    suffixes: tuple[str, ...]
    endings: tuple[str, ...] = ()
    of_files: bool = True


FORMATS = {
    "csv": Format((".csv",), (".csv",), of_files=False),
    "parquet": Format((".parquet",), (".parquet",), of_files=False),
    "folders": Format(()),
    "label-studio": Format((".json",), (".json", ".xml")),
    "fiftyone": Format((".json",), (".json",)),
    "cvat": Format((".xml", ".csv"), (".xml", ".csv", ".labels.json")),
}


def check(to: str | None, out: Path, overwrite: bool) -> str:
    """The name of the format, from ``to`` or else from the name of ``out``, which is found fit to be written."""
    name = _by_suffix(out) if to is None else to
    if name not in FORMATS:
        raise UserError(f"--to takes one of {', '.join(FORMATS)}; found {name!r}")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise UserError(f"there is no folder {parent} to write {out.name} to; make it first, or give another --out")
    if not os.access(parent, os.W_OK):
        raise UserError(f"the folder {parent} can not be written to; give another --out")
    if name == "folders":
        from cdc_plugin.evaluation.writers.folders import check_folder

        check_folder(out, overwrite)
    else:
        _check_files(name, out, overwrite)
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError("--to parquet needs pyarrow: pip install 'cdc-plugin[parquet]', or write a .csv")
    return name


def check_source(to: str, source: str | Path, out: Path) -> None:
    """Refuse images that a format can not point to: arrays, shards and data sets known by name have no files."""
    if not FORMATS[to].of_files:
        return
    from cdc_plugin.data.sources.describe import has_files

    path = Path(source).expanduser()
    if not has_files(source):
        raise UserError(
            f"--to {to} points to image files and {source} has none of its own; give a folder of images as "
            "--data, or write a .csv"
        )
    if to == "folders" and path.is_dir():
        from cdc_plugin.evaluation.writers.folders import check_links

        check_links(out, path)


def write(to: str, out: Path, table: np.recarray, source: str | Path) -> list[Path]:
    """Write a table that ``check`` and ``check_source`` have agreed to.

    Args:
        table: as of ``cdc_plugin.evaluation.prediction_table``.
        source: the folder that the names in the table are relative to, or the one image in the table.

    Returns:
        The files; for ``folders`` the list of all links.
    """
    from cdc_plugin.evaluation.writers import cvat, fiftyone, folders, label_studio
    from cdc_plugin.evaluation.writers.names import image_folder

    if to in ("csv", "parquet"):
        return write_parts(to, out, [table], source)
    writer = {
        "folders": folders.write,
        "label-studio": label_studio.write,
        "fiftyone": fiftyone.write,
        "cvat": cvat.write,
    }[to]
    return writer(out, table, image_folder(Path(source).expanduser()))


def write_parts(to: str, out: Path, parts: Iterable[np.recarray], source: str | Path) -> list[Path]:
    """As `write`, for a table in parts: csv and parquet have few parts in memory at once, the others all."""
    from cdc_plugin.evaluation import prediction_table as tables
    from cdc_plugin.evaluation.writers import parquet

    if to == "csv":
        tables.write_tables(out, parts)
        return [out]
    if to == "parquet":
        return parquet.write(out, parts)
    return write(to, out, tables.concatenate_tables(parts), source)


def advice(to: str, out: Path, source: str | Path) -> str | None:
    """How to open what was written, where that is not plain from its name: one line."""
    from cdc_plugin.evaluation.writers.names import image_folder

    if to == "label-studio":
        folder = image_folder(Path(source).expanduser())
        return (
            "start Label Studio with LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED=true and "
            f"LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT={folder.parent}, paste {out.stem}.xml as labelling interface, "
            f"add {folder} as local storage without syncing it, then import {out.name}"
        )
    if to == "fiftyone":
        return (
            "open with fiftyone.Dataset.from_dir(dataset_type=fiftyone.types.FiftyOneImageClassificationDataset, "
            f"labels_path={str(out.absolute())!r})"
        )
    if to == "cvat":
        return (
            f"make a CVAT task of the images with the labels of {out.stem}.labels.json (tab Raw), then upload "
            f"{out.stem}.xml to it as annotations, format CVAT 1.1; {out.stem}.csv is for other tools"
        )
    return None


def _by_suffix(out: Path) -> str:
    suffix = out.suffix.lower()
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give the path of a file such as {out / 'new.csv'}, or --to folders")
    candidates = [name for name, known in FORMATS.items() if suffix in known.suffixes]
    if suffix in (".csv", ".parquet"):
        return suffix[1:]
    if candidates:
        raise UserError(f"{out.name} does not say for which tool it is; add --to {' or --to '.join(candidates)}")
    raise UserError(f"--out takes a .csv or .parquet file, or give --to ({', '.join(FORMATS)}); found {out.name}")


def _check_files(name: str, out: Path, overwrite: bool) -> None:
    known = FORMATS[name]
    example = f"predictions{known.suffixes[0]}"
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give the path of a file, such as {out / example}")
    if out.suffix.lower() not in known.suffixes:
        kinds = " or ".join(known.suffixes)
        raise UserError(f"--to {name} writes a {kinds} file, such as --out {example}; found {out.name}")
    for file in (out, *(out.with_suffix(ending) for ending in known.endings)):
        if file.is_dir():
            raise UserError(f"{file} is a folder, and a file of that name is to be written; give another --out")
        if file.exists() and not overwrite:
            raise UserError(f"{file} is already there; give another --out, or --overwrite to replace it")
