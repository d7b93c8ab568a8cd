"""The table of predictions, one row per image, as a record array and as CSV."""

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

BLOCK = 8192  # rows that are formatted at once


def build_prediction_table(
    names: Sequence[str],
    clustering: NDArray[np.float32],
    calibration: NDArray[np.float32],
    more: Mapping[str, NDArray[Any]] | None = None,
) -> np.recarray:
    """Build one row per image from the probabilities (N, C) of both heads; ``more`` columns come last.

    >>> probabilities = np.array([[0.25, 0.75], [0.5, 0.5]], dtype=np.float32)
    >>> table = build_prediction_table(["a.png", "b.png"], probabilities, probabilities)
    >>> table["cluster"].tolist(), table["confidence"].tolist()
    ([1, 0], [0.75, 0.5])
    """
    return build_table(names, {**compute_prediction_columns(clustering, calibration), **(more or {})})


def compute_prediction_columns(
    clustering: NDArray[np.float32], calibration: NDArray[np.float32]
) -> dict[str, NDArray[np.generic]]:
    """Return the two most likely clusters of the calibration head and the confidences, from probabilities (N, C).

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


def compute_outlier_columns(prototypes: Prototypes, features: Tensor) -> dict[str, NDArray[Any]]:
    """Return how far images with these features (N, D) are from typical ones, and which exceed the limit."""
    distance = prototypes.distance(features).cpu().numpy()
    return {"distance": distance, "outlier": distance > prototypes.limit}


def build_table(
    names: Sequence[str], columns: Mapping[str, NDArray[Any]], name_column: str | None = None
) -> np.recarray:
    """Return names and columns as one table; the first column is called as `choose_name_column` says by default."""
    header = [name_column or choose_name_column(names), *columns]
    return np.rec.fromarrays([np.array(names, dtype=object), *columns.values()], names=header)  # type: ignore[call-overload]


def choose_name_column(names: Iterable[str]) -> str:
    """Return ``index`` where images are only numbered, else ``path``.

    >>> choose_name_column(["0", "1"]), choose_name_column(["cats/0.png", "1"])
    ('index', 'path')
    """
    return "index" if all(name.isdigit() for name in names) else "path"


def add_column(table: np.recarray, name: str, values: NDArray[Any]) -> np.recarray:
    """Return the table with one more column at its end."""
    columns = table.dtype.names or ()
    return np.rec.fromarrays([*(table[column] for column in columns), values], names=[*columns, name])  # type: ignore[call-overload]


def concatenate_tables(tables: Iterable[np.recarray]) -> np.recarray:
    """Return tables with the same columns as one."""
    return np.concatenate(list(tables)).view(np.recarray)


def write_table(path: Path, table: np.recarray) -> None:
    """Write the table as CSV (UTF-8, with a header, numbers with 6 decimals, true and false as 1 and 0)."""
    write_tables(path, [table])


def write_tables(path: Path, tables: Iterable[np.recarray]) -> None:
    """Write tables with the same columns as one CSV, as `write_table` does, with one table in memory at a time."""

    def write(temporary: Path) -> None:
        # File names need not be valid UTF-8; their bytes are written as they are.
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for number, table in enumerate(tables):
                if number == 0:
                    writer.writerow(table.dtype.names or ())
                for start in range(0, len(table), BLOCK):
                    rows = table[start : start + BLOCK].tolist()
                    writer.writerows([_format(value) for value in row] for row in rows)

    write_atomically(path, write)


def _format(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return f"{value:.6f}" if isinstance(value, float) else value
