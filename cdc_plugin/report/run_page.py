"""The page of one model: a single file, complete in itself, that loads nothing and runs no script."""

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
from cdc_plugin.data.images import ImageSet
from cdc_plugin.metrics import correct_samples, match_clusters, risk_coverage_curve
from cdc_plugin.metrics.confidence import accept_inside, accept_to_target
from cdc_plugin.report.charts import (
    CURVE_POINTS,
    caution_chart,
    cluster_chart,
    reliability_diagram,
    right_wrong_histogram,
    training_charts,
)
from cdc_plugin.report.gallery import cluster_cards, confused_pairs, look_first, show_changes
from cdc_plugin.report.page_data import ClusterFigures, FigureRow, PageData
from cdc_plugin.report.tree import draw_trees
from cdc_plugin.report.words import (
    TARGET,
    TITLES,
    before_after_table,
    describe_clusters,
    describe_count,
    describe_interval,
    describe_old_model,
    describe_outliers,
    describe_sizes,
    describe_skipped,
    describe_spaces,
    headline,
    known,
    outside_rows,
    percent,
    quality_figures,
    say_page,
    shorten,
    size_rows,
    split_warnings,
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


def collect_page(
    metrics: dict[str, Any],
    table: np.recarray,
    probs: NDArray[np.float32],
    images: ImageSet,
    *,
    history: list[dict[str, Any]],
    settings: str | None,
    command: str | None,
    backbone: str | None = None,
) -> PageData:
    """Gather what the page of a model shows, from its report.json and predictions.

    History and settings are those of the run that refined it, if that was on these images; ``backbone`` is its name on
    the page of a run, None on that of an evaluation. An old model, if there was one, comes first.
    """
    before, after, old, skipped = metrics["before"], metrics["after"], metrics["old_model"], len(metrics["skipped"])
    unreadable = f", {skipped:,} could not be read" if skipped else ""
    if before:
        rows: list[FigureRow] = [(TITLES[key], figures, after.get(key)) for key, figures in before.items()]
        diagrams = [
            ("Calibration head, at the start", before["calibration_head"]),
            ("Clustering head, at the end", after["clustering_head"]),
            ("Calibration head, at the end", after["calibration_head"]),
        ]
        if old is not None:
            rows.insert(0, (f"old model ({old['writer']})", old, None))
            diagrams.insert(0, ("Old model", old))
    else:
        rows = [(TITLES[key], None, figures) for key, figures in after.items()]
        diagrams = [(TITLES[key], figures) for key, figures in after.items() if key != "kmeans"]
    facts = [
        ("images", f"{metrics['images']:,} from {metrics['data']}{unreadable}"),
        *(("mind", warning["text"]) for warning in metrics["data_warnings"]),
        ("clusters", str(metrics["clusters"])),
        *(("space", line) for line in describe_spaces(metrics)),
        *(_describe_model(metrics) if backbone is None else _describe_run(metrics, history, backbone)),
    ]
    return PageData(
        title=f"{Path(metrics['data']).name or metrics['data']} in {metrics['clusters']} clusters",
        facts=facts,
        rows=rows,
        diagrams=diagrams,
        label_free=metrics["label_free"],
        table=table,
        probs=probs,
        images=images,
        history=history,
        settings=settings,
        command=command,
        outside=metrics.get("outside", []),
        old_model=old,
        count=metrics.get("count"),
        next_changes=metrics.get("next_changes") or {},
        hierarchy=metrics.get("hierarchy"),
        sizes=metrics.get("sizes"),
    )


def _describe_run(metrics: dict[str, Any], history: list[dict[str, Any]], backbone: str) -> list[tuple[str, str]]:
    # Of all epochs: a resumed run has computed some of them before.
    minutes, seconds = divmod(round(sum(epoch.get("seconds", 0) for epoch in history)), 60)
    return [
        ("backbone", backbone),
        ("training", f"{metrics['epochs']} epochs, seed {metrics['seed']}, {minutes} min {seconds:02d} s"),
        ("labels", "for this report only" if metrics["labels"] else "none"),
    ]


def _describe_model(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    model, classes = metrics["model"], metrics["classes"]
    mean, std = (" ".join(f"{value:.3g}" for value in model[key]) for key in ("mean", "std"))
    return [
        ("model", f"{model['path'] or 'given in Python'} ({model['writer']})"),
        ("network", f"{model['network']}; input {model['input_size']} px, mean {mean}, std {std}"),
        ("labels", "none" if classes is None else f"{classes} classes, for this report only"),
    ]


def render_page(page: PageData) -> str:
    """Return the page as text. Everything that comes from names, paths and settings is escaped."""
    images, table, labels = page.images, page.table, page.images.labels
    confidence = table["confidence"]
    outlier = table["outlier"] if "outlier" in (table.dtype.names or ()) else None
    accepted = accept_inside(outlier, np.asarray(confidence, dtype=np.float64), accept_to_target, TARGET).mask
    correct = None if labels is None else correct_samples(table["cluster"], labels, page.probs.shape[1])
    measured = None
    if correct is not None:
        curve = risk_coverage_curve(np.clip(np.asarray(confidence, dtype=np.float64), 0, 1), correct, CURVE_POINTS)
        measured = list(zip(curve.coverage.tolist(), (1 - curve.risk).tolist(), strict=True))
    clusters = measure_clusters(page, correct)
    cards = cluster_cards(page, clusters)
    together = len(cards) if 0 < len(cards) <= UNFOLDED else GROUP
    about_model, during_training = split_warnings(page.label_free)
    values: dict[str, Any] = {
        "measured_with_labels": labels is not None,
        "headline": headline(confidence, int(accepted.sum()), describe_interval(page.label_free)),
        "measured": _check_promise(accepted, correct),
        "warnings": about_model,
        "quality": quality_figures(page.label_free),
        "table": before_after_table(page.rows),
        "old_model": describe_old_model(page.old_model),
        "diagrams": draw_diagrams(page.diagrams),
        "histograms": _draw_histograms(page.diagrams),
        "caution": caution_chart(confidence, measured),
        "training": training_charts(page.history),
        "training_warnings": during_training,
        "cluster_words": describe_clusters(clusters),
        "cluster_drawing": cluster_chart(clusters),
        "size_words": describe_sizes(page.sizes),
        "size_rows": size_rows(page.sizes),
        "card_groups": [cards[start : start + together] for start in range(0, len(cards), together)],
        "card_grid": "broad" if any(len(card.typical) > NARROW for card in cards) else "",
        "trees": draw_trees(page.hierarchy, clusters, cards),
        "pairs": confused_pairs(page),
        "carded": {card.number for card in cards},
        "looks": look_first(page),
        "count": describe_count(page.count),
        "changes": show_changes(page),
        "outside": outside_rows([("", page.outside)]),
        "outliers": describe_outliers(table),
        "skipped": [(shorten(name, 200), shorten(reason, 200)) for name, reason in images.skipped[:MOST_SKIPPED]],
        "skipped_words": describe_skipped(len(images.skipped), MOST_SKIPPED),
        "settings": shorten(page.settings or "", MOST_SETTINGS),
        "command": page.command,
    }
    contents = [
        ("summary", "In short", True),
        ("quality", "Quality", True),
        ("figures", "Figures", values["table"].rows),
        ("reliability", "Reliability", values["diagrams"]),
        ("caution", "Caution", True),
        ("training", "Training", values["training"]),
        ("clusters", "Clusters", True),
        ("levels", "Levels", values["trees"]),
        ("gallery", "Gallery", values["card_groups"]),
        ("pairs", "Confused", values["pairs"]),
        ("number", "How many", values["changes"] or values["count"]),
        ("look", "Look first", values["looks"]),
        ("outside", "Other images", values["outside"] or values["outliers"]),
        ("unread", "Unread files", values["skipped"]),
        ("settings", "Settings", values["settings"] or values["command"]),
    ]
    return say_page(render_template("report.html", page.title, page.facts, contents, values), images.noun)


def measure_clusters(page: PageData, correct: NDArray[np.bool_] | None) -> list[ClusterFigures]:
    """Return size and mean confidence of every cluster and, if labels match it with a class, that and its accuracy."""
    cluster, total = page.table["cluster"], page.probs.shape[1]
    labels, names = page.images.labels, page.images.class_names
    sizes = np.bincount(cluster, minlength=total).tolist()
    sums = np.bincount(cluster, weights=page.table["confidence"], minlength=total)
    means = [float(sums[number] / size) if size else None for number, size in enumerate(sizes)]
    figures = [ClusterFigures(size, mean) for size, mean in zip(sizes, means, strict=True)]
    if labels is not None and correct is not None:
        right = np.bincount(cluster, weights=correct, minlength=total)
        for number, (label, size) in enumerate(zip(match_clusters(cluster, labels, total), sizes, strict=True)):
            if size and (label >= 0 or right[number]):
                name = names[label] if names and 0 <= label < len(names) else f"class {label}"
                figures[number] = ClusterFigures(size, means[number], name, float(right[number] / size))
    return figures


def render_template(
    template: str,
    title: str,
    facts: list[tuple[str, str]],
    contents: list[tuple[str, str, Any]],
    values: dict[str, Any],
) -> str:
    """Return the page as text; ``contents`` are anchor and name of each part, and whether it has anything to show."""
    page = _get_templates().get_template(template)
    text = page.render(
        **values,
        title=shorten(title, 200),
        facts=[(name, shorten(value, 400)) for name, value in facts],
        contents=[(anchor, name) for anchor, name, content in contents if content],
        version=__version__,
        made=date.today().isoformat(),
    )
    return writable(text.lstrip())


@functools.cache
def _get_templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("cdc_plugin.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (files("cdc_plugin.report") / "templates" / "style.css").read_text(encoding="utf-8")
    templates.globals["style"] = Markup(style)
    return templates


def _check_promise(accepted: NDArray[np.bool_], correct: NDArray[np.bool_] | None) -> str | None:
    """Return how many of all and of the accepted images are right; None without labels."""
    if correct is None:
        return None
    measured = f"{percent(float(correct.mean()))} of all images are right"
    if accepted.any() and not accepted.all():
        measured += f", and {percent(float(correct[accepted].mean()))} of those {int(accepted.sum()):,}"
    if accepted.any() and correct[accepted].mean() < TARGET - NOTABLE:
        measured += "; the promise is not kept"
    return measured


def draw_diagrams(diagrams: list[tuple[str, dict[str, Any]]]) -> list[Drawing]:
    return [
        Drawing(shorten(title, 80), reliability_diagram(title, figures), caption_diagram(figures))
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


def _draw_histograms(diagrams: list[tuple[str, dict[str, Any]]]) -> list[Drawing]:
    drawings = []
    for title, figures in diagrams:
        histogram, auroc = figures.get("histogram") or {}, figures.get("AUROC")
        if histogram.get("right") is not None and histogram.get("wrong") is not None:
            caption = "Each side adds up to 100 %. The further apart they lie, the better doubt finds errors"
            caption += f": AUROC {percent(auroc)}." if known(auroc) else "."
            drawings.append(Drawing(shorten(title, 80), right_wrong_histogram(title, figures), caption))
    return drawings
