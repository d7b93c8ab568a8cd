"""Names and numbers as other tools take them: clusters, paths as proper Unicode, values of a row."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cdc_plugin.data.atomic import write_atomically


def image_folder(source: Path) -> Path:
    """The absolute folder that names in the table are relative to; one image is named within its folder."""
    return Path(os.path.abspath(source if source.is_dir() else source.parent))


def cluster_names(table: np.recarray) -> list[str]:
    """``cluster 00``, ``cluster 01`` and so on for every cluster up to the last that the table mentions."""
    last = max((int(table[column].max()) for column in ("cluster", "second_cluster") if len(table)), default=-1)
    width = max(2, len(str(last)))  # so that names sort as numbers
    return [f"cluster {number:0{width}d}" for number in range(last + 1)]


def unicode_name(name: str) -> str:
    r"""A file name as text that any encoding takes: bytes that are not UTF-8 become ``\xff``."""
    if name.isascii():
        return name
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def plain_columns(table: np.recarray, flag: type = int) -> dict[str, list[Any]]:
    """All columns but the name as lists of JSON values: 6 decimals, None for what is no number.

    Args:
        flag: what yes and no are written as: ``int`` (1 and 0) or ``bool``.
    """
    return {name: _plain(table[name], flag) for name in (table.dtype.names or ())[1:]}


def plain_rows(table: np.recarray, flag: type = int) -> Iterator[dict[str, Any]]:
    """Each row of `plain_columns`."""
    columns = plain_columns(table, flag)
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def write_entries(out: Path, opening: str, entries: Iterable[str], closing: str) -> None:
    """A file of many entries, one a line with commas between them, without holding them all at once."""

    def fill(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(opening)
            comma = "\n"
            for entry in entries:
                file.write(comma + entry)
                comma = ",\n"
            file.write(closing)

    write_atomically(out, fill)


def _plain(column: np.ndarray, flag: type) -> list[Any]:
    if column.dtype.kind == "b":
        return column.astype(flag).tolist()
    if column.dtype.kind == "f":
        values = column.astype(np.float64).tolist()
        return [round(value, 6) if math.isfinite(value) else None for value in values]
    return column.tolist()
