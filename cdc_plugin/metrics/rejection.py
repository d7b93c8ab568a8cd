"""Rejection (Sec. 4.1): whether a score tells two groups apart, right predictions from wrong ones above all.

Samples of one score cannot be told apart: they pass a threshold together, so no figure depends on their order.
Selective prediction accepts the images that a model is sure of and leaves the others to people. There, confidences
count as the table states them, in millionths: what is accepted is what the numbers in the file say, and sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdc_plugin.metrics.validation import Floats, Integers, at_least, confidences, right_or_wrong

UNIT = 1_000_000


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


class RiskCoverage(NamedTuple):
    """Accepting confidences from ``threshold`` on keeps the share ``coverage``; the share ``risk`` of that is wrong."""

    threshold: Floats  # (P,) falling
    coverage: Floats  # (P,) rising, the last one 1
    risk: Floats  # (P,)


def failure_auroc(confidence: ArrayLike, correct: ArrayLike) -> float | None:
    """Chance that a right prediction is more confident than a wrong one, a tie counting half.

    >>> failure_auroc([0.9, 0.8, 0.6], [True, False, True])
    0.5

    None if all predictions are right or all are wrong.

    Args:
        confidence: (N,) from 0 to 1.
        correct: (N,) whether each prediction is right.
    """
    return area_under_roc(_ranked(confidence, correct))


def failure_fpr95(confidence: ArrayLike, correct: ArrayLike) -> float | None:
    """Share of the wrong predictions that are accepted at the highest threshold that keeps 95 % of the right ones.

    All predictions at the threshold itself are accepted. None if all predictions are right or all are wrong.
    """
    return false_positive_rate(_ranked(confidence, correct), 95)


def area_under_risk_coverage(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Mean over k = 1..N of the share of errors among the k most confident predictions (AURC).

    Predictions of one confidence come in no order, so the mean over all their orders is taken: among the first
    j of m tied ones with e errors, j * e / m are expected. A sort alone gives anything between the best and the
    worst order, and a trapezoid over distinct thresholds leaves open what a tie at the top, such as many
    confidences of 1, is joined with. From 0 (all right) to 1 (all wrong), always defined.
    """
    found = _ranked(confidence, correct)
    accepted = np.append(0, found.positives + found.negatives)
    first = np.arange(1, accepted[-1] + 1)
    errors = np.interp(first, accepted, np.append(0, found.negatives))
    return float((errors / first).mean())


def risk_coverage_curve(confidence: ArrayLike, correct: ArrayLike, points: int = 200) -> RiskCoverage:
    """Coverage and risk at the distinct confidences; of more than ``points``, those at about even coverage.

    The most confident and the least confident threshold are always among them.
    """
    at_least("points", points, 2)
    found = _ranked(confidence, correct)
    accepted = found.positives + found.negatives
    kept = np.arange(len(accepted))
    if len(kept) > points:
        kept = np.unique(np.searchsorted(accepted, np.linspace(accepted[0], accepted[-1], points)))
    return RiskCoverage(
        threshold=found.score[kept],
        coverage=accepted[kept] / accepted[-1],
        risk=found.negatives[kept] / accepted[kept],
    )


def _ranked(confidence: ArrayLike, correct: ArrayLike) -> Thresholds:
    stated = confidences(confidence)
    return thresholds(stated, right_or_wrong(correct, stated))


@dataclass(frozen=True)
class Acceptance:
    """Which images are accepted.

    Args:
        mask: (N,) True for the accepted ones.
        threshold: every accepted image is at least so sure, no other is; None where nothing is accepted.
        expected_accuracy: mean confidence of the accepted ones, None where there are none.
    """

    mask: NDArray[np.bool_]
    threshold: float | None
    expected_accuracy: float | None

    @property
    def count(self) -> int:
        return int(self.mask.sum())

    @property
    def coverage(self) -> float:
        """Share of all images that is accepted."""
        return self.count / len(self.mask) if len(self.mask) else 0.0


def accept_above(confidence: NDArray[np.floating], threshold: float) -> Acceptance:
    """Return the images (N,) whose confidence is the threshold or more."""
    parts = _millionths(confidence)
    return _acceptance(parts, _level(threshold))


def accept_to_target(confidence: NDArray[np.floating], target: float) -> Acceptance:
    """Return the largest set of surest images (N,) whose mean confidence is the target or more.

    Images that are equally sure are taken or left together. Nothing is accepted where even the surest stay below
    the target.
    """
    parts, level = _millionths(confidence), _level(target)
    sorted_parts = np.sort(parts)[::-1]
    sums = np.cumsum(sorted_parts)
    counts = np.arange(1, len(parts) + 1)
    last_of_its_kind = np.append(sorted_parts[1:] != sorted_parts[:-1], True)[: len(parts)]
    reached = np.flatnonzero(last_of_its_kind & (sums >= level * counts))
    return _acceptance(parts, int(sorted_parts[reached[-1]]) if len(reached) else UNIT + 1)


def _acceptance(parts: NDArray[np.int64], lowest: int) -> Acceptance:
    mask = parts >= lowest
    if not mask.any():
        return Acceptance(mask, None, None)
    return Acceptance(mask, lowest / UNIT, int(parts[mask].sum()) / (int(mask.sum()) * UNIT))


def _millionths(confidence: NDArray[np.floating]) -> NDArray[np.int64]:
    values = np.asarray(confidence, dtype=np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1 + 1e-6)).all():
        raise ValueError("expected confidences (N,) from 0 to 1")
    return np.rint(values * UNIT).clip(0, UNIT).astype(np.int64)


def _level(share: float) -> int:
    if not 0 < share <= 1:
        raise ValueError(f"expected a share above 0 and up to 1, found {share}")
    return round(share * UNIT)
