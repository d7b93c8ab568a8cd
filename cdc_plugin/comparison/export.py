"""The table of methods as CSV, as Markdown and as text for the terminal; LaTeX is in `comparison.latex`."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from cdc_plugin.comparison.latex import to_latex
from cdc_plugin.comparison.table import Record, Row, outside_names, row_figures
from cdc_plugin.metrics.over_seeds import (
    FIGURES,
    better,
    by_set,
    columns_of,
    deviation_words,
    mean_words,
    partial_words,
    ranks,
    row_names,
    seeds_words,
)
from cdc_plugin.report.words import shorten, writable

__all__ = ["records_csv", "to_csv", "to_latex", "to_markdown", "to_text"]

UNDEFINED = "-"
LONGEST = 48  # characters of a name in the terminal
SCORES = ("AUROC", "FPR95", "AUPR")
FIRST = (*FIGURES, "AECE", "CECE", "BRIER", "NLL")
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~&$])")


def to_csv(rows: Sequence[Row]) -> str:
    """One line a row: means and deviations as fractions, times in seconds; empty where undefined."""
    columns = list(dict.fromkeys(column for row in rows for column in row.values))
    head = ["set", "group", "method", "label", "uses_labels", "seeds"]
    lines: list[list[Any]] = [[*head, *(part for column in columns for part in (column, f"{column} deviation"))]]
    for row in rows:
        values = [row.values.get(column) for column in columns]
        numbers = [part for value in values for part in ((value.mean, value.deviation) if value else (None, None))]
        lines.append([row.set, row.group, row.method, row.label, int(row.uses_labels), row.seeds, *numbers])
    return _csv(lines)


def records_csv(records: Sequence[Record]) -> str:
    """One line for every row of every cell, with every number it has, for statistics of one's own."""
    shorts = outside_names(records)
    head = ["set", "group", "method", "label", "uses_labels", "seed", "images", "clusters"]
    cells = [(record, row["label"]) for record in records for row in record["rows"]]
    found = [row_figures(record, label, shorts, SCORES) for record, label in cells]
    present = dict.fromkeys(column for figures in found for column in figures)
    columns = [*(column for column in FIRST if column in present), *(each for each in present if each not in FIRST)]
    lines: list[list[Any]] = [[*head, *columns, "settings"]]
    for (record, label), figures in zip(cells, found, strict=True):
        known = {**record, "label": label, "uses_labels": int(record["uses_labels"])}
        settings = json.dumps(record.get("settings") or {}, sort_keys=True, default=str)
        lines.append([*(known[key] for key in head), *(figures.get(column) for column in columns), settings])
    return _csv(lines)


def to_markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """A table for each set; of the rows without labels the best figure is bold, the second best in italics.

    Args:
        columns: those to show; None for all in which a row of the set has a value.
    """
    parts = []
    for name, found in by_set(rows).items():
        shown = columns_of(found) if columns is None else columns
        heads = ["method", *(f"{_markdown(column)} {better(column)}".strip() for column in shown)]
        lines = [heads, ["---", *(["---:"] * len(shown))]]
        places = [ranks(found, column) for column in shown]
        for index, (row, label) in enumerate(zip(found, row_names(found), strict=True)):
            marks = [("", "**", "*")[place[index]] for place in places]
            cells = [f"{mark}{_cell(row, column)}{mark}" for mark, column in zip(marks, shown, strict=True)]
            lines.append([_markdown(label) + (r" \*" if row.uses_labels else ""), *cells])
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        notes = "\n".join(f"{note[0].upper()}{note[1:]}.  " for note in _notes(found, shown, r"\*"))
        parts.append(f"**{_markdown(name)}**\n\n{table}\n\n{notes.rstrip()}\n")
    return writable("\n".join(parts))


def to_text(rows: Sequence[Row], columns: Sequence[str] | None = None, width: int | None = None) -> str:
    """A table for each set, for the terminal.

    Args:
        columns: those to show; None for all in which a row of the set has a value.
        width: of the terminal; columns that find no room follow in a second block below. None: as wide as need be.
    """
    parts = []
    for name, found in by_set(rows).items():
        shown = columns_of(found) if columns is None else columns
        labels = [
            shorten(_flat(label), LONGEST) + ("*" if row.uses_labels else "")
            for row, label in zip(found, row_names(found), strict=True)
        ]
        first = [f"{shorten(_flat(name), LONGEST)}, in %", *labels]
        others = [[_flat(column), *(_cell(row, column) for row in found)] for column in shown]
        parts.append("\n\n".join([*_blocks(first, others, width), "\n".join(_notes(found, shown, "*"))]))
    return writable("\n\n".join(parts))


def _blocks(first: list[str], others: list[list[str]], width: int | None) -> Iterable[str]:
    """Aligned columns, as many beside the first one as there is room for."""
    left = max(len(cell) for cell in first) + 2
    blocks: list[list[list[str]]] = [[]]
    used = left
    for column in others:
        needed = max(len(cell) for cell in column) + 2
        if width is not None and blocks[-1] and used + needed > width:
            blocks.append([])
            used = left
        blocks[-1].append([f"{cell:>{needed}s}" for cell in column])
        used += needed
    for block in blocks:
        lines = zip([f"{cell:{left}s}" for cell in first], *block, strict=True)
        yield "\n".join("".join(cells).rstrip() for cells in lines)


def _cell(row: Row, column: str) -> str:
    value = row.values.get(column)
    deviation = deviation_words(column, value)
    return (
        (mean_words(column, value) or UNDEFINED) + (f" ± {deviation}" if deviation else "") + partial_words(row, column)
    )


def _notes(rows: Sequence[Row], columns: Sequence[str], star: str) -> list[str]:
    """What the reader must know to read the table."""
    over = f"mean and standard deviation over {seeds_words(rows)}"
    notes = [over if max(row.seeds for row in rows) > 1 else "one seed: no deviation is known"]
    if any(row.uses_labels for row in rows):
        notes.append(f"{star} uses labels: for reference only")
    if any(partial_words(row, column) for row in rows for column in columns):
        notes.append("(n): undefined in some seeds, mean over the n others")
    return notes


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([_rounded(cell) for cell in line] for line in lines)
    return writable(buffer.getvalue())


def _rounded(cell: Any) -> Any:
    return round(cell, 6) if isinstance(cell, float) else cell


def _flat(words: str) -> str:
    return " ".join(words.split())


def _markdown(words: str) -> str:
    return MARKDOWN.sub(r"\\\1", _flat(words))
