"""The result of an audit: accuracy with exact bounds and the calibration error, as numbers and in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.metrics import adaptive_calibration_error

ANSWERS_PER_BIN, MOST_BINS = 10, 15
REPEATS = 400


def compute_accuracy_interval(right: int, answered: int, certainty: float = 0.95) -> tuple[float, float]:
    """Return the Clopper-Pearson interval, which holds the true accuracy in at least ``certainty`` of all audits.

    >>> low, high = compute_accuracy_interval(right=95, answered=100)
    >>> round(low, 3), round(high, 3)
    (0.887, 0.984)
    """
    from scipy.stats import binomtest  # late: takes a second, and refusals need none

    interval = binomtest(right, answered).proportion_ci(certainty, method="exact")
    return float(interval.low), float(interval.high)


def compute_accuracy_bound(right: int, answered: int, certainty: float = 0.95) -> float:
    """Return the one-sided Clopper-Pearson bound: the accuracy is lower in at most 1 - certainty of all audits."""
    from scipy.stats import binomtest

    return float(binomtest(right, answered, alternative="greater").proportion_ci(certainty, method="exact").low)


def choose_bin_count(answered: int) -> int:
    """Return how many bins hold at least 10 answers each: at least one bin, at most 15."""
    return min(max(answered // ANSWERS_PER_BIN, 1), MOST_BINS)


def simulate_calibration_error(confidence: NDArray[np.float64], bins: int) -> float:
    """Estimate the calibration error that a perfectly calibrated model shows on average, by chance alone.

    An absolute gap is never negative, so few answers always show one. Answers are simulated with the stated
    confidences as their true probabilities; the seed is fixed, so equal confidences give an equal figure.
    """
    draws = np.random.default_rng(0).random((REPEATS, len(confidence))) < confidence
    return float(np.mean([adaptive_calibration_error(confidence, right, bins) for right in draws]))


def measure_answers(right: NDArray[np.bool_], confidence: NDArray[np.float64]) -> Accuracy:
    """Return the accuracy with its bounds, which hold for images of `draw_rows`: each is drawn with equal chance."""
    count, total = int(right.sum()), len(right)
    lower, upper = compute_accuracy_interval(count, total)
    return Accuracy(count, total, float(confidence.mean()), lower, upper, compute_accuracy_bound(count, total))


@dataclass(frozen=True)
class Accuracy:
    """Right answers, the mean confidence that was stated for them, and bounds on the accuracy at 95 %."""

    right: int
    answered: int
    confidence: float
    lower: float
    upper: float
    at_least: float

    def __str__(self) -> str:
        return (
            f"{self.accuracy:.1%} ({self.right} of {self.answered} right), with 95% certainty between "
            f"{self.lower:.1%} and {self.upper:.1%}, or at least {self.at_least:.1%}"
        )

    @property
    def accuracy(self) -> float:
        return self.right / self.answered

    @property
    def confidence_fits(self) -> bool:
        """Whether the stated confidence is an accuracy that these answers allow."""
        return self.lower <= self.confidence <= self.upper


@dataclass(frozen=True)
class AuditResult:
    """Fractions of 1. ``selected`` is None where no answered image is selected.

    The calibration error uses ``bins`` bins with equal numbers of answers. Few answers overstate it: for a perfectly
    calibrated model all of it is ``calibration_error_by_chance``.
    """

    source: str
    image_count: int
    drawn: int
    question: str
    overall: Accuracy
    selected: Accuracy | None
    calibration_error: float
    calibration_error_by_chance: float
    bins: int
    notes: tuple[str, ...]

    @property
    def at_least_if_unanswered_wrong(self) -> float:
        """The lower bound that holds whatever the images without an answer show."""
        return compute_accuracy_bound(self.overall.right, self.drawn)

    def lines(self) -> list[str]:
        """Return the result as lines for the terminal."""
        overall = self.overall
        verdict = "too high" if overall.confidence > overall.upper else "too low"
        if overall.confidence_fits:
            verdict = "consistent with these answers"
        lines = [
            f"{overall.answered} of {self.drawn} images answered, drawn from {self.image_count:,} ({self.source}); "
            f"the question was {self.question}",
            f"accuracy: {overall}",
        ]
        if self.selected is not None:
            lines.append(f"accuracy of the selected images: {self.selected}")
        lines += [
            f"stated confidence: {overall.confidence:.1%} on average, {verdict}",
            f"calibration error: {self.calibration_error:.1%} in {self.bins} bin{'s' if self.bins > 1 else ''}; a "
            f"perfectly calibrated model would show {self.calibration_error_by_chance:.1%} with so few answers",
            *(f"note: {note}" for note in self.notes),
        ]
        if overall.answered < self.drawn:
            lines.append(
                "note: if every image without an answer were wrong, the accuracy would still be at least "
                f"{self.at_least_if_unanswered_wrong:.1%}"
            )
        return lines
