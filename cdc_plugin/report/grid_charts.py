"""Methods below each other, a dot with whiskers or a bar each: small panels in the same order, to be read across."""

from collections.abc import Sequence

from markupsafe import Markup

from cdc_plugin.metrics.over_seeds import OURS, Row, Value, deviation_words, mean_words, row_names
from cdc_plugin.report.charts import Frame, chart, join, line, rectangle, round_ticks, tag, text
from cdc_plugin.report.words import DASH, shorten

LEFT, PLOT_WIDTH, STEP, TOP = 134.0, 172.0, 19.0, 6.0
NUMBERS = 48.0  # room for the figure behind a bar
CHARACTERS, NATURAL = 22, 18  # names are shortened to this, and squeezed where they have more than that
CHARACTER = 6.0  # width of one, about: fonts differ
CLOSE = 0.01  # within a point of the best accuracy


def dot_panel(title: str, rows: Sequence[Row], column: str, band: tuple[float, float] | None = None) -> Markup:
    """Draw mean and deviation of a share by row, in per cent; values within the band lie on a shade."""
    values = [value for row in rows if (value := row.values.get(column)) is not None]
    spread = [(value, value.deviation or 0.0) for value in values]
    ticks = round_ticks(
        min(100 * max(value.mean - deviation, 0) for value, deviation in spread),
        max(100 * (value.mean + deviation) for value, deviation in spread),
        3,
    )
    frame = Frame(LEFT, TOP, PLOT_WIDTH, STEP * len(rows), x_low=ticks[0] / 100, x_high=ticks[-1] / 100)
    drawn = [line(frame.x(tick / 100), frame.top, frame.x(tick / 100), frame.bottom, "grid") for tick in ticks]
    if band is not None:
        low, high = max(band[0], frame.x_low), min(band[1], frame.x_high)
        drawn.insert(0, rectangle(frame.x(low), TOP, frame.x(high) - frame.x(low), frame.height, "band"))
    for index, (row, name) in enumerate(zip(rows, row_names(rows), strict=True)):
        value = row.values.get(column)
        drawn += [_name(index, row, name), _dot(frame, index, row, value, _hint(name, column, value))]
    axis = frame.x_axis([(tick / 100, f"{tick:.4g}") for tick in ticks], "%")
    return chart(frame.bottom + 36, title, _description(rows, column), *drawn, axis)


def bar_panel(title: str, rows: Sequence[Row], column: str) -> Markup:
    """Return a bar for every row from nothing to its mean, and the figure behind it."""
    longest = max((value.mean for row in rows if (value := row.values.get(column)) is not None), default=0.0)
    frame = Frame(LEFT, TOP, PLOT_WIDTH - NUMBERS, STEP * len(rows), x_high=longest or 1.0)
    drawn = []
    for index, (row, name) in enumerate(zip(rows, row_names(rows), strict=True)):
        value = row.values.get(column)
        middle = TOP + STEP * (index + 0.5)
        drawn.append(_name(index, row, name))
        if value is not None:
            width = frame.x(value.mean) - frame.left
            kind = "bar ours" if row.group == OURS else "bar"
            drawn.append(rectangle(frame.left, middle - 5.5, width, 11, kind, _hint(name, column, value)))
            drawn.append(text(frame.left + width + 5, middle + 4, mean_words(column, value)))
    axis = line(frame.left, frame.top, frame.left, frame.bottom, "axis")
    return chart(frame.bottom + 6, title, _description(rows, column), *drawn, axis)


def close_band(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Return the range from one point below the best accuracy of the rows without labels to that accuracy."""
    means = [value.mean for row in rows if not row.uses_labels and (value := row.values.get("ACC")) is not None]
    return (max(means) - CLOSE, max(means)) if means else None


def _name(index: int, row: Row, name: str) -> Markup:
    words = shorten(name, CHARACTERS) + ("*" if row.uses_labels else "")
    length = min(CHARACTER * len(words), LEFT - 10)
    squeezed = {"textLength": length, "lengthAdjust": "spacingAndGlyphs"} if len(words) > NATURAL else {}
    kind = "strong" if row.group == OURS else None
    hint = [tag("title", name)] if len(name) > CHARACTERS else []
    place = {"x": LEFT - 8, "y": TOP + STEP * (index + 0.5) + 4, "text_anchor": "end"}
    return tag("text", *hint, words, **place, class_=kind, **squeezed)


def _dot(frame: Frame, index: int, row: Row, value: Value | None, hint: str) -> Markup:
    y = TOP + STEP * (index + 0.5)
    if value is None:
        return text(frame.left + 6, y + 4, DASH)
    low, high = (frame.x(max(value.mean + sign * (value.deviation or 0.0), 0.0)) for sign in (-1, 1))
    ends = [line(x, y - 3.5, x, y + 3.5, "whisker") for x in (low, high)] if value.deviation is not None else []
    kind = "dot ours" if row.group == OURS else "dot hollow" if row.uses_labels else "dot"
    dot = tag("circle", tag("title", hint), cx=frame.x(value.mean), cy=y, r=4.0, class_=kind)
    return join(line(low, y, high, y, "whisker"), *ends, dot)


def _hint(name: str, column: str, value: Value | None) -> str:
    deviation = deviation_words(column, value)
    spread = f" ± {deviation}" if deviation else ""
    return f"{name}: {DASH}" if value is None else f"{name}: {column} {mean_words(column, value)}{spread}"


def _description(rows: Sequence[Row], column: str) -> str:
    found = [_hint(name, column, row.values.get(column)) for row, name in zip(rows, row_names(rows), strict=True)]
    return "; ".join(found) + "."
