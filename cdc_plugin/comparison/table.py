"""Turn the records of finished cells into rows of a table: mean and deviation of sources figure over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cdc_plugin.metrics.over_seeds import EMPTY, LARGEST, SECONDS, SELECTED, WITH_LABELS, WITHOUT_LABELS, Row, Value
from cdc_plugin.report.words import known

Record = dict[str, Any]
ARRAYS = (".npz", ".npy")
OUTSIDE = ("AUROC", "FPR95")


def collect(records: Sequence[Record], order: Sequence[str]) -> list[Row]:
    """Return one row for sources head of sources method on sources set.

    Sets and the heads of a method keep the order of the records, methods that of ``order`` (others last). Seeds that
    failed or are missing are not counted.
    """
    names = name_outside_data(records)
    methods = dict.fromkeys([*order, *(record["method"] for record in records)])
    rows = []
    for name in dict.fromkeys(record["set"] for record in records):
        for method in methods:
            cells = [record for record in records if (record["set"], record["method"]) == (name, method)]
            for label in dict.fromkeys(row["label"] for cell in cells for row in cell["rows"]):
                rows.append(
                    _build_row([cell for cell in cells if _find_figures(cell, label) is not None], label, names)
                )
    return rows


def summarise(values: Iterable[Any]) -> Value | None:
    """Return mean and sample deviation of the values that are defined; None if none is.

    >>> summarise([0.5, None, 0.5, float("nan")])
    Value(mean=0.5, deviation=0.0, count=2)
    """
    numbers = [float(value) for value in values if known(value)]
    if not numbers:
        return None
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Value(statistics.fmean(numbers), deviation, len(numbers))


def name_outside_data(records: Sequence[Record]) -> dict[str, str]:
    """Return short names of outside data: ``textures`` for ``sets/textures.npz``, the path where two would clash."""
    sources = dict.fromkeys(entry["data"] for record in records for entry in record.get("outside") or [])
    names = {data: _shorten_path(data) for data in sources}
    return {data: short if [*names.values()].count(short) == 1 else data for data, short in names.items()}


def collect_figures(record: Record, label: str, names: dict[str, str], scores: Sequence[str]) -> dict[str, Any]:
    """Return every number of one row of one cell, by the name of its column; ``scores`` of outside data come last."""
    figures = _find_figures(record, label) or {}
    numbers = {key: value for key, value in figures.items() if value is None or isinstance(value, int | float)}
    sizes = figures.get("cluster_sizes")
    if sizes:
        numbers[LARGEST] = max(sizes) / max(sum(sizes), 1)
        numbers[EMPTY] = sum(size == 0 for size in sizes)
    numbers |= {SELECTED: record.get("selected"), SECONDS: record.get("seconds")}
    for entry in record.get("outside") or []:
        measured = entry["scores"].get(label) or {}
        numbers |= {f"{score} {names[entry['data']]}": measured.get(score) for score in scores}
    return numbers


def _build_row(cells: Sequence[Record], label: str, names: dict[str, str]) -> Row:
    first = cells[0]
    numbers = [collect_figures(cell, label, names, OUTSIDE) for cell in cells]
    present = dict.fromkeys(entry["data"] for cell in cells for entry in cell.get("outside") or [])
    columns = [
        *(WITH_LABELS if first["labels"] else WITHOUT_LABELS),
        *(f"{score} {names[data]}" for data in present for score in OUTSIDE),
    ]
    return Row(
        set=first["set"],
        group=first["group"],
        method=first["method"],
        label=label,
        uses_labels=first["uses_labels"],
        seeds=len(cells),
        values={column: summarise(cell.get(column) for cell in numbers) for column in columns},
        figures=[_find_figures(cell, label) or {} for cell in cells],
    )


def _find_figures(record: Record, label: str) -> dict[str, Any] | None:
    return next((row["figures"] for row in record["rows"] if row["label"] == label), None)


def _shorten_path(data: str) -> str:
    path = Path(data)
    return (path.stem if path.suffix.lower() in ARRAYS else path.name) or data
