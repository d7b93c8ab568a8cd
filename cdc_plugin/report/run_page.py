"""The page of one model: a single file, complete in itself, that loads nothing and runs no script."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from cdc_plugin import __version__
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.data.images import ImageSet
from cdc_plugin.metrics import correct_samples
from cdc_plugin.metrics.confidence import accept_to_target
from cdc_plugin.report.charts import (
    caution_chart,
    cluster_chart,
    cluster_means,
    reliability_diagram,
    right_wrong_histogram,
    training_charts,
)
from cdc_plugin.report.gallery import ClusterCard, cluster_cards, confused_pairs, look_first
from cdc_plugin.report.page_data import FigureRow, PageData
from cdc_plugin.report.tables import before_after_table, outside_rows, statements, training_warnings, warnings
from cdc_plugin.report.words import (
    TARGET,
    TITLES,
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


def page_of_run(
    metrics: dict[str, Any],
    table: np.recarray,
    probs: NDArray[np.float32],
    images: ImageSet,
    history: list[dict[str, Any]],
    *,
    backbone: str,
    settings: str,
    command: str | None,
) -> PageData:
    """Gather what the page of a finished ``cdc-refine`` run shows.

    Args:
        metrics: the content of report.json.
        probs: (N, C) of the calibration head.
        backbone: what it is called on the page.
    """
    # Of all epochs: a resumed run has computed some of them before.
    minutes, seconds = divmod(round(sum(epoch.get("seconds", 0) for epoch in history)), 60)
    facts = [
        *_image_facts(metrics),
        ("backbone", backbone),
        ("training", f"{metrics['epochs']} epochs, seed {metrics['seed']}, {minutes} min {seconds:02d} s"),
        ("labels", "for this report only" if metrics["labels"] else "none"),
    ]
    return PageData(
        title=_title(metrics),
        facts=facts,
        rows=_before_after_rows(metrics),
        diagrams=_before_after_diagrams(metrics),
        label_free=metrics["label_free"],
        table=table,
        probs=probs,
        images=images,
        history=history,
        settings=settings,
        command=command,
        old_model=metrics["old_model"],
    )


def page_of_evaluation(
    metrics: dict[str, Any],
    table: np.recarray,
    probs: NDArray[np.float32],
    images: ImageSet,
    *,
    history: list[dict[str, Any]],
    settings: str | None,
    command: str | None,
) -> PageData:
    """Gather what the page of ``cdc-evaluate`` shows of one model.

    Args:
        history, settings: of the run that refined it, where that was on these images.
    """
    model, after, classes = metrics["model"], metrics["after"], metrics["classes"]
    mean, std = (" ".join(f"{value:.3g}" for value in model[key]) for key in ("mean", "std"))
    facts = [
        *_image_facts(metrics),
        ("model", f"{model['path'] or 'given in Python'} ({model['writer']})"),
        ("network", f"{model['network']}; input {model['input_size']} px, mean {mean}, std {std}"),
        ("labels", "none" if classes is None else f"{classes} classes, for this report only"),
    ]
    rows: list[FigureRow] = [(TITLES[key], None, figures) for key, figures in after.items()]
    diagrams = [(TITLES[key], figures) for key, figures in after.items() if key != "kmeans"]
    return PageData(
        title=_title(metrics),
        facts=facts,
        rows=_before_after_rows(metrics) if metrics["before"] else rows,
        diagrams=_before_after_diagrams(metrics) if metrics["before"] else diagrams,
        label_free=metrics["label_free"],
        table=table,
        probs=probs,
        images=images,
        history=history,
        settings=settings,
        command=command,
        outside=metrics["outside"],
        old_model=metrics["old_model"],
    )


def _title(metrics: dict[str, Any]) -> str:
    return f"{Path(metrics['data']).name or metrics['data']} in {metrics['clusters']} clusters"


def _image_facts(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    skipped = len(metrics["skipped"])
    unreadable = f", {skipped:,} could not be read" if skipped else ""
    return [
        ("images", f"{metrics['images']:,} from {metrics['data']}{unreadable}"),
        ("clusters", str(metrics["clusters"])),
    ]


def _before_after_rows(metrics: dict[str, Any]) -> list[FigureRow]:
    """Return the rows of k-means and both heads; an old model comes first, where there was one."""
    rows: list[FigureRow] = [
        (TITLES[key], figures, metrics["after"].get(key)) for key, figures in metrics["before"].items()
    ]
    old = metrics["old_model"]
    return rows if old is None else [(f"old model ({old['writer']})", old, None), *rows]


def _before_after_diagrams(metrics: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return title and figures of the old model, of the start and of both heads at the end."""
    old = metrics["old_model"]
    return [
        *([("Old model", old)] if old is not None else []),
        ("Calibration head, at the start", metrics["before"]["calibration_head"]),
        ("Clustering head, at the end", metrics["after"]["clustering_head"]),
        ("Calibration head, at the end", metrics["after"]["calibration_head"]),
    ]


def write_page(path: Path, findings: PageData) -> None:
    """Write report.html, whole or not at all."""
    write_text(path, render_page(findings, date.today()))


def render_page(findings: PageData, made: date) -> str:
    """Return the page as text. Everything that comes from names, paths and settings is escaped."""
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
        "diagrams": draw_diagrams(findings.diagrams),
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
    return render_template("report.html", contents, values, made)


def render_template(template: str, contents: list[tuple[str, str, Any]], values: dict[str, Any], made: date) -> str:
    shown = [(anchor, name) for anchor, name, content in contents if content]
    page = _templates().get_template(template)
    text = page.render(**values, contents=shown, version=__version__, made=made.isoformat())
    return writable(text.lstrip())


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
    style = (files("cdc_plugin.report") / "templates" / "style.css").read_text(encoding="utf-8")
    templates.globals["style"] = Markup(style)
    return templates


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="\n"))


def _headline_note(confidence: NDArray[np.floating], correct: NDArray[np.bool_] | None) -> str:
    """Return what "expected" means, and what labels say where there are any."""
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


def draw_diagrams(diagrams: list[tuple[str, dict[str, Any]]]) -> list[Drawing]:
    return [
        Drawing(title, reliability_diagram(title, figures), caption_diagram(figures))
        for title, figures in diagrams
        if figures.get("bins") and known(figures.get("CONF"))
    ]


def caption_diagram(figures: dict[str, Any]) -> str:
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
