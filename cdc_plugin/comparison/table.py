"""Turn the records of finished cells into rows of a table: mean and deviation of every figure over the seeds."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cdc_plugin.metrics.over_seeds import (
    COSTS,
    EMPTY,
    LARGEST,
    SECONDS,
    SELECTED,
    WITH_LABELS,
    WITHOUT_LABELS,
    Row,
    Value,
)
from cdc_plugin.report.words import known

Record = dict[str, Any]
ARRAYS = (".npz", ".npy")
OUTSIDE = ("AUROC", "FPR95")


def collect(records: Sequence[Record], order: Sequence[str]) -> list[Row]:
    """Return one row for every head of every method on every set: methods in this order, all else as in the records."""
    names = name_outside_data(records)
    cells: dict[tuple[str, str, str], list[tuple[Record, Record]]] = {}
    for record in records:
        for row in record["rows"]:
            cells.setdefault((record["set"], record["method"], row["label"]), []).append((record, row))
    sets = list(dict.fromkeys(record["set"] for record in records))
    methods = list(dict.fromkeys([*order, *(record["method"] for record in records)]))
    keys = sorted(cells, key=lambda key: (sets.index(key[0]), methods.index(key[1])))
    return [_build_row(cells[key], names) for key in keys]


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
    rows = [row for record in records for row in record["rows"]]
    paths = {entry["data"]: Path(entry["data"]) for row in rows for entry in row.get("outside", [])}
    names = {data: path.stem if path.suffix.lower() in ARRAYS else path.name for data, path in paths.items()}
    names = {data: name or data for data, name in names.items()}
    return {data: name if [*names.values()].count(name) == 1 else data for data, name in names.items()}


def collect_figures(record: Record, row: Record, names: dict[str, str], scores: Sequence[str]) -> dict[str, Any]:
    """Return every number of one row of one cell, by the name of its column; ``scores`` of outside data come last."""
    figures = row["figures"]
    numbers = {key: value for key, value in figures.items() if value is None or isinstance(value, int | float)}
    if sizes := figures.get("cluster_sizes"):
        numbers[LARGEST] = max(sizes) / max(sum(sizes), 1)
        numbers[EMPTY] = sum(size == 0 for size in sizes)
    numbers |= {SELECTED: record.get("selected"), SECONDS: record.get("seconds")}
    numbers |= {cost: record[cost] for cost in COSTS if record.get(cost) is not None}
    for entry in row.get("outside", []):
        numbers |= {f"{score} {names[entry['data']]}": entry["scores"].get(score) for score in scores}
    return numbers


def _build_row(cells: Sequence[tuple[Record, Record]], names: dict[str, str]) -> Row:
    first, label = cells[0][0], cells[0][1]["label"]
    numbers = [collect_figures(record, row, names, OUTSIDE) for record, row in cells]
    outside = dict.fromkeys(names[entry["data"]] for _, row in cells for entry in row.get("outside", []))
    columns = [
        *(WITH_LABELS if first["labels"] else WITHOUT_LABELS),
        *(cost for cost in COSTS if any(cost in cell for cell in numbers)),
        *(f"{score} {name}" for name in outside for score in OUTSIDE),
    ]
    return Row(
        **{key: first[key] for key in ("set", "group", "method", "uses_labels")},
        label=label,
        seeds=len(cells),
        values={column: summarise(cell.get(column) for cell in numbers) for column in columns},
        figures=[row["figures"] for _, row in cells],
    )
