"""Say in sentences what the table shows: which row is best, which is calibrated, and where CDC loses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cdc_plugin.metrics.over_seeds import Row, by_set, deviation_words, mean_words, row_names, seeds_words

CALIBRATED = "CDC-Cal"  # the row of CDC's calibration head
CLOSE = 0.01  # accuracies within one point are called equal when calibration is compared
ROUNDING = 1e-9


@dataclass(frozen=True)
class _Entry:
    """A row under the name that the sentences use."""

    name: str
    row: Row

    def mean(self, column: str) -> float:
        """Return NaN for what was not measured."""
        value = self.row.values.get(column)
        return math.nan if value is None else value.mean

    def has(self, column: str) -> bool:
        return not math.isnan(self.mean(column))

    def figure(self, column: str) -> str:
        value = self.row.values.get(column)
        deviation = deviation_words(column, value)
        return f"{mean_words(column, value)}{f' ± {deviation}' if deviation else ''} %" if value else "unknown"


def judge_rows(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return sentences on every set. Rows that use labels are not judged."""
    return {name: _judge_set(members) for name, members in by_set(rows).items()}


def _judge_set(rows: Sequence[Row]) -> list[str]:
    measured = [entry for entry in map(_Entry, row_names(rows), rows) if entry.has("ACC")]
    entries = [entry for entry in measured if not entry.row.uses_labels]
    if not measured:
        return ["Without labels only confidence and cluster sizes can be compared, and neither is a merit in itself."]
    if len(entries) < 2:
        only = f"{entries[0].name} ({entries[0].figure('ACC')}) is the only row" if entries else "Every row uses labels"
        return [f"{only}: there is nothing to compare ({seeds_words(rows)})."]
    best = max(entries, key=lambda entry: entry.mean("ACC"))
    most = max(entry.row.seeds for entry in entries)
    seeds = seeds_words([entry.row for entry in entries])
    sentences = [f"{best.name} has the best accuracy: {best.figure('ACC')} over {seeds}."]
    if fewer := [f"{entry.name} ({entry.row.seeds})" for entry in entries if entry.row.seeds < most]:
        sentences.append(f"Fewer than {most} seeds finished: {_join(fewer)}.")
    calibrated = [entry for entry in entries if entry.row.label == CALIBRATED]
    # Plain CDC is judged; if it was not run, CDC with other settings.
    ours = next((entry for entry in calibrated if entry.row.method == "cdc"), calibrated[0] if calibrated else None)
    sentences += _judge_calibration(best, entries, ours)
    sentences += _judge_accuracy(ours, entries) if ours else [f"{CALIBRATED} is not among the rows."]
    if excluded := len(measured) - len(entries):
        sentences.append(f"Not judged because labels were used: {excluded} of {len(measured)} rows.")
    return sentences


def _judge_calibration(best: _Entry, entries: Sequence[_Entry], ours: _Entry | None) -> list[str]:
    """Name the rows within a point of the best accuracy and, of these, the lowest ECE."""
    close = [entry for entry in entries if best.mean("ACC") - entry.mean("ACC") <= CLOSE + ROUNDING]
    others = [f"{entry.name} ({entry.figure('ACC')})" for entry in close if entry is not best]
    sentences = [f"Within 1 point of it: {_join(others)}." if others else "No other row is within 1 point of it."]
    ranked = sorted((entry for entry in close if entry.has("ECE")), key=lambda entry: entry.mean("ECE"))
    if ranked:
        which = f"{ranked[0].name} has the lowest ECE of these rows:" if others else "Its ECE is"
        words = f"{which} {ranked[0].figure('ECE')}"
        rival = ours if ours in ranked[1:] else ranked[1] if len(ranked) > 1 else None
        if rival is not None:
            words += f"; {rival.name} has {rival.figure('ECE')} (higher {_compare(rival, ranked[0], 'ECE')})"
        sentences.append(f"{words}.")
    if silent := [entry.name for entry in close if not entry.has("ECE")]:
        sentences.append(f"No confidence, so no ECE: {_join(silent)}.")
    if ours is not None and ours not in close:
        sentences.append(f"{ours.name}, which is not among them, has an ECE of {ours.figure('ECE')}.")
    return sentences


def _judge_accuracy(ours: _Entry, entries: Sequence[_Entry]) -> list[str]:
    """Name every row that is more accurate than CDC's calibration head."""
    ahead = [entry for entry in entries if entry.mean("ACC") > ours.mean("ACC") + ROUNDING]
    ahead.sort(key=lambda entry: -entry.mean("ACC"))
    names = [f"{entry.name} ({_compare(entry, ours, 'ACC')})" for entry in ahead]
    found = (
        f"{ours.name} is less accurate than {_join(names)}" if names else f"No row is more accurate than {ours.name}"
    )
    if any(entry.row.seeds > 1 for entry in entries):
        return [f"{found}."]
    return [f"{found}.", "One seed has no standard deviation: differences may be chance."]


def _compare(one: _Entry, other: _Entry, column: str) -> str:
    """Return "by ... points", and whether the larger standard deviation of both rows covers the difference."""
    difference = abs(one.mean(column) - other.mean(column))
    values = (one.row.values[column], other.row.values[column])
    deviation = max((value.deviation or 0.0 for value in values if value is not None), default=0.0)
    points = f"by {100 * difference:.1f} points" if difference >= 0.0005 else "by less than 0.1 points"
    return f"{points}, within one standard deviation" if deviation and difference <= deviation + ROUNDING else points


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
