"""The table of outside data: how well each score of each model tells foreign images from its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cdc_plugin.report.tables import HIGHER, LOWER, Cell, Measure, marked
from cdc_plugin.report.words import TITLES

SCORES = [Measure("AUROC", "", HIGHER, ""), Measure("FPR95", "", LOWER, ""), Measure("AUPR", "", HIGHER, "")]


@dataclass(frozen=True)
class OutsideRow:
    """One score of one model for one set of outside images."""

    data: str
    images: str
    model: str
    score: str
    cells: list[Cell]


def outside_rows(models: list[tuple[str, list[dict[str, Any]]]]) -> list[OutsideRow]:
    """Rows in the order of the data, then of the models; the best of each data is marked.

    Args:
        models: name of each and its ``outside`` entries.
    """
    grouped: dict[str, list[tuple[str, dict[str, Any], str, dict[str, Any]]]] = {}
    for name, entries in models:
        for entry in entries:
            for score, figures in entry["scores"].items():
                grouped.setdefault(entry["data"], []).append((name, entry, score, figures))
    rows = []
    for data, found in grouped.items():
        columns = [marked(measure, [figures.get(measure.key) for *_, figures in found]) for measure in SCORES]
        for (name, entry, score, _), *cells in zip(found, *columns, strict=True):
            rows.append(OutsideRow(data, f"{entry['images']:,}", name, TITLES[score], list(cells)))
    return rows
