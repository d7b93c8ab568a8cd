"""report.html and the side-by-side page: one file each, complete in itself, that loads nothing and runs no script."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from cdc_plugin import __version__
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.metrics import correct_samples
from cdc_plugin.metrics.selective import accept_to_target
from cdc_plugin.report.charts.clusters import cluster_chart, cluster_means
from cdc_plugin.report.charts.confidence import caution_chart, reliability_diagram, right_wrong_histogram
from cdc_plugin.report.charts.training import training_charts
from cdc_plugin.report.gallery.cards import ClusterCard, cluster_cards, confused_pairs, look_first
from cdc_plugin.report.outside_table import outside_rows
from cdc_plugin.report.page_data import ComparedModel, PageData
from cdc_plugin.report.quality_card import side_by_side, statements, training_warnings, warnings
from cdc_plugin.report.tables import before_after_table, side_by_side_table
from cdc_plugin.report.words import (
    TARGET,
    cluster_words,
    count,
    headline,
    known,
    old_model_words,
    outlier_words,
    percent,
    shorten,
    writable,
)

UNFOLDED = 24  # so many clusters are shown at once; more come in groups
GROUP = 20
NOTABLE = 0.02  # below the target by more than this, a promise is called broken
NARROW = 5  # pictures in a row of a card that is a third of the page wide
MOST_SKIPPED = 200
MOST_SETTINGS = 100_000  # characters


@dataclass(frozen=True)
class Drawing:
    """A chart with the words around it."""

    title: str
    drawing: Markup
    caption: str


def write_page(path: Path, findings: PageData) -> None:
    """Write report.html, whole or not at all."""
    _write(path, render_page(findings, date.today()))


def write_comparison(path: Path, title: str, facts: list[tuple[str, str]], models: list[ComparedModel]) -> None:
    """Write the page that shows several models side by side, whole or not at all."""
    _write(path, render_comparison(title, facts, models, date.today()))


def render_page(findings: PageData, made: date) -> str:
    """The page as text. Everything that comes from names, paths and settings is escaped."""
    images, table = findings.images, findings.table
    labelled = images.labels is not None
    correct = None
    if images.labels is not None:
        correct = correct_samples(table["cluster"], images.labels, findings.probs.shape[1])
    sizes, confidences = cluster_means(table["cluster"], table["confidence"], findings.probs.shape[1])
    cards = [card for card in cluster_cards(findings) if card.typical]  # the others are in the chart only
    values: dict[str, Any] = {
        "title": shorten(findings.title, 200),
        "facts": findings.facts,
        "measured_with_labels": labelled,
        "headline": headline(table["confidence"]),
        "headline_note": _headline_note(table["confidence"], correct),
        "warnings": warnings(findings.label_free),
        "statements": statements(findings.label_free),
        "table": before_after_table(findings.rows),
        "old_model": old_model_words(findings.old_model),
        "diagrams": _diagrams(findings.diagrams),
        "histograms": _histograms(findings.diagrams),
        "caution": Drawing("", caution_chart(table["confidence"], correct), _caution_caption(correct)),
        "training": training_charts(findings.history),
        "training_warnings": training_warnings(findings.label_free),
        "cluster_words": cluster_words(sizes, confidences),
        "cluster_drawing": cluster_chart(sizes, confidences),
        "card_groups": _groups(cards),
        "card_grid": "broad" if any(len(card.typical) > NARROW for card in cards) else "",
        "pairs": confused_pairs(findings),
        "carded": {card.number for card in cards},
        "looks": look_first(findings),
        "outside": outside_rows([("", findings.outside)]),
        "outliers": outlier_words(table),
        "skipped": images.skipped[:MOST_SKIPPED],
        "skipped_words": _skipped_words(len(images.skipped)),
        "settings": shorten(findings.settings or "", MOST_SETTINGS),
        "command": findings.command,
    }
    contents = [
        ("summary", "In short", True),
        ("quality", "Quality", True),
        ("figures", "Figures", values["table"].rows),
        ("reliability", "Reliability", values["diagrams"]),
        ("caution", "Caution", True),
        ("training", "Training", values["training"]),
        ("clusters", "Clusters", True),
        ("gallery", "Gallery", values["card_groups"]),
        ("pairs", "Confused", values["pairs"]),
        ("look", "Look first", values["looks"]),
        ("outside", "Other images", values["outside"] or values["outliers"]),
        ("unread", "Unread files", values["skipped"]),
        ("settings", "Settings", values["settings"] or values["command"]),
    ]
    return _render("report.html", contents, values, made)


def render_comparison(title: str, facts: list[tuple[str, str]], models: list[ComparedModel], made: date) -> str:
    """The side-by-side page as text."""
    diagrams = [(f"{model.name}: {head}", figures) for model in models for head, figures in model.heads]
    values: dict[str, Any] = {
        "title": shorten(title, 200),
        "facts": facts,
        "models": models,
        "measured_with_labels": any(known(figures.get("ACC")) for _, figures in diagrams),
        "table": side_by_side_table([(model.name, model.heads) for model in models]),
        "diagrams": _diagrams(diagrams),
        "quality": side_by_side([model.label_free for model in models]),
        "warned": [(model.name, found) for model in models if (found := warnings(model.label_free))],
        "outside": outside_rows([(model.name, model.outside) for model in models]),
    }
    contents = [
        ("figures", "Figures", True),
        ("reliability", "Reliability", values["diagrams"]),
        ("quality", "Quality", values["quality"] or values["warned"]),
        ("outside", "Other images", values["outside"]),
    ]
    return _render("comparison.html", contents, values, made)


def _render(template: str, contents: list[tuple[str, str, Any]], values: dict[str, Any], made: date) -> str:
    shown = [(anchor, name) for anchor, name, content in contents if content]
    page = _templates().get_template(template)
    return writable(page.render(**values, contents=shown, version=__version__, made=made.isoformat()))


@functools.cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("cdc_plugin.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"percent": percent, "shorten": shorten, "counted": count}
    return templates


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="\n"))


def _headline_note(confidence: NDArray[np.floating], correct: NDArray[np.bool_] | None) -> str:
    """What "expected" means, and what labels say where there are any."""
    note = (
        "Expected accuracy is the mean of the model’s own confidence: a promise, for which no label is used. The "
        f"images counted are the largest set, surest first, whose mean reaches {percent(TARGET, 0)}."
    )
    if correct is None:
        return note
    chosen = accept_to_target(np.asarray(confidence, dtype=np.float64), TARGET).mask
    measured = f"{percent(float(correct.mean()))} of all images are right"
    if chosen.any() and not chosen.all():
        measured += f", and {percent(float(correct[chosen].mean()))} of those {int(chosen.sum()):,}"
    if chosen.any() and correct[chosen].mean() < TARGET - NOTABLE:
        measured += "; the promise is not kept"
    return f"{note} Measured with the labels of this data: {measured}."


def _caution_caption(correct: NDArray[np.bool_] | None) -> str:
    what = "The fewer images are used, surest first, the more of them should be right."
    if correct is None:
        return what
    return f"{what} Where the measured line runs below the expected one, the model promises too much."


def _diagrams(diagrams: list[tuple[str, dict[str, Any]]]) -> list[Drawing]:
    return [
        Drawing(title, reliability_diagram(title, figures), _diagram_caption(figures))
        for title, figures in diagrams
        if figures.get("bins") and known(figures.get("CONF"))
    ]


def _diagram_caption(figures: dict[str, Any]) -> str:
    confidence, accuracy = figures["CONF"], figures.get("ACC")
    if not known(accuracy):
        return f"Mean confidence {percent(confidence)}."
    gap = confidence - accuracy
    verdict = "on the whole neither too sure nor too cautious"
    if abs(gap) >= 0.01:
        verdict = f"on the whole too {'sure' if gap > 0 else 'cautious'} by {100 * abs(gap):.1f} points"
    return f"Confidence {percent(confidence)}, accuracy {percent(accuracy)}: {verdict}."


def _histograms(diagrams: list[tuple[str, dict[str, Any]]]) -> list[Drawing]:
    found = []
    for title, figures in diagrams:
        histogram = figures.get("histogram") or {}
        if histogram.get("right") is not None and histogram.get("wrong") is not None:
            auroc = figures.get("AUROC")
            caption = "Each side adds up to 100 %. The further apart they lie, the better doubt finds errors"
            caption += f": AUROC {percent(auroc)}." if known(auroc) else "."
            found.append(Drawing(title, right_wrong_histogram(title, figures), caption))
    return found


def _groups(cards: list[ClusterCard]) -> list[list[ClusterCard]]:
    size = len(cards) if len(cards) <= UNFOLDED else GROUP
    return [cards[start : start + size] for start in range(0, len(cards), size)] if cards else []


def _skipped_words(total: int) -> str:
    rest = total - MOST_SKIPPED
    words = f"{count(total, 'file')} left out, in no figure on this page."
    return f"{words} The first {MOST_SKIPPED} are named here, {rest:,} more are in report.json." if rest > 0 else words
