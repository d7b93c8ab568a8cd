"""Failure rejection (Sec. 4.1): whether confidence tells right predictions from wrong ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cdc_plugin.metrics.ranking import Thresholds, area_under_roc, false_positive_rate, thresholds
from cdc_plugin.metrics.validation import Floats, at_least, confidences, right_or_wrong


class RiskCoverage(NamedTuple):
    """Accepting confidences from ``threshold`` on keeps the share ``coverage``; the share ``risk`` of that is wrong."""

    threshold: Floats  # (P,) falling
    coverage: Floats  # (P,) rising, the last one 1
    risk: Floats  # (P,)


def failure_auroc(confidence: ArrayLike, correct: ArrayLike) -> float | None:
    """Chance that a right prediction is more confident than a wrong one, a tie counting half.

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
