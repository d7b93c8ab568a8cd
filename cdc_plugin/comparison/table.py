"""Records of finished cells to rows of a table: mean and deviation of every figure over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cdc_plugin.metrics.over_seeds import EMPTY, LARGEST, SECONDS, SELECTED, WITH_LABELS, WITHOUT_LABELS, Row, Value
from cdc_plugin.report.words import known

__all__ = ["Row", "Value", "collect", "outside_names", "row_figures", "summarise"]

Record = dict[str, Any]
ARRAYS = (".npz", ".npy")
OUTSIDE = ("AUROC", "FPR95")


def collect(records: Sequence[Record], order: Sequence[str]) -> list[Row]:
    """One row for every head of every method on every set.

    Sets come as they do in the records, methods as in ``order`` (others last), the heads of a method as in its
    records. Seeds that failed or are missing are simply fewer.
    """
    shorts = outside_names(records)
    methods = dict.fromkeys([*order, *(record["method"] for record in records)])
    rows = []
    for name in dict.fromkeys(record["set"] for record in records):
        for method in methods:
            cells = [record for record in records if (record["set"], record["method"]) == (name, method)]
            for label in dict.fromkeys(row["label"] for cell in cells for row in cell["rows"]):
                rows.append(_row([cell for cell in cells if _figures(cell, label) is not None], label, shorts))
    return rows


def summarise(values: Iterable[Any]) -> Value | None:
    """Mean and sample deviation of the values that are defined; None if none is."""
    numbers = [float(value) for value in values if known(value)]
    if not numbers:
        return None
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Value(statistics.fmean(numbers), deviation, len(numbers))


def outside_names(records: Sequence[Record]) -> dict[str, str]:
    """Short names of all outside data: ``textures`` for ``sets/textures.npz``, the whole path where two would clash."""
    every = dict.fromkeys(entry["data"] for record in records for entry in record.get("outside") or [])
    shorts = {data: _short(data) for data in every}
    return {data: short if [*shorts.values()].count(short) == 1 else data for data, short in shorts.items()}


def row_figures(record: Record, label: str, shorts: dict[str, str], scores: Sequence[str]) -> dict[str, Any]:
    """Every number of one row of one cell, by the name of its column; ``scores`` of outside data come last."""
    figures = _figures(record, label) or {}
    found = {key: value for key, value in figures.items() if value is None or isinstance(value, int | float)}
    sizes = figures.get("cluster_sizes")
    if sizes:
        found[LARGEST] = max(sizes) / max(sum(sizes), 1)
        found[EMPTY] = sum(size == 0 for size in sizes)
    found |= {SELECTED: record.get("selected"), SECONDS: record.get("seconds")}
    for entry in record.get("outside") or []:
        measured = entry["scores"].get(label) or {}
        found |= {f"{score} {shorts[entry['data']]}": measured.get(score) for score in scores}
    return found


def _row(cells: Sequence[Record], label: str, shorts: dict[str, str]) -> Row:
    first = cells[0]
    numbers = [row_figures(cell, label, shorts, OUTSIDE) for cell in cells]
    present = dict.fromkeys(entry["data"] for cell in cells for entry in cell.get("outside") or [])
    columns = [
        *(WITH_LABELS if first["labels"] else WITHOUT_LABELS),
        *(f"{score} {shorts[data]}" for data in present for score in OUTSIDE),
    ]
    return Row(
        set=first["set"],
        group=first["group"],
        method=first["method"],
        label=label,
        uses_labels=first["uses_labels"],
        seeds=len(cells),
        values={column: summarise(found.get(column) for found in numbers) for column in columns},
        figures=[_figures(cell, label) or {} for cell in cells],
    )


def _figures(record: Record, label: str) -> dict[str, Any] | None:
    return next((row["figures"] for row in record["rows"] if row["label"] == label), None)


def _short(data: str) -> str:
    path = Path(data)
    return (path.stem if path.suffix.lower() in ARRAYS else path.name) or data
