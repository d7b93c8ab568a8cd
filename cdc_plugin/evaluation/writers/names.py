"""Names and values as other tools take them: clusters, paths as valid Unicode, rows as JSON values."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cdc_plugin.data.atomic import write_atomically


def find_image_folder(source: str | Path) -> Path:
    """Return the absolute folder that names in the table are relative to; for a single image its parent."""
    path = Path(source).expanduser()
    return Path(os.path.abspath(path if path.is_dir() else path.parent))


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
    """Return all columns but the name as lists of JSON values, with 6 decimals and None for NaN.

    Args:
        flag: how true and false are written: as ``int`` (1 and 0) or as ``bool``.
    """
    return {name: _convert(table[name], flag) for name in (table.dtype.names or ())[1:]}


def convert_rows(table: np.recarray, flag: type = int) -> Iterator[dict[str, Any]]:
    """Yield the rows of `convert_columns`."""
    columns = convert_columns(table, flag)
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def write_entries(out: Path, opening: str, entries: Iterable[str], closing: str) -> None:
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


def write_text(out: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(out, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _convert(column: np.ndarray, flag: type) -> list[Any]:
    if column.dtype.kind == "b":
        return column.astype(flag).tolist()
    if column.dtype.kind == "f":
        values = column.astype(np.float64).tolist()
        return [round(value, 6) if math.isfinite(value) else None for value in values]
    return column.tolist()
