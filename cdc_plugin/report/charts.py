"""Draw charts as inline SVG: reliability (Fig. 1 of the paper), accuracy by coverage, clusters, training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from cdc_plugin.report.page_data import ClusterFigures
from cdc_plugin.report.words import SPACE, TARGET, count, known, percent

WIDTH = 320.0  # of every drawing
LEFT, PLOT_WIDTH = 44.0, 262.0
TENTHS = [(0.0, "0"), (0.2, "20"), (0.4, "40"), (0.6, "60"), (0.8, "80"), (1.0, "100")]
CURVE_POINTS = 100
Points = list[tuple[float, float]]
CLUSTER_PANEL = 110.0
MOST_HINTS = 500  # more bars than that are thinner than a pointer, and their hints heavier than the page
SECOND = 160.0  # where the panel of confidences begins
CURVE_LEFT, CURVE_WIDTH, CURVE_HEIGHT = 48.0, 258.0, 120.0
# Key of an epoch in metrics.jsonl, title, and what it is multiplied with.
CURVES = [
    ("clustering_loss", "Loss of the clustering head", 1.0),
    ("calibration_loss", "Loss of the calibration head", 1.0),
    ("selected", f"Images selected, in{SPACE}%", 100.0),
    ("confidence", f"Mean confidence, in{SPACE}%", 100.0),
    ("mini_clusters", "Mini-clusters a batch", 1.0),
    ("largest_cluster", f"Largest cluster, in{SPACE}%", 100.0),
    ("used_clusters", "Clusters with images", 1.0),
]


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
    """Return an element; ``class_`` and ``text_anchor`` are written ``class`` and ``text-anchor``, text is escaped."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _value(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, join(*children))


def join(*parts: Any) -> Markup:
    return Markup("").join(escape(part) for part in parts)


def chart(height: float, title: str, description: str, *children: Any) -> Markup:
    """Return a drawing that scales with its column; title and description are for those who cannot see it."""
    box = f"0 0 {WIDTH:g} {height:g}"
    return tag("svg", tag("title", title), tag("desc", description), *children, class_="chart", viewBox=box, role="img")


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def text(x: float | str, y: float, words: str, anchor: str = "start", class_: str | None = None) -> Markup:
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def rectangle(x: float, y: float, width: float, height: float, class_: str, hint: str | None = None) -> Markup:
    """Return a box; ``hint`` is shown where a pointer rests on it."""
    inside = [] if hint is None else [tag("title", hint)]
    return tag("rect", *inside, x=x, y=y, width=max(width, 0), height=max(height, 0), class_=class_)


def round_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, from at most ``low`` to at least ``high``."""
    if high <= low:
        margin = abs(low) * 0.1 or 0.5
        low, high = low - margin, high + margin
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """Where data lies on the drawing: the box in drawing units, and the values at its edges."""

    left: float
    top: float
    width: float
    height: float
    x_low: float = 0.0
    x_high: float = 1.0
    y_low: float = 0.0
    y_high: float = 1.0

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def right(self) -> float:
        return self.left + self.width

    def x(self, value: float) -> float:
        return self.left + self.width * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return self.bottom - self.height * (value - self.y_low) / (self.y_high - self.y_low)

    def y_axis(self, ticks: list[tuple[float, str]]) -> Markup:
        """Return grid lines with their labels left of the box."""
        drawn = []
        for value, label in ticks:
            y = self.y(value)
            drawn += [line(self.left, y, self.right, y, "grid"), text(self.left - 6, y + 4, label, "end")]
        return join(*drawn)

    def name_y_axis(self, words: str) -> Markup:
        """Return what the y axis counts, written upwards at the left edge of the drawing."""
        turned = Markup('<g transform="translate(12.0 {:.1f}) rotate(-90)">{}</g>')
        return turned.format(self.top + self.height / 2, text(0, 0, words, "middle", "name"))

    def x_axis(self, ticks: list[tuple[float, str]], name: str) -> Markup:
        """Return the lower edge with its labels, and what it counts."""
        labels = [text(self.x(value), self.bottom + 15, label, "middle") for value, label in ticks]
        named = text(self.left + self.width / 2, self.bottom + 31, name, "middle", "name")
        return join(line(self.left, self.bottom, self.right, self.bottom, "axis"), *labels, named)

    def curve(self, points: Points, class_: str) -> Markup:
        """Return a line through the points, or a dot where there is one only."""
        if len(points) == 1:
            return tag("circle", cx=self.x(points[0][0]), cy=self.y(points[0][1]), r=3.5, class_=f"{class_} dot")
        path = " ".join(f"{_value(self.x(x))},{_value(self.y(y))}" for x, y in points)
        return tag("polyline", points=path, class_=class_)


def _value(value: Any) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def reliability_diagram(title: str, figures: dict[str, Any]) -> Markup:
    """Draw the accuracy in every bin of confidence, its gap to the confidence, and above it where the images are."""
    if not known(figures.get("ACC")):
        return density_chart(title, figures)
    bins = figures["bins"]
    upper = Frame(LEFT, 10, PLOT_WIDTH, 62, y_high=_highest_share(bins["count"]))
    lower = Frame(LEFT, 86, PLOT_WIDTH, PLOT_WIDTH)
    accuracy, confidence, ece = figures["ACC"], figures["CONF"], percent(figures.get("ECE"))
    plate = upper.left + 8 if confidence > 0.5 else upper.right - 100  # where few images are
    gaps = [
        _gap(lower, index, len(bins["count"]), stated, right)
        for index, (stated, right) in enumerate(zip(bins["confidence"], bins["accuracy"], strict=True))
        if known(stated) and known(right)
    ]
    drawn = [
        _density(upper, bins["count"]),
        lower.y_axis(TENTHS),
        *gaps,
        line(lower.left, lower.bottom, lower.right, lower.top, "diagonal"),
        line(upper.x(confidence), upper.top, upper.x(confidence), upper.bottom, "mean-confidence"),
        line(upper.x(accuracy), upper.top, upper.x(accuracy), upper.bottom, "mean-accuracy"),
        line(lower.x(confidence), lower.top, lower.x(confidence), lower.bottom, "mean-confidence"),
        line(lower.left, lower.y(accuracy), lower.right, lower.y(accuracy), "mean-accuracy"),
        lower.x_axis(TENTHS, "confidence in %"),
        lower.name_y_axis("accuracy in %"),
        rectangle(plate, upper.top + 2, 92, 22, "plate"),
        text(plate + 46, upper.top + 17, f"ECE {ece}", "middle", "strong"),
    ]
    means = f"Mean confidence {percent(confidence)}, accuracy {percent(accuracy)}"
    description = f"{means}, expected calibration error {ece}."
    return chart(lower.bottom + 38, f"Reliability diagram: {title}", description, *drawn)


def density_chart(title: str, figures: dict[str, Any]) -> Markup:
    """Draw the share of the images in every bin of confidence."""
    counts = figures["bins"]["count"]
    frame = Frame(LEFT, 10, PLOT_WIDTH, 130, y_high=_highest_share(counts))
    mean = figures["CONF"]
    average = line(frame.x(mean), frame.top, frame.x(mean), frame.bottom, "mean-confidence")
    description = f"Mean confidence {percent(mean)}. Accuracy is not known: there are no labels."
    axis = frame.x_axis(TENTHS, "confidence in %")
    return chart(178, f"Confidence: {title}", description, _density(frame, counts), average, axis)


def right_wrong_histogram(title: str, figures: dict[str, Any]) -> Markup:
    """Draw the confidence of right (upwards) and wrong images (downwards), each as a share of its own group."""
    right, wrong = (np.asarray(figures["histogram"][name], dtype=np.float64) for name in ("right", "wrong"))
    shares = [group / max(group.sum(), 1) for group in (right, wrong)]
    limit = max(round_ticks(0, max(float(share.max()) for share in shares), 2)[-1], 0.01)
    frame = Frame(LEFT, 10, PLOT_WIDTH, 170, y_low=-limit, y_high=limit)
    ticks = [(limit * step, f"{100 * abs(limit * step):.3g}") for step in (-1, -0.5, 0, 0.5, 1)]
    bars = []
    for class_, sign, group, share in (("right", 1, right, shares[0]), ("wrong", -1, wrong, shares[1])):
        for index, value in enumerate(share):
            if value:
                hint = f"{_bin_words(index, len(share))}: {int(group[index]):,} {class_}"
                top, bottom = sorted((frame.y(0), frame.y(sign * value)))
                bars.append(_bar(frame, index, len(share), top, bottom, class_, hint))
    drawn = [
        frame.y_axis(ticks),
        *bars,
        line(frame.left, frame.y(0), frame.right, frame.y(0), "axis"),
        frame.x_axis(TENTHS, "confidence in %"),
        frame.name_y_axis("% of each group"),
        text(frame.left + 8, frame.top + 16, f"right: {int(right.sum()):,}", class_="strong"),
        text(frame.left + 8, frame.bottom - 8, f"wrong: {int(wrong.sum()):,}", class_="strong"),
    ]
    description = f"{int(right.sum()):,} images are right, {int(wrong.sum()):,} are wrong."
    return chart(218, f"Confidence of right and wrong images: {title}", description, *drawn)


def caution_chart(confidence: NDArray[np.floating], measured: Points | None) -> Markup:
    """Draw the accuracy among the surest images by their share: expected always, measured if labels exist."""
    values = np.asarray(confidence, dtype=np.float64)
    falling = np.sort(values)[::-1]
    steps = np.unique(np.linspace(1, len(values), min(CURVE_POINTS, len(values))).round().astype(np.int64))
    means = np.cumsum(falling)[steps - 1] / steps
    curves = [("expected", list(zip((steps / len(values)).tolist(), means.tolist(), strict=True)))]
    if measured is not None:
        curves.append(("measured", measured))
    lowest = min(TARGET, *(y for _, points in curves for _, y in points))
    ticks = [tick for tick in round_ticks(lowest, 1.0, 5) if tick <= 1 + 1e-9]
    frame = Frame(LEFT, 12, PLOT_WIDTH, 170, y_low=ticks[0], y_high=1.0)
    drawn = [
        frame.y_axis([(tick, f"{100 * tick:.4g}") for tick in ticks]),
        line(frame.left, frame.y(TARGET), frame.right, frame.y(TARGET), "target"),
        *(frame.curve(points, name) for name, points in curves),
        frame.x_axis(TENTHS, "share of images used, surest first, in %"),
        frame.name_y_axis("accuracy in %"),
    ]
    description = "; ".join(f"{name} over all images: {percent(points[-1][1])}" for name, points in curves)
    return chart(220, "Accuracy among the surest images", description, *drawn)


def _gap(frame: Frame, index: int, bins: int, stated: float, right: float) -> Markup:
    """Draw the accuracy, marked by a line, and hatch what lies between it and the stated confidence."""
    kind = "over" if stated > right else "under"
    hint = f"{_bin_words(index, bins)}: stated {percent(stated)}, right {percent(right)}"
    low, high = min(stated, right), max(stated, right)
    return join(
        _bar(frame, index, bins, frame.y(low), frame.bottom, "bar", hint),
        _bar(frame, index, bins, frame.y(high), frame.y(low), kind, hint),
        _bar(frame, index, bins, frame.y(right) - 1, frame.y(right) + 1, "end", hint),
    )


def _density(frame: Frame, counts: list[int]) -> Markup:
    shares = np.asarray(counts) / max(sum(counts), 1)
    top = frame.y_high
    bars = [
        _bar(frame, index, len(counts), frame.y(share), frame.bottom, "density", f"{counts[index]:,} images")
        for index, share in enumerate(shares.tolist())
        if share
    ]
    ticks = [(value, f"{100 * value:.3g}") for value in (0.0, top / 2, top)]
    name = frame.name_y_axis("% of images")
    return join(frame.y_axis(ticks), *bars, line(frame.left, frame.bottom, frame.right, frame.bottom, "axis"), name)


def _highest_share(counts: list[int]) -> float:
    """Return the upper end of an axis for shares: a round number that the largest bin does not pass."""
    return max(round_ticks(0, max(counts, default=0) / max(sum(counts), 1), 2)[-1], 0.02)


def _bar(frame: Frame, index: int, bins: int, top: float, bottom: float, class_: str, hint: str) -> Markup:
    step = frame.width / bins
    return rectangle(frame.left + index * step + 0.5, top, step - 1, bottom - top, class_, hint)


def _bin_words(index: int, bins: int) -> str:
    return f"confidence {100 * index / bins:.0f} to {100 * (index + 1) / bins:.0f} %"


def cluster_chart(clusters: Sequence[ClusterFigures]) -> Markup:
    """Draw bars in the order of the clusters; horizontal places are shares of the width, so text keeps its size."""
    sizes, confidences = [cluster.size for cluster in clusters], [cluster.confidence for cluster in clusters]
    top = round_ticks(0, max(max(sizes), 1), 3)
    # Images are counted: a tick of 0.5 images says nothing.
    tops = [tick for tick in top if tick == int(tick)]
    size_frame = Frame(0, 20, 100, CLUSTER_PANEL, y_high=top[-1])
    confidence_frame = Frame(0, SECOND + 20, 100, CLUSTER_PANEL)
    hints = [
        f"cluster {number}: {count(cluster.size, 'image')}, mean confidence {percent(cluster.confidence)}"
        for number, cluster in enumerate(clusters)
    ]
    drawn = [
        text(_share(0), 10, "images", "start", "name"),
        _cluster_grid(size_frame, [(tick, f"{int(tick):,}") for tick in tops]),
        _cluster_bars(size_frame, sizes, "bar", hints),
        text(_share(0), SECOND + 10, "mean confidence in %", "start", "name"),
        _cluster_grid(confidence_frame, [(0.0, "0"), (0.5, "50"), (1.0, "100")]),
        _cluster_bars(confidence_frame, confidences, "density", hints),
        _cluster_numbers(confidence_frame.bottom + 16, len(sizes)),
        text(_share(50), confidence_frame.bottom + 34, "cluster", "middle", "name"),
    ]
    description = tag("desc", f"{count(len(sizes), 'cluster')} of {min(sizes)} to {count(max(sizes), 'image')}.")
    title = tag("title", "Size and mean confidence of the clusters")
    return tag("svg", title, description, *drawn, class_="wide chart", height=SECOND + CLUSTER_PANEL + 64, role="img")


def _cluster_bars(frame: Frame, values: Sequence[float | None], class_: str, hints: list[str]) -> Markup:
    step = 100 / len(values)
    # Few clusters would give slabs; many need every pixel.
    width = min(step * (0.8 if len(values) <= 60 else 0.9), 6.0)
    bars = []
    for index, value in enumerate(values):
        if value is not None:
            hint = [tag("title", hints[index])] if len(values) <= MOST_HINTS else []
            place = {"x": _share(index * step + (step - width) / 2), "width": _share(width)}
            bars.append(
                tag("rect", *hint, **place, y=frame.y(value), height=frame.bottom - frame.y(value), class_=class_)
            )
    return join(*bars)


def _share(value: float) -> str:
    return f"{value:.3f}%"


def _cluster_grid(frame: Frame, ticks: list[tuple[float, str]]) -> Markup:
    lines = []
    for value, label in ticks:
        y, kind = frame.y(value), "axis" if value == 0 else "grid"
        lines += [tag("line", x1="0%", x2="100%", y1=y, y2=y, class_=kind), text("-6", y + 4, label, "end")]
    return join(*lines)


def _cluster_numbers(y: float, total: int) -> Markup:
    """Write numbers below the bars: at most about 20, every second of which can be hidden in a narrow window."""
    step = next(size * 10**power for power in range(9) for size in (1, 2, 5) if total <= 21 * size * 10**power)
    every = math.ceil(total / step)
    labels = []
    for index, number in enumerate(range(0, total, step)):
        minor = "minor" if every > 11 and index % 2 else None
        labels.append(text(_share(100 * (number + 0.5) / total), y, str(number), "middle", minor))
    return join(*labels)


def training_charts(history: list[dict[str, Any]]) -> list[tuple[str, Markup]]:
    """Return title and drawing of every number that at least one epoch has."""
    charts = []
    for key, title, scale in CURVES:
        points = [
            (float(epoch.get("epoch", index)), scale * epoch[key])
            for index, epoch in enumerate(history, start=1)
            if known(epoch.get(key))
        ]
        if points:
            charts.append((title, _curve_chart(title, points)))
    return charts


def _curve_chart(title: str, points: Points) -> Markup:
    values = [value for _, value in points]
    first, last = points[0][0], points[-1][0]
    y_ticks = round_ticks(min(values), max(values), 3)
    margin = 0 if last > first else 0.5
    box = (CURVE_LEFT, 10, CURVE_WIDTH, CURVE_HEIGHT)
    frame = Frame(*box, x_low=first - margin, x_high=last + margin, y_low=y_ticks[0], y_high=y_ticks[-1])
    # Between the first and the last epoch round ones, as far as their labels have room.
    room = (last - first) / 10
    between = [tick for tick in round_ticks(first, last, 5) if tick == int(tick) and first + room < tick < last - room]
    epochs = [first, *between, last] if last > first else [first]
    drawn = [
        frame.y_axis([(tick, f"{tick:.6g}") for tick in y_ticks]),
        frame.curve(points, "measured"),
        frame.x_axis([(tick, f"{tick:.0f}") for tick in epochs], "epoch"),
    ]
    description = f"From {values[0]:.4g} in epoch {first:.0f} to {values[-1]:.4g} in epoch {last:.0f}."
    return chart(CURVE_HEIGHT + 50, title, description, *drawn)
