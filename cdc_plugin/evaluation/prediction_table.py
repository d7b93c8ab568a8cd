"""The table of predictions: one row an image, as a record array and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.data.atomic import write_atomically

BLOCK = 8192  # rows that are turned into text at once


def prediction_table(
    names: Sequence[str],
    clustering: NDArray[np.float32],
    calibration: NDArray[np.float32],
    more: Mapping[str, NDArray[Any]] | None = None,
) -> np.recarray:
    """One row an image, from the probabilities (N, C) of both heads; ``more`` columns come last."""
    return make_table(names, {**prediction_columns(clustering, calibration), **(more or {})})


def prediction_columns(
    clustering: NDArray[np.float32], calibration: NDArray[np.float32]
) -> dict[str, NDArray[np.generic]]:
    """What is kept of the probabilities (N, C): the first two clusters of the calibration head, and how sure.

    Of two clusters with the same probability the one with the lower number comes first.
    """
    first_two = np.argsort(-calibration, axis=1, kind="stable")[:, :2]
    probabilities = np.take_along_axis(calibration, first_two, axis=1)
    return {
        "cluster": first_two[:, 0],
        "confidence": probabilities[:, 0],
        "clustering_confidence": clustering.max(axis=1),
        "second_cluster": first_two[:, 1],
        "second_confidence": probabilities[:, 1],
    }


def make_table(
    names: Sequence[str], columns: Mapping[str, NDArray[Any]], name_column: str | None = None
) -> np.recarray:
    """The names and columns as one table, the first column called as `name_column_of` says unless it is given."""
    texts = np.array(names, dtype=object)
    header = [name_column or name_column_of(names), *columns]
    return np.rec.fromarrays([texts, *columns.values()], names=header)  # type: ignore[call-overload]


def name_column_of(names: Iterable[str]) -> str:
    """``index`` where images have no path of their own, else ``path``."""
    return "index" if all(name.isdigit() for name in names) else "path"


def with_column(table: np.recarray, name: str, values: NDArray[Any]) -> np.recarray:
    """The table with one more column at its end."""
    old = table.dtype.names or ()
    return np.rec.fromarrays([*(table[each] for each in old), values], names=[*old, name])  # type: ignore[call-overload]


def one_table(parts: Iterable[np.recarray]) -> np.recarray:
    """Tables with the same columns one below the other."""
    return np.concatenate(list(parts)).view(np.recarray)


def outlier_columns(prototypes: Prototypes, features: Tensor) -> dict[str, NDArray[Any]]:
    """How far images with these features (N, D) lie from what is typical, and which lie beyond the limit."""
    distance = prototypes.distance(features).cpu().numpy()
    return {"distance": distance, "outlier": distance > prototypes.limit}


def write_table(path: Path, table: np.recarray) -> None:
    """The table as CSV (UTF-8, a header, numbers with 6 decimals, yes and no as 1 and 0)."""
    write_tables(path, [table])


def write_tables(path: Path, tables: Iterable[np.recarray]) -> None:
    """Tables with the same columns as one CSV, as `write_table` does; one after the other is in memory."""

    def write(temporary: Path) -> None:
        # File names need not be valid UTF-8; their bytes are written as they are.
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for number, table in enumerate(tables):
                if number == 0:
                    writer.writerow(table.dtype.names or ())
                for start in range(0, len(table), BLOCK):
                    rows = table[start : start + BLOCK].tolist()
                    writer.writerows([_cell(value) for value in row] for row in rows)

    write_atomically(path, write)


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return f"{value:.6f}" if isinstance(value, float) else value
