"""Tables of figures: before against after, and models side by side, with the better figure marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cdc_plugin.metrics.over_seeds import HIGHER, LOWER, NEITHER
from cdc_plugin.report.words import DASH, known, number, percent


@dataclass(frozen=True)
class Measure:
    """One row of the tables."""

    key: str
    name: str
    better: str
    meaning: str

    def words(self, value: Any) -> str:
        return number(value) if self.key in ("BRIER", "NLL") else percent(value)


MEASURES = [
    Measure("ACC", "accuracy", HIGHER, "images in the cluster that stands for their class"),
    Measure("NMI", "normalised mutual information", HIGHER, "what clusters tell of classes; 100 % is all"),
    Measure("ARI", "adjusted Rand index", HIGHER, "pairs of images treated alike, corrected for chance"),
    Measure("CONF", "mean confidence", NEITHER, "good if close to the accuracy, not if high"),
    Measure("ECE", "expected calibration error", LOWER, "mean gap between confidence and accuracy, 15 equal bins"),
    Measure("AECE", "adaptive ECE", LOWER, "the same with equally many images in each bin"),
    Measure("CECE", "class-wise ECE", LOWER, "the same over the probabilities of all clusters"),
    Measure("BRIER", "Brier score", LOWER, "squared error of the probabilities"),
    Measure("NLL", "negative log-likelihood", LOWER, "punishes being sure and wrong"),
    Measure(
        "AUROC",
        "failure rejection, area under ROC",
        HIGHER,
        "chance that a right image has more confidence than a wrong one",
    ),
    Measure("AURC", "failure rejection, risk over coverage", LOWER, "mean error among the surest images"),
    Measure(
        "FPR95", "failure rejection, false positives", LOWER, "wrong images kept where 95 % of the right ones are kept"
    ),
]


@dataclass(frozen=True)
class Cell:
    """A figure as text, and whether it is the better one."""

    words: str
    better: bool = False


@dataclass(frozen=True)
class Column:
    """Heading of one or two columns: a title, and below it the parts that exist."""

    title: str
    parts: list[str]


@dataclass(frozen=True)
class FigureTable:
    """What the template needs to write a table."""

    columns: list[Column]
    rows: list[tuple[Measure, list[Cell]]]


Row = tuple[str, dict[str, Any] | None, dict[str, Any] | None]


def before_after_table(rows: list[Row]) -> FigureTable:
    """Each title's figures before and after; the better of the two is marked, unless they read the same."""
    columns, groups = [], []
    for title, before, after in rows:
        both = (("before", before), ("after", after))
        parts = [(name, figures) for name, figures in both if figures is not None and _measured([figures])]
        if parts:
            # A model without "before" or "after" needs no second heading.
            columns.append(Column(title, [name for name, _ in parts] if len(parts) == 2 else [""]))
            groups.append([figures for _, figures in parts])
    table = []
    for measure in _measured([figures for group in groups for figures in group]):
        cells = [cell for group in groups for cell in marked(measure, [figures.get(measure.key) for figures in group])]
        table.append((measure, cells))
    return FigureTable(columns, table)


def side_by_side_table(models: list[tuple[str, list[tuple[str, dict[str, Any]]]]]) -> FigureTable:
    """Name of every model and figures of its heads; the best over all of them is marked."""
    columns = [Column(name, [title for title, _ in heads]) for name, heads in models if heads]
    every = [figures for _, heads in models for _, figures in heads]
    rows = [(measure, marked(measure, [figures.get(measure.key) for figures in every])) for measure in _measured(every)]
    return FigureTable(columns, rows)


def _measured(every: Sequence[dict[str, Any]]) -> list[Measure]:
    """The measures that at least one of the figures has."""
    return [measure for measure in MEASURES if any(known(figures.get(measure.key)) for figures in every)]


def marked(measure: Measure, values: list[Any]) -> list[Cell]:
    texts = [measure.words(value) for value in values]
    numbers = [value for value in values if known(value)]
    # What reads the same is not called better.
    if measure.better == NEITHER or len({text for text in texts if text != DASH}) < 2:
        return [Cell(text) for text in texts]
    best = measure.words(max(numbers) if measure.better == HIGHER else min(numbers))
    return [Cell(text, text == best) for text in texts]
