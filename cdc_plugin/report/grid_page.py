"""The page of a comparison of methods: what came out, the tables, small charts, and a reliability diagram a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from cdc_plugin.metrics.over_seeds import (
    OURS,
    SECONDS,
    Row,
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
from cdc_plugin.report.charts import reliability_diagram, right_wrong_histogram
from cdc_plugin.report.grid_charts import bar_panel, close_band, dot_panel
from cdc_plugin.report.run_page import MOST_SETTINGS, Drawing, caption_diagram, render_template, write_text
from cdc_plugin.report.words import DASH, SPACE, TITLES, count, known, shorten

PANELS = (
    ("ACC", "Accuracy (ACC)"),
    ("ECE", "Calibration error (ECE)"),
    ("CONF", "Mean confidence"),
    ("largest_cluster", "Largest cluster"),
)
MOST_PANELS = 2  # beside the one of the time


@dataclass(frozen=True)
class GridCell:
    """A figure as text, and its place: 1 for the best, 2 for the second best, else 0."""

    mean: str
    deviation: str
    place: int


@dataclass(frozen=True)
class GridLine:
    """A row of the table."""

    name: str
    method: str
    uses_labels: bool
    ours: bool
    seeds: int
    cells: list[GridCell]


@dataclass(frozen=True)
class Diagram:
    """How true the confidence of a row is, and below it whether it tells right from wrong."""

    title: str
    reliability: Markup
    histogram: Markup | None
    caption: str


@dataclass(frozen=True)
class SetPart:
    """All that the page shows of one set of images."""

    name: str
    heads: list[tuple[str, str]]  # column and the direction that is better
    groups: list[tuple[str, list[GridLine]]]
    panels: list[Drawing]
    diagrams: list[Diagram]


def write_grid(
    path: Path,
    title: str,
    facts: list[tuple[str, str]],
    rows: Sequence[Row],
    verdicts: Sequence[str],
    settings: str | None,
    command: str | None,
) -> None:
    """Write the page of a comparison, whole or not at all."""
    write_text(path, render_grid(title, facts, rows, verdicts, settings, command, date.today()))


def render_grid(
    title: str,
    facts: list[tuple[str, str]],
    rows: Sequence[Row],
    verdicts: Sequence[str],
    settings: str | None,
    command: str | None,
    made: date,
) -> str:
    """Return the page as text. Everything that comes from names, paths and settings is escaped."""
    sets = [_part(name, found) for name, found in by_set(rows).items()]
    values: dict[str, Any] = {
        "title": shorten(title, 200),
        "facts": facts,
        "headline": _headline(rows),
        "verdicts": _by_name(verdicts, [part.name for part in sets]),
        "sets": sets,
        "several_seeds": any(row.seeds > 1 for row in rows),
        "fewer_seeds": len({row.seeds for row in rows}) > 1,
        "uses_labels": any(row.uses_labels for row in rows),
        "ours": any(row.group == OURS for row in rows) and any(row.group != OURS for row in rows),
        "incomplete": any(partial_words(row, column) for row in rows for column in row.values),
        "measured_with_labels": any(row.values.get("ACC") is not None for row in rows),
        "settings": shorten(settings or "", MOST_SETTINGS),
        "command": command,
    }
    contents = [
        ("summary", "In short", True),
        ("figures", "Figures", sets),
        ("charts", "Charts", any(part.panels for part in sets)),
        ("reliability", "Reliability", any(part.diagrams for part in sets)),
        ("settings", "Settings", values["settings"] or command),
    ]
    return render_template("grid.html", contents, values, made)


def pool(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Bins and histogram of several seeds as one: counts are added up, means are weighted with them."""
    binned = [each["bins"] for each in figures if each.get("bins")]
    pooled: dict[str, Any] = {}
    if binned:
        counts = np.array([bins["count"] for bins in binned])
        total = counts.sum(axis=0)
        pooled["bins"] = {"count": total.tolist()}
        for name in ("confidence", "accuracy"):
            # Where a bin is empty its mean is None: it weighs nothing.
            means = np.array([[value if known(value) else 0.0 for value in bins[name]] for bins in binned])
            told = any(known(value) for bins in binned for value in bins[name])
            sums = (means * counts).sum(axis=0)
            pooled["bins"][name] = [float(s / n) if n and told else None for s, n in zip(sums, total, strict=True)]
    shown = [each["histogram"] for each in figures if (each.get("histogram") or {}).get("right") is not None]
    if shown:
        pooled["histogram"] = {
            name: np.array([histogram[name] for histogram in shown]).sum(axis=0).tolist() for name in ("right", "wrong")
        }
    return pooled


def _headline(rows: Sequence[Row]) -> str:
    if not rows:
        return "No run is finished yet."
    methods, sets = len({row.method for row in rows}), len(by_set(rows))
    return f"{count(methods, 'method')} on {count(sets, 'set')} of images, {seeds_words(rows)} each."


def _by_name(verdicts: Sequence[str], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Sentences that follow each other and begin with the name of the same set, below that name."""
    named = [(next((name for name in names if verdict.startswith(f"{name}: ")), ""), verdict) for verdict in verdicts]
    return [
        (name, [_unbroken(verdict.removeprefix(f"{name}: ") if name else verdict) for _, verdict in found])
        for name, found in groupby(named, key=lambda pair: pair[0])
    ]


def _unbroken(sentence: str) -> str:
    return sentence.replace(" ± ", f"{SPACE}±{SPACE}").replace(" %", f"{SPACE}%")


def _part(name: str, rows: Sequence[Row]) -> SetPart:
    columns = columns_of(rows)
    places = [ranks(rows, column) for column in columns]
    lines = [
        (row.group, _line(row, label, columns, [place[index] for place in places]))
        for index, (row, label) in enumerate(zip(rows, row_names(rows), strict=True))
    ]
    groups = [(group, [line for _, line in found]) for group, found in groupby(lines, key=lambda pair: pair[0])]
    heads = [(TITLES.get(column, column), better(column)) for column in columns]
    return SetPart(name, heads, groups, _panels(name, rows), _diagrams(rows))


def _line(row: Row, name: str, columns: Sequence[str], places: Sequence[int]) -> GridLine:
    cells = []
    for column, place in zip(columns, places, strict=True):
        value = row.values.get(column)
        deviation = deviation_words(column, value)
        spread = (f"± {deviation}" if deviation else "") + partial_words(row, column)
        cells.append(GridCell(mean_words(column, value) or DASH, spread, place))
    return GridLine(name, row.method, row.uses_labels, row.group == OURS, row.seeds, cells)


def _panels(name: str, rows: Sequence[Row]) -> list[Drawing]:
    columns = columns_of(rows)
    found = []
    for column, title in [panel for panel in PANELS if panel[0] in columns][:MOST_PANELS]:
        band = close_band(rows) if column == "ACC" else None
        found.append(Drawing(title, dot_panel(f"{title}: {name}", rows, column, band), ""))
    if SECONDS in columns:
        found.append(Drawing("Time of a run", bar_panel(f"Time: {name}", rows, SECONDS), ""))
    return found


def _diagrams(rows: Sequence[Row]) -> list[Diagram]:
    found = []
    for row, title in zip(rows, row_names(rows), strict=True):
        # ECE as in the table, the mean over the seeds: pooled bins would give a smaller one.
        means = {key: value.mean for key in ("ACC", "CONF", "ECE") if (value := row.values.get(key)) is not None}
        figures = {**means, **pool(row.figures)}
        if figures.get("bins") and known(figures.get("CONF")):
            histogram = right_wrong_histogram(title, figures) if figures.get("histogram") else None
            name = f"{title}*" if row.uses_labels else title
            found.append(Diagram(name, reliability_diagram(title, figures), histogram, caption_diagram(figures)))
    return found
