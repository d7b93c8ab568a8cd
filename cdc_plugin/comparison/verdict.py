"""What the table says, in sentences: who is best, who is calibrated, and where CDC loses. Rows are all it knows."""

from __future__ import annotations

from collections.abc import Sequence

from cdc_plugin.comparison.table import Row, Value
from cdc_plugin.metrics.over_seeds import by_set, deviation_words, mean_words, row_names, seeds_words

CALIBRATED = "CDC-Cal"  # the row of CDC's calibration head
CLOSE = 0.01  # accuracies within one point are called equal when calibration is compared
HAIR = 1e-9  # of rounding

Named = tuple[str, Row]


def verdict(rows: Sequence[Row]) -> list[str]:
    """Sentences on every set, which begin with its name where there are several. Rows that use labels take no part."""
    sets = by_set(rows)
    return [
        sentence if len(sets) == 1 else f"{name}: {sentence}" for name, found in sets.items() for sentence in _on(found)
    ]


def _on(every: Sequence[Row]) -> list[str]:
    """The sentences on one set."""
    measured = [(name, row) for name, row in zip(row_names(every), every, strict=True) if row.values.get("ACC")]
    rows = [(name, row) for name, row in measured if not row.uses_labels]
    if not measured:
        return ["Without labels only confidence and cluster sizes can be compared, and neither is a merit in itself."]
    if len(rows) < 2:
        told = f"{_with(rows[0], 'ACC')} stands alone" if rows else "Every row uses labels"
        return [f"{told}: there is nothing to compare ({seeds_words(every)})."]
    best = max(rows, key=lambda named: _mean(named, "ACC"))
    close = [named for named in rows if _mean(best, "ACC") - _mean(named, "ACC") <= CLOSE + HAIR]
    ours = _ours(rows)
    excluded = len(measured) - len(rows)
    return [
        f"The best accuracy has {_with(best, 'ACC')}, over {seeds_words([row for _, row in rows])}.",
        *_fewer_seeds(rows),
        _close_words(best, close),
        *_calibration(best, close, ours),
        *(_accuracy(ours, rows) if ours else [f"CDC's calibration head, {CALIBRATED}, is not among the rows."]),
        *([f"Left out because labels were used: {excluded} of {len(measured)} rows."] if excluded else []),
    ]


def _ours(rows: Sequence[Named]) -> Named | None:
    """The calibration head of CDC as it is by default, if it was run; settings of one's own come second."""
    found = [named for named in rows if named[1].label == CALIBRATED]
    return next((named for named in found if named[1].method == "cdc"), found[0] if found else None)


def _fewer_seeds(rows: Sequence[Named]) -> list[str]:
    most = max(row.seeds for _, row in rows)
    fewer = [f"{name} ({row.seeds})" for name, row in rows if row.seeds < most]
    return [f"Fewer than {most} seeds were finished by {_listed(fewer)}."] if fewer else []


def _close_words(best: Named, close: Sequence[Named]) -> str:
    others = [_with(named, "ACC") for named in close if named is not best]
    return (
        f"Within 1 point of it {_be(others)} {_listed(others)}." if others else "No other row is within 1 point of it."
    )


def _calibration(best: Named, close: Sequence[Named], ours: Named | None) -> list[str]:
    """Who has the lowest ECE of the rows within a point of the best accuracy, and how CDC's head stands to it."""
    stated = sorted((named for named in close if named[1].values.get("ECE")), key=lambda named: _mean(named, "ECE"))
    if not stated:
        found = ["None of them states a confidence: there is no calibration error to compare."]
        return found + ([] if ours is None or ours in close else [_too_far(best, ours)])
    lowest, *others = stated
    what = f"Of these {len(close)} rows the lowest ECE has" if len(close) > 1 else "Its calibration error:"
    words = f"{what} {_with(lowest, 'ECE')}"
    if ours is not None and lowest is ours:
        words += ", CDC's calibration head"
        words += f"; next comes {_with(others[0], 'ECE')}{_in_spread(others[0], ours, 'ECE')}" if others else ""
    elif ours is not None and ours in others:
        gap = _points(_mean(ours, "ECE") - _mean(lowest, "ECE"))
        words += f", not CDC's calibration head: {_with(ours, 'ECE')}, {gap} more{_in_spread(ours, lowest, 'ECE')}"
    silent = [name for name, row in close if not row.values.get("ECE")]
    words += f"; {_listed(silent)} state{'s' if len(silent) == 1 else ''} no confidence" if silent else ""
    return [f"{words}.", *([] if ours is None or ours in close else [_too_far(best, ours)])]


def _too_far(best: Named, ours: Named) -> str:
    where = f"{_with(ours, 'ACC')} is {_gap(best, ours)} below the best accuracy{_in_spread(best, ours, 'ACC')}"
    return f"CDC's calibration head is not among them: {where}; its ECE is {_words(ours[1], 'ECE')}."


def _accuracy(ours: Named, rows: Sequence[Named]) -> list[str]:
    """Whether CDC's calibration head is at least as accurate as each other row within one deviation."""
    others = [named for named in rows if named is not ours]
    higher = [named for named in others if _mean(named, "ACC") > _mean(ours, "ACC") + HAIR]
    ahead = sorted(higher, key=lambda named: -_mean(named, "ACC"))
    lost = [named for named in ahead if not _in_spread(named, ours, "ACC")]
    near = [named for named in ahead if named not in lost]
    spread = any(_deviation(row, "ACC") for _, row in rows)
    within = " within one standard deviation (of two rows the larger one counts)" if spread else ""
    found = []
    if lost:
        much = ", each time by more than one standard deviation (of two rows the larger one counts)" if spread else ""
        found.append(f"{ours[0]} is less accurate than {_listed([_by(named, ours) for named in lost])}{much}.")
    if rest := len(others) - len(lost):
        each = "the other row" if rest == 1 else f"each of the {rest} other rows"
        found.append(f"The accuracy of {ours[0]} is at least that of {each}{'' if lost else within}.")
    if near:
        found.append(f"Ahead of {ours[0]}, but within the spread, {_be(near)} {_listed([_by(n, ours) for n in near])}.")
    if not spread:
        found.append("Without a second seed no deviation is known: bare figures are compared.")
    return found


def _in_spread(one: Named, other: Named, column: str) -> str:
    """Words for a difference that is not larger than the larger deviation of both; else none."""
    spread = max(_deviation(row, column) for _, row in (one, other))
    return ", within the spread" if spread and abs(_mean(one, column) - _mean(other, column)) <= spread + HAIR else ""


def _value(row: Row, column: str) -> Value:
    value = row.values.get(column)
    assert value is not None, f"{row.label} has no {column}"
    return value


def _mean(named: Named, column: str) -> float:
    return _value(named[1], column).mean


def _deviation(row: Row, column: str) -> float:
    return _value(row, column).deviation or 0.0


def _words(row: Row, column: str) -> str:
    value = row.values.get(column)
    if value is None:
        return "unknown"
    deviation = deviation_words(column, value)
    return f"{mean_words(column, value)}{f' ± {deviation}' if deviation else ''} %"


def _with(named: Named, column: str) -> str:
    return f"{named[0]} ({_words(named[1], column)})"


def _gap(one: Named, other: Named) -> str:
    return _points(_mean(one, "ACC") - _mean(other, "ACC"))


def _by(one: Named, ours: Named) -> str:
    return f"{one[0]} (by {_gap(one, ours)})"


def _be(names: Sequence[object]) -> str:
    return "is" if len(names) == 1 else "are"


def _points(difference: float) -> str:
    return f"{100 * difference:.1f} points" if difference >= 0.0005 else "less than 0.1 points"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
