"""SVG as escaped text, and the few things that every chart needs: a frame with axes, and round tick marks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
    """One element; ``class_`` and ``text_anchor`` are written ``class`` and ``text-anchor``, text is escaped."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _value(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, join(*children))


def join(*parts: Any) -> Markup:
    return Markup("").join(escape(part) for part in parts)


def chart(width: float, height: float, title: str, description: str, *children: Any) -> Markup:
    """A drawing that scales with its column; title and description are for those who can not see it."""
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *children,
        class_="chart",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def text(x: float, y: float, words: str, anchor: str = "start", class_: str | None = None) -> Markup:
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def rectangle(x: float, y: float, width: float, height: float, class_: str, hint: str | None = None) -> Markup:
    """A box; ``hint`` is shown where a pointer rests on it."""
    inside = [] if hint is None else [tag("title", hint)]
    return tag("rect", *inside, x=x, y=y, width=max(width, 0), height=max(height, 0), class_=class_)


def round_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from at most ``low`` to at least ``high``."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("ticks need finite limits")
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
        """Grid lines with their labels left of the box."""
        return join(
            *(
                join(
                    line(self.left, self.y(value), self.right, self.y(value), "grid"),
                    text(self.left - 6, self.y(value) + 4, label, "end"),
                )
                for value, label in ticks
            )
        )

    def x_axis(self, ticks: list[tuple[float, str]], name: str) -> Markup:
        """The lower edge with its labels, and what it counts."""
        labels = [text(self.x(value), self.bottom + 15, label, "middle") for value, label in ticks]
        named = text(self.left + self.width / 2, self.bottom + 31, name, "middle", "name")
        return join(line(self.left, self.bottom, self.right, self.bottom, "axis"), *labels, named)

    def curve(self, points: list[tuple[float, float]], class_: str) -> Markup:
        """A line through the points, or a dot where there is one only."""
        if len(points) == 1:
            return tag("circle", cx=self.x(points[0][0]), cy=self.y(points[0][1]), r=3.5, class_=f"{class_} dot")
        path = " ".join(f"{_value(self.x(x))},{_value(self.y(y))}" for x, y in points)
        return tag("polyline", points=path, class_=class_)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
