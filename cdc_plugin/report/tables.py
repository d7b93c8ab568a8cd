"""Tables of a page: figures before and after, models side by side, outside data, and the quality card in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cdc_plugin.metrics.over_seeds import HIGHER, LOWER, NEITHER
from cdc_plugin.report.page_data import FigureRow
from cdc_plugin.report.words import DASH, SPACE, TITLES, known, number, percent


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
SCORES = [Measure("AUROC", "", HIGHER, ""), Measure("FPR95", "", LOWER, ""), Measure("AUPR", "", HIGHER, "")]
# Key in the card, name, what it says, what it can not say.
STATEMENTS = [
    (
        "expected_accuracy",
        "expected accuracy",
        "Mean confidence of the answers: the share of images that the model itself expects to be right.",
        "It is an estimate, not a measurement; on images of another kind it may be far off.",
    ),
    (
        "clustering_confidence",
        "confidence before calibration",
        "Mean confidence of the clustering head. Far from the expected accuracy, the heads differ on how hard this is.",
        "Neither of the two need be true.",
    ),
    (
        "heads_agree",
        "agreement of the heads",
        "Images that the clustering head and the calibration head put into the same cluster.",
        "Both share one backbone and can be wrong together.",
    ),
    (
        "augmentation_agreement",
        "agreement under augmentation",
        "Images that stay in their cluster when they are changed a little, as in training.",
        "The network was trained to overlook these changes; stable is not the same as right.",
    ),
    (
        "neighbour_consistency",
        "agreement with neighbours",
        "How many of an image's nearest images in feature space are in the same cluster.",
        "Low values show clusters cut through dense regions; high ones do not show that the regions mean anything.",
    ),
    (
        "kmeans_agreement",
        "agreement with k-means",
        "Images that k-means on the features puts into the matching cluster.",
        "Two methods that agree have seen the same structure; it need not be the one you look for.",
    ),
    (
        "start_agreement",
        "agreement with the start",
        "Images that k-means on the features before training puts into the matching cluster.",
        "Training is meant to move images; much movement may be progress or drift.",
    ),
    (
        "stability",
        "stability",
        "Images whose cluster did not change over the last epochs.",
        "Training that has settled may have settled on something wrong.",
    ),
    (
        "trusted_share",
        "trusted images",
        "Images that the model would take as pseudo-labels.",
        "It follows from the confidence and is no second opinion.",
    ),
    (
        "balance",
        "balance of the sizes",
        "100 % if all clusters are equally large, towards 0 if one holds everything.",
        "Your data may be unbalanced by nature; then less than 100 % is right.",
    ),
    (
        "largest_cluster_share",
        "largest cluster",
        "Share of the images in the largest cluster.",
        "A large cluster may be a large class, or several classes in one.",
    ),
    (
        "empty_clusters",
        "empty clusters",
        "Clusters without any image.",
        "None empty does not mean that the number of clusters is right.",
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


def before_after_table(rows: Sequence[FigureRow]) -> FigureTable:
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
    """Return the measures that at least one of the figures has."""
    return [measure for measure in MEASURES if any(known(figures.get(measure.key)) for figures in every)]


def marked(measure: Measure, values: list[Any]) -> list[Cell]:
    texts = [measure.words(value) for value in values]
    numbers = [value for value in values if known(value)]
    # What reads the same is not called better.
    if measure.better == NEITHER or len({text for text in texts if text != DASH}) < 2:
        return [Cell(text) for text in texts]
    best = measure.words(max(numbers) if measure.better == HIGHER else min(numbers))
    return [Cell(text, text == best) for text in texts]


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


@dataclass(frozen=True)
class Statement:
    """One number of the card."""

    name: str
    value: str
    says: str
    silent: str  # what it does not say


def statements(card: dict[str, Any]) -> list[Statement]:
    """Return the numbers that were measured, in the order of their weight."""
    return [
        Statement(name, f"{card[key]:,}" if key == "empty_clusters" else percent(card[key]), says, silent)
        for key, name, says, silent in STATEMENTS
        if known(card.get(key))
    ]


def warnings(card: dict[str, Any]) -> list[str]:
    """Return the warnings about the model as sentences in which no number is parted from its per cent."""
    found = [_sentence(warning) for warning in card.get("warnings") or [] if "epoch" not in warning]
    during = len(training_warnings(card))
    if during:
        found.append(f"Training gave {f'{during} warnings' if during > 1 else 'a warning'}: see there.")
    return found


def training_warnings(card: dict[str, Any]) -> list[str]:
    """Return what was noticed while a run trained, epoch by epoch."""
    return [_sentence(warning) for warning in card.get("warnings") or [] if "epoch" in warning]


def _sentence(warning: dict[str, Any]) -> str:
    return str(warning["text"]).replace(" %", f"{SPACE}%")


def side_by_side(cards: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Name and the values of all models, for every number that at least one of them has."""
    named = [{statement.name: statement.value for statement in statements(card)} for card in cards]
    order = [name for _, name, _, _ in STATEMENTS if any(name in values for values in named)]
    return [(name, [values.get(name, DASH) for values in named]) for name in order]
