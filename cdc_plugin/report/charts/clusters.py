"""Size and mean confidence of every cluster as bars; 2 clusters and 200 fit the width of a phone and of a desk."""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup

from cdc_plugin.report.charts.svg import Frame, join, round_ticks, tag
from cdc_plugin.report.words import count, known, percent

PANEL = 110.0
MOST_HINTS = 500  # more bars than that are thinner than a pointer, and their hints heavier than the page
SECOND = 160.0  # where the panel of confidences begins


def cluster_chart(sizes: list[int], confidences: list[float | None]) -> Markup:
    """Bars in the order of the cluster numbers; horizontal places are shares of the width, so text keeps its size."""
    top = round_ticks(0, max(max(sizes, default=0), 1), 3)
    # Images are counted: a tick of 0.5 images says nothing.
    tops = [tick for tick in top if tick == int(tick)]
    size_frame = Frame(0, 20, 100, PANEL, y_high=top[-1])
    confidence_frame = Frame(0, SECOND + 20, 100, PANEL)
    hints = [
        f"cluster {number}: {count(size, 'image')}, mean confidence {percent(confidence)}"
        for number, (size, confidence) in enumerate(zip(sizes, confidences, strict=True))
    ]
    drawn = [
        _words(0, 10, "images", "name", "start"),
        _grid(size_frame, [(tick, f"{int(tick):,}") for tick in tops]),
        _bars(size_frame, [float(size) for size in sizes], "bar", hints),
        _words(0, SECOND + 10, "mean confidence in %", "name", "start"),
        _grid(confidence_frame, [(0.0, "0"), (0.5, "50"), (1.0, "100")]),
        _bars(confidence_frame, confidences, "density", hints),
        _numbers(confidence_frame.bottom + 16, len(sizes)),
        _words(50, confidence_frame.bottom + 34, "cluster", "name", "middle"),
    ]
    description = tag("desc", f"{count(len(sizes), 'cluster')} of {min(sizes)} to {count(max(sizes), 'image')}.")
    title = tag("title", "Size and mean confidence of the clusters")
    return tag("svg", title, description, *drawn, class_="wide chart", height=SECOND + PANEL + 64, role="img")


def cluster_means(clusters: np.ndarray, confidence: np.ndarray, total: int) -> tuple[list[int], list[float | None]]:
    """Images and mean confidence of the clusters 0 to ``total`` - 1; None for an empty one."""
    sizes = np.bincount(clusters, minlength=total)
    sums = np.bincount(clusters, weights=confidence, minlength=total)
    return sizes.tolist(), [float(sums[index] / size) if size else None for index, size in enumerate(sizes)]


def _bars(frame: Frame, values: list[float] | list[float | None], class_: str, hints: list[str]) -> Markup:
    step = 100 / len(values)
    # Few clusters would give slabs; many need every pixel.
    width = min(step * (0.8 if len(values) <= 60 else 0.9), 6.0)
    bars = []
    for index, value in enumerate(values):
        if value is not None and known(value):
            top = frame.y(value)
            bars.append(
                tag(
                    "rect",
                    *([tag("title", hints[index])] if len(values) <= MOST_HINTS else []),
                    x=f"{index * step + (step - width) / 2:.3f}%",
                    width=f"{width:.3f}%",
                    y=top,
                    height=frame.bottom - top,
                    class_=class_,
                )
            )
    return join(*bars)


def _grid(frame: Frame, ticks: list[tuple[float, str]]) -> Markup:
    lines = []
    for value, label in ticks:
        y = frame.y(value)
        lines.append(tag("line", x1="0%", x2="100%", y1=y, y2=y, class_="axis" if value == 0 else "grid"))
        lines.append(tag("text", label, x="-6", y=y + 4, text_anchor="end"))
    return join(*lines)


def _numbers(y: float, total: int) -> Markup:
    """Numbers below the bars: at most about 20, and every second of these where there is little room."""
    step = next(size * 10**power for power in range(9) for size in (1, 2, 5) if total <= 21 * size * 10**power)
    every = math.ceil(total / step)
    labels = []
    for index, number in enumerate(range(0, total, step)):
        minor = "minor" if every > 11 and index % 2 else None
        labels.append(_words(100 * (number + 0.5) / total, y, str(number), minor, "middle"))
    return join(*labels)


def _words(share: float, y: float, words: str, class_: str | None, anchor: str) -> Markup:
    return tag("text", words, x=f"{share:.3f}%", y=y, text_anchor=anchor, class_=class_)
