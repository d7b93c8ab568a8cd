"""The page of a comparison of methods: sentences, tables, small charts, and a reliability diagram per row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
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
from cdc_plugin.report.run_page import MOST_SETTINGS, Drawing, caption_diagram, render_template
from cdc_plugin.report.words import DASH, SPACE, TITLES, count, known, say_page, shorten

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
    """A row of the table; ``seeds`` is empty if all rows have equally many."""

    name: str
    method: str
    uses_labels: bool
    ours: bool
    seeds: str
    cells: list[GridCell]


@dataclass(frozen=True)
class SetPart:
    """All that the page shows of one set of images."""

    name: str
    heads: list[tuple[str, str]]  # column and the direction that is better
    groups: list[tuple[str, list[GridLine]]]
    panels: list[Drawing]
    diagrams: list[Drawing]  # how true the confidence of a row is, and below it whether it tells right from wrong


def render_grid(
    title: str,
    facts: list[tuple[str, str]],
    rows: Sequence[Row],
    verdicts: Mapping[str, Sequence[str]],
    settings: str | None,
    command: str | None,
    noun: str = "image",
) -> str:
    """Return the page as text. Everything that comes from names, paths and settings is escaped."""
    fewer = len({row.seeds for row in rows}) > 1
    sets = [_build_part(name, members, fewer) for name, members in by_set(rows).items()]
    values: dict[str, Any] = {
        "headline": _headline(rows),
        "verdicts": [
            (shorten(name, 80) if len(verdicts) > 1 else "", [_unbroken(sentence) for sentence in sentences])
            for name, sentences in verdicts.items()
        ],
        "sets": sets,
        "several_seeds": any(row.seeds > 1 for row in rows),
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
    return say_page(render_template("grid.html", title, facts, contents, values), noun)


def pool(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pool bins and histograms of several seeds: counts are added up, means are weighted with them."""
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


def _unbroken(sentence: str) -> str:
    return sentence.replace(" ± ", f"{SPACE}±{SPACE}").replace(" %", f"{SPACE}%")


def _build_part(name: str, rows: Sequence[Row], name_seeds: bool) -> SetPart:
    columns = columns_of(rows)
    places = [ranks(rows, column) for column in columns]
    lines = [
        (row.group, _build_line(row, label, columns, [place[index] for place in places], name_seeds))
        for index, (row, label) in enumerate(zip(rows, row_names(rows), strict=True))
    ]
    groups = [
        (shorten(group, 60), [line for _, line in members])
        for group, members in groupby(lines, key=lambda pair: pair[0])
    ]
    heads = [(shorten(TITLES.get(column, column), 40), better(column)) for column in columns]
    return SetPart(shorten(name, 80), heads, groups, _draw_panels(name, rows, columns), _draw_diagrams(rows))


def _build_line(row: Row, name: str, columns: Sequence[str], places: Sequence[int], name_seeds: bool) -> GridLine:
    cells = []
    for column, place in zip(columns, places, strict=True):
        value = row.values.get(column)
        deviation = deviation_words(column, value)
        spread = (f"± {deviation}" if deviation else "") + partial_words(row, column)
        cells.append(GridCell(mean_words(column, value) or DASH, spread, place))
    seeds = count(row.seeds, "seed") if name_seeds else ""
    return GridLine(shorten(name, 60), shorten(row.method, 200), row.uses_labels, row.group == OURS, seeds, cells)


def _draw_panels(name: str, rows: Sequence[Row], columns: Sequence[str]) -> list[Drawing]:
    panels = []
    for column, title in [panel for panel in PANELS if panel[0] in columns][:MOST_PANELS]:
        band = close_band(rows) if column == "ACC" else None
        panels.append(Drawing(title, dot_panel(f"{title}: {name}", rows, column, band), ""))
    if SECONDS in columns:
        panels.append(Drawing("Time of a run", bar_panel(f"Time: {name}", rows, SECONDS), ""))
    return panels


def _draw_diagrams(rows: Sequence[Row]) -> list[Drawing]:
    drawings = []
    for row, title in zip(rows, row_names(rows), strict=True):
        # ECE as in the table, the mean over the seeds: pooled bins would give a smaller one.
        means = {key: value.mean for key in ("ACC", "CONF", "ECE") if (value := row.values.get(key)) is not None}
        figures = {**means, **pool(row.figures)}
        if figures.get("bins") and known(figures.get("CONF")):
            histogram = right_wrong_histogram(title, figures) if figures.get("histogram") else ""
            both = Markup("{}\n{}").format(reliability_diagram(title, figures), histogram)
            name = f"{title}*" if row.uses_labels else title
            drawings.append(Drawing(shorten(name, 80), both, caption_diagram(figures)))
    return drawings
