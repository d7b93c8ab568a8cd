"""How well one score tells two groups apart, threshold by threshold.

Samples of one score cannot be told apart: they pass a threshold together, so no figure depends on their order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.metrics.validation import Floats, Integers


class Thresholds(NamedTuple):
    """What is accepted at every distinct score, from the highest down."""

    score: Floats  # (T,)
    positives: Integers  # (T,) positive samples that score at least as much
    negatives: Integers  # (T,) negative ones


def thresholds(scores: Floats, positive: NDArray[np.bool_]) -> Thresholds:
    """Count both groups at every distinct one of the (N,) scores."""
    order = np.argsort(scores)[::-1]
    ranked = scores[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    positives = np.cumsum(positive[order], dtype=np.int64)[last]
    return Thresholds(ranked[last], positives, last + 1 - positives)


def area_under_roc(found: Thresholds) -> float | None:
    """Chance that a positive sample outscores a negative one, a tie counting half; None if one group is empty."""
    positives, negatives = found.positives[-1], found.negatives[-1]
    if positives == 0 or negatives == 0:
        return None
    # The whole sum in integers: exact, whatever the order of the samples.
    twice = np.sum(np.diff(found.negatives, prepend=0) * (found.positives + np.append(0, found.positives[:-1])))
    return float(twice / (2 * positives * negatives))


def false_positive_rate(found: Thresholds, percent: int) -> float | None:
    """Share of negatives at the highest threshold that ``percent`` of the positives reach; None without either."""
    positives, negatives = found.positives[-1], found.negatives[-1]
    if positives == 0 or negatives == 0:
        return None
    needed = -(-percent * positives // 100)  # rounded up, in integers: 95 % of 20 is 19
    return float(found.negatives[np.searchsorted(found.positives, needed)] / negatives)


def average_precision(found: Thresholds) -> float | None:
    """Area under the precision-recall curve as a sum of steps, without interpolation; None without positives."""
    if found.positives[-1] == 0:
        return None
    precision = found.positives / (found.positives + found.negatives)
    return float(np.sum(precision * np.diff(found.positives, prepend=0)) / found.positives[-1])
