"""Rows of a table of methods: means and deviations over seeds, how they read, and which of them are best."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HIGHER, LOWER, NEITHER = "↑", "↓", ""
SELECTED, SECONDS, LARGEST, EMPTY = "selected", "seconds", "largest_cluster", "empty_clusters"
FIGURES = ("ACC", "NMI", "ARI", "ECE", "AUROC", "AURC", "FPR95", "CONF")
PARAMETERS, GPU_MEMORY = "parameters", "gpu_memory"  # of backbone and heads; the most at once, in MB
COSTS = (PARAMETERS, GPU_MEMORY)
WITH_LABELS = (*FIGURES, SELECTED, SECONDS)
WITHOUT_LABELS = ("CONF", LARGEST, EMPTY, SELECTED, SECONDS)
BETTER = {"ACC": HIGHER, "NMI": HIGHER, "ARI": HIGHER, "AUROC": HIGHER, "ECE": LOWER, "AURC": LOWER, "FPR95": LOWER}
OURS = "CDC"  # the group that is set off from the others


@dataclass(frozen=True)
class Value:
    """A figure over the seeds where it is defined; ``deviation`` (of the sample, n - 1) is None for one seed."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Row:
    """One head of one method on one set of images, over all seeds that were finished."""

    set: str
    group: str
    method: str
    label: str
    uses_labels: bool
    seeds: int
    values: dict[str, Value | None]  # by column, in the order of the table
    figures: list[dict[str, Any]] = field(default_factory=list)  # a seed each, for diagrams


def by_set(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of every set, in the order in which they come."""
    return {name: [row for row in rows if row.set == name] for name in dict.fromkeys(row.set for row in rows)}


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Return every column in which at least one row has a value, but the parameters, for which a table has to ask."""
    found = dict.fromkeys(column for row in rows for column in row.values if column != PARAMETERS)
    return [column for column in found if any(row.values.get(column) is not None for row in rows)]


def row_names(rows: Sequence[Row]) -> list[str]:
    """Return a name for each row of one set: its label, with the method where two rows have the same one."""
    times = Counter(row.label for row in rows)
    return [row.label if times[row.label] == 1 else f"{row.label} ({row.method})" for row in rows]


def better(column: str) -> str:
    """Return whether higher or lower values of a column are better; ``AUROC textures`` goes by its first word."""
    return BETTER.get(column.split(" ")[0], NEITHER)


def ranks(rows: Sequence[Row], column: str) -> list[int]:
    """Return 1 for the best of the column, 2 for the second best, 0 for all others.

    Rows that use labels take no part, and rows whose means read the same share a place: where all read the same
    there is no best.
    """
    readings = [mean_words(column, None if row.uses_labels else row.values.get(column)) for row in rows]
    means = {
        reading: value.mean
        for row, reading in zip(rows, readings, strict=True)
        if (value := row.values.get(column)) is not None and not row.uses_labels
    }
    if better(column) == NEITHER or len(means) < 2:
        return [0] * len(rows)
    places = sorted(means, key=lambda reading: means[reading], reverse=better(column) == HIGHER)[:2]
    return [places.index(reading) + 1 if reading in places else 0 for reading in readings]


def mean_words(column: str, value: Value | None) -> str:
    """Return ``94.3`` per cent, ``41 s``, ``0.4`` clusters; empty where the figure is undefined."""
    if value is None:
        return ""
    if column == SECONDS:
        return f"{value.mean:,.0f} s" if value.mean >= 9.95 else f"{value.mean:.1f} s"
    if column == PARAMETERS:
        return f"{value.mean / 1e6:.2f} M"
    return f"{value.mean:,.0f} MB" if column == GPU_MEMORY else _decimal(column, value.mean)


def deviation_words(column: str, value: Value | None) -> str:
    """Return the deviation as `mean_words`; empty where there is none. Of time and memory the mean says enough."""
    if value is None or value.deviation is None or column in (SECONDS, *COSTS):
        return ""
    return _decimal(column, value.deviation)


def partial_words(row: Row, column: str) -> str:
    """Return `` (3)`` behind a mean over 3 of 5 seeds because the figure is undefined in the others; else empty."""
    value = row.values.get(column)
    return f" ({value.count})" if value is not None and value.count < row.seeds else ""


def seeds_words(rows: Sequence[Row]) -> str:
    """Return ``5 seeds``, ``3 to 5 seeds``."""
    fewest, most = min(row.seeds for row in rows), max(row.seeds for row in rows)
    return f"{most} seed{'s' if most > 1 else ''}" if fewest == most else f"{fewest} to {most} seeds"


def _decimal(column: str, value: float) -> str:
    return f"{value if column == EMPTY else 100 * value:.1f}"
