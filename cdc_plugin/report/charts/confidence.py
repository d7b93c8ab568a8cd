"""Charts of confidence: is it true (Fig. 1 of the paper), does it tell right from wrong, what does caution buy."""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

from cdc_plugin.metrics import risk_coverage_curve
from cdc_plugin.report.charts.svg import Frame, chart, join, line, rectangle, round_ticks, text
from cdc_plugin.report.words import TARGET, known, percent

WIDTH = 320.0
LEFT, PLOT_WIDTH = 44.0, 262.0
TENTHS = [(0.0, "0"), (0.2, "20"), (0.4, "40"), (0.6, "60"), (0.8, "80"), (1.0, "100")]
CURVE_POINTS = 100


def reliability_diagram(title: str, figures: dict[str, Any]) -> Markup:
    """Accuracy in every bin of confidence, the gap to what was stated, and above it where the images are.

    Without labels only the density is drawn: nothing is known of accuracy then.
    """
    if not known(figures.get("ACC")):
        return density_chart(title, figures)
    bins = figures["bins"]
    upper = Frame(LEFT, 10, PLOT_WIDTH, 62, y_high=_highest_share(bins["count"]))
    lower = Frame(LEFT, 86, PLOT_WIDTH, PLOT_WIDTH)
    accuracy, confidence = figures["ACC"], figures["CONF"]
    plate = upper.left + 8 if confidence > 0.5 else upper.right - 100  # where few images are
    gaps = [
        _gap(lower, index, len(bins["count"]), stated, right)
        for index, (stated, right) in enumerate(zip(bins["confidence"], bins["accuracy"], strict=True))
        if known(stated) and known(right)
    ]
    averages = [
        line(upper.x(confidence), upper.top, upper.x(confidence), upper.bottom, "mean-confidence"),
        line(upper.x(accuracy), upper.top, upper.x(accuracy), upper.bottom, "mean-accuracy"),
        line(lower.x(confidence), lower.top, lower.x(confidence), lower.bottom, "mean-confidence"),
        line(lower.left, lower.y(accuracy), lower.right, lower.y(accuracy), "mean-accuracy"),
    ]
    drawn = [
        _density(upper, bins["count"]),
        lower.y_axis(TENTHS),
        *gaps,
        line(lower.left, lower.bottom, lower.right, lower.top, "diagonal"),
        *averages,
        lower.x_axis(TENTHS, "confidence in %"),
        _vertical_name(12, lower.top + lower.height / 2, "accuracy in %"),
        rectangle(plate, upper.top + 2, 92, 22, "plate"),
        text(plate + 46, upper.top + 17, f"ECE {percent(figures.get('ECE'))}", "middle", "strong"),
    ]
    description = (
        f"Mean confidence {percent(confidence)}, accuracy {percent(accuracy)}, expected calibration error "
        f"{percent(figures.get('ECE'))}."
    )
    return chart(WIDTH, lower.bottom + 38, f"Reliability diagram: {title}", description, *drawn)


def density_chart(title: str, figures: dict[str, Any]) -> Markup:
    """Share of the images in every bin of confidence."""
    counts = figures["bins"]["count"]
    frame = Frame(LEFT, 10, PLOT_WIDTH, 130, y_high=_highest_share(counts))
    mean = figures["CONF"]
    average = line(frame.x(mean), frame.top, frame.x(mean), frame.bottom, "mean-confidence")
    description = f"Mean confidence {percent(mean)}. Accuracy is not known: there are no labels."
    axis = frame.x_axis(TENTHS, "confidence in %")
    return chart(WIDTH, 178, f"Confidence: {title}", description, _density(frame, counts), average, axis)


def right_wrong_histogram(title: str, figures: dict[str, Any]) -> Markup:
    """Confidence of the images that are right (upwards) and wrong (downwards), each as a share of its own group."""
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
        _vertical_name(12, frame.top + frame.height / 2, "% of each group"),
        text(frame.left + 8, frame.top + 16, f"right: {int(right.sum()):,}", class_="strong"),
        text(frame.left + 8, frame.bottom - 8, f"wrong: {int(wrong.sum()):,}", class_="strong"),
    ]
    description = f"{int(right.sum()):,} images are right, {int(wrong.sum()):,} are wrong."
    return chart(WIDTH, 218, f"Confidence of right and wrong images: {title}", description, *drawn)


def caution_chart(confidence: ArrayLike, correct: NDArray[np.bool_] | None) -> Markup:
    """Accuracy among the surest images, by their share: expected always, measured where labels exist."""
    values = np.asarray(confidence, dtype=np.float64)
    falling = np.sort(values)[::-1]
    steps = np.unique(np.linspace(1, len(values), min(CURVE_POINTS, len(values))).round().astype(np.int64))
    means = np.cumsum(falling)[steps - 1] / steps
    curves = [("expected", list(zip((steps / len(values)).tolist(), means.tolist(), strict=True)))]
    if correct is not None:
        found = risk_coverage_curve(np.clip(values, 0, 1), correct, CURVE_POINTS)
        curves.append(("measured", list(zip(found.coverage.tolist(), (1 - found.risk).tolist(), strict=True))))
    lowest = min(TARGET, *(y for _, points in curves for _, y in points))
    ticks = [tick for tick in round_ticks(lowest, 1.0, 5) if tick <= 1 + 1e-9]
    frame = Frame(LEFT, 12, PLOT_WIDTH, 170, y_low=ticks[0], y_high=1.0)
    aim = line(frame.left, frame.y(TARGET), frame.right, frame.y(TARGET), "target")
    drawn = [
        frame.y_axis([(tick, f"{100 * tick:.4g}") for tick in ticks]),
        aim,
        *(frame.curve(points, name) for name, points in curves),
        frame.x_axis(TENTHS, "share of images used, surest first, in %"),
        _vertical_name(12, frame.top + frame.height / 2, "accuracy in %"),
    ]
    description = "; ".join(f"{name} over all images: {percent(points[-1][1])}" for name, points in curves)
    return chart(WIDTH, 220, "Accuracy among the surest images", description, *drawn)


def _gap(frame: Frame, index: int, bins: int, stated: float, right: float) -> Markup:
    """Accuracy, marked by a line, and hatched between it and the stated confidence what is promised wrongly."""
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
    name = _vertical_name(12, frame.top + frame.height / 2, "% of images")
    return join(frame.y_axis(ticks), *bars, line(frame.left, frame.bottom, frame.right, frame.bottom, "axis"), name)


def _highest_share(counts: list[int]) -> float:
    """Upper end of an axis for shares: a round number that the largest bin does not pass."""
    return max(round_ticks(0, max(counts, default=0) / max(sum(counts), 1), 2)[-1], 0.02)


def _bar(frame: Frame, index: int, bins: int, top: float, bottom: float, class_: str, hint: str) -> Markup:
    step = frame.width / bins
    return rectangle(frame.left + index * step + 0.5, top, step - 1, bottom - top, class_, hint)


def _bin_words(index: int, bins: int) -> str:
    return f"confidence {100 * index / bins:.0f} to {100 * (index + 1) / bins:.0f} %"


def _vertical_name(x: float, y: float, words: str) -> Markup:
    turned = Markup('<g transform="translate({:.1f} {:.1f}) rotate(-90)">{}</g>')
    return turned.format(x, y, text(0, 0, words, "middle", "name"))
