"""What a number of right answers says about all images: exact bounds, and the calibration error of few answers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.metrics import adaptive_calibration_error

ANSWERS_PER_BIN, MOST_BINS = 10, 15
REPEATS = 400


def accuracy_interval(right: int, answered: int, certainty: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval: it holds the true accuracy in at least ``certainty`` of all audits."""
    error = (1 - certainty) / 2
    return _lower(right, answered, error), 1 - _lower(answered - right, answered, error)


def accuracy_at_least(right: int, answered: int, certainty: float = 0.95) -> float:
    """One-sided Clopper-Pearson bound: the accuracy is higher, which is wrong in at most 1 - certainty of audits."""
    return _lower(right, answered, 1 - certainty)


def bins_for(answered: int) -> int:
    """Bins of at least 10 answers each, at most 15."""
    return min(max(answered // ANSWERS_PER_BIN, 1), MOST_BINS)


def calibration_error_by_chance(confidence: NDArray[np.float64], bins: int) -> float:
    """The calibration error that a perfectly calibrated model would show on average, from chance alone.

    An absolute gap can't be negative, so few answers always show one. ModelOutputs are drawn again and again with
    the stated confidences as their true chances; the same confidences give the same figure.
    """
    randomness = np.random.default_rng(0)
    right = randomness.random((REPEATS, len(confidence))) < confidence
    return float(np.mean([adaptive_calibration_error(confidence, answers, bins) for answers in right]))


def _lower(right: int, answered: int, error: float) -> float:
    """The accuracy at which ``right`` or more of ``answered`` would come up with the chance ``error``."""
    from scipy.special import betaincinv  # late: scipy takes its time

    return float(betaincinv(right, answered - right + 1, error)) if right else 0.0
