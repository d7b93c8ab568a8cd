"""Predictions as one file for another tool, Parquet, Label Studio or FiftyOne, and what such files have in common."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import numpy as np

from cdc_plugin import __version__
from cdc_plugin.data.atomic import write_atomically, write_text

ROWS = 131_072  # in a group of a Parquet file, at least: small ones are slow to read
FLAGS = ("trusted", "outlier", "selected")
CONTROL, OBJECT = "cluster", "image"  # names in Label Studio's interface that predictions refer to

_encode = json.JSONEncoder(ensure_ascii=False).encode


def name_clusters(table: np.recarray) -> list[str]:
    """Return ``cluster 00``, ``cluster 01`` and so on for every cluster up to the last in the table."""
    last = max((int(table[column].max()) for column in ("cluster", "second_cluster") if len(table)), default=-1)
    width = max(2, len(str(last)))  # so that names sort as numbers
    return [f"cluster {number:0{width}d}" for number in range(last + 1)]


def escape_name(name: str) -> str:
    r"""Return a file name as valid Unicode: bytes that are not UTF-8 become ``\xff``.

    >>> escape_name("caf\udce9.png")
    'caf\\xe9.png'
    """
    return name if name.isascii() else name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def convert_columns(table: np.recarray, flag: type = int) -> dict[str, list[Any]]:
    """Return all columns but the name as lists of JSON values, 6 decimals, None for NaN, ``flag(True)`` for true."""

    def convert(column: np.ndarray) -> list[Any]:
        if column.dtype.kind == "f":
            values = column.astype(np.float64).tolist()
            return [round(value, 6) if math.isfinite(value) else None for value in values]
        return (column.astype(flag) if column.dtype.kind == "b" else column).tolist()

    return {name: convert(table[name]) for name in (table.dtype.names or ())[1:]}


def write_parquet(out: Path, tables: Iterable[np.recarray]) -> list[Path]:
    r"""Write the columns of the CSV; paths are strings (bytes that are not UTF-8 as ``\xff``), an index is int64."""
    import pyarrow
    from pyarrow import parquet

    def convert(name: str, values: np.ndarray) -> Any:
        if name == "path":
            return pyarrow.array([escape_name(value) for value in values.tolist()], pyarrow.string())
        if name == "index" or name in FLAGS:
            return pyarrow.array(values.astype(np.int64 if name == "index" else bool))
        return pyarrow.array(values.astype(np.float32 if values.dtype.kind == "f" else np.int32))

    def write_groups(temporary: Path) -> None:
        contents = (
            pyarrow.table({name: convert(name, table[name]) for name in table.dtype.names or ()}) for table in tables
        )
        group = [next(contents)]
        with parquet.ParquetWriter(temporary, group[0].schema) as writer:
            for content in contents:
                if sum(map(len, group)) >= ROWS:
                    writer.write_table(pyarrow.concat_tables(group))
                    group = []
                group.append(content)
            writer.write_table(pyarrow.concat_tables(group))

    write_atomically(out, write_groups)
    return [out]


def write_fiftyone(out: Path, table: np.recarray, folder: Path) -> list[Path]:
    """Write the labels.json of a ``FiftyOneImageClassificationDataset``: label, confidence, attributes."""

    def labels() -> Iterator[str]:
        for name, values in _rows(table, bool):
            # Absolute paths are used as they are: no data folder is named, and names may differ in the extension only.
            path = escape_name(os.path.join(folder, name.replace("/", os.sep)))
            # The label is an index into the classes.
            label = {"label": values.pop("cluster"), "confidence": values.pop("confidence"), "attributes": values}
            yield f"{_encode(path)}: {_encode(label)}"

    _write_entries(out, f'{{"classes": {json.dumps(name_clusters(table))},\n"labels": {{', labels(), "\n}}\n")
    return [out]


def write_label_studio(out: Path, table: np.recarray, folder: Path) -> list[Path]:
    """Write tasks with pre-annotations and all columns to sort by, and beside them the labelling interface they fit."""
    names = name_clusters(table)

    def tasks() -> Iterator[str]:
        for path, values in _rows(table, int):
            choices = {"choices": [names[values["cluster"]]]}
            result = {"from_name": CONTROL, "to_name": OBJECT, "type": "choices", "value": choices}
            version = f"cdc-plugin {__version__}"
            prediction = {"model_version": version, "score": values["confidence"], "result": [result]}
            # Below the parent of the image folder: Label Studio serves only sub-folders of its document root.
            url = "/data/local-files/?d=" + quote(os.fsencode(f"{folder.name}/{path}"))
            yield _encode({"data": {OBJECT: url, "path": escape_name(path), **values}, "predictions": [prediction]})

    interface = out.with_suffix(".xml")
    write_text(interface, _build_interface(names))
    _write_entries(out, "[", tasks(), "\n]\n")
    return [out, interface]


def _build_interface(names: list[str]) -> str:
    view = ElementTree.Element("View")
    ElementTree.SubElement(view, "Image", name=OBJECT, value=f"${OBJECT}", zoom="true")
    choices = ElementTree.SubElement(view, "Choices", name=CONTROL, toName=OBJECT, choice="single", showInLine="true")
    for name in names:
        ElementTree.SubElement(choices, "Choice", value=name)
    ElementTree.indent(view)
    return ElementTree.tostring(view, encoding="unicode") + "\n"


def _rows(table: np.recarray, flag: type) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the other values of every row."""
    columns = convert_columns(table, flag)
    for path, *values in zip(table["path"].tolist(), *columns.values(), strict=True):
        yield path, dict(zip(columns, values, strict=True))


def _write_entries(out: Path, opening: str, entries: Iterable[str], closing: str) -> None:
    """Write one entry per line with commas between them, without holding all of them in memory."""

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(opening)
            separator = "\n"
            for entry in entries:
                file.write(separator + entry)
                separator = ",\n"
            file.write(closing)

    write_atomically(out, write)
