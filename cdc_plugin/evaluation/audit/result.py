"""What an audit has shown: accuracy with its bounds and the calibration error, as numbers and in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.evaluation.audit.bounds import accuracy_at_least, accuracy_interval


def measure_answers(right: NDArray[np.bool_], confidence: NDArray[np.float64]) -> Measured:
    """Accuracy with its bounds. They hold for answers of `draw_rows`, which see every image with the same chance."""
    count, total = int(right.sum()), len(right)
    lower, upper = accuracy_interval(count, total)
    return Measured(count, total, float(confidence.mean()), lower, upper, accuracy_at_least(count, total))


def _in_words(found: Measured) -> str:
    return (
        f"{_percent(found.accuracy)} ({found.right} of {found.answered} right), with 95 % certainty between "
        f"{_percent(found.lower)} and {_percent(found.upper)}, or at least {_percent(found.at_least)}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _misfit(found: Measured) -> str:
    return "which is too sure of itself" if found.confidence > found.upper else "which is too modest"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


@dataclass(frozen=True)
class Measured:
    """Right answers, the mean confidence that was stated for them, and bounds on the accuracy at 95 %."""

    right: int
    answered: int
    confidence: float
    lower: float
    upper: float
    at_least: float

    @property
    def accuracy(self) -> float:
        return self.right / self.answered

    @property
    def confidence_fits(self) -> bool:
        """Whether the stated confidence is an accuracy that these answers allow."""
        return self.lower <= self.confidence <= self.upper


@dataclass(frozen=True)
class AuditResult:
    """Fractions of 1. ``selected`` is None where no image that was answered is selected, or nothing was.

    The calibration error is that of ``bins`` bins with the same number of answers. The fewer answers, the more it
    is too high on average: for a perfectly calibrated model by all of ``calibration_error_by_chance``.
    """

    source: str
    images: int
    drawn: int
    judged: str
    everything: Measured
    selected: Measured | None
    calibration_error: float
    calibration_error_by_chance: float
    bins: int
    notes: tuple[str, ...]

    @property
    def at_least_if_unanswered_wrong(self) -> float:
        """The lower bound that holds whatever the images without an answer show."""
        return accuracy_at_least(self.everything.right, self.drawn)

    def lines(self) -> list[str]:
        """For the terminal."""
        found = self.everything
        lines = [
            f"{found.answered} of {self.drawn} images answered, drawn from {self.images:,} ({self.source}); judged is "
            f"{self.judged}",
            f"accuracy: {_in_words(found)}",
        ]
        if self.selected is not None:
            lines.append(f"of the selected images: {_in_words(self.selected)}")
        fits = "which these answers bear out" if found.confidence_fits else _misfit(found)
        by_chance = _percent(self.calibration_error_by_chance)
        lines += [
            f"stated confidence: {_percent(found.confidence)} on average, {fits}",
            f"calibration error: {_percent(self.calibration_error)} in {_counted(self.bins, 'bin')}; a perfectly "
            f"calibrated model would show {by_chance} with so few answers",
        ]
        lines += [f"note: {note}" for note in self.notes]
        if found.answered < self.drawn:
            lines.append(
                f"note: if every image without an answer were wrong, the accuracy would still be at least "
                f"{_percent(self.at_least_if_unanswered_wrong)}"
            )
        return lines
