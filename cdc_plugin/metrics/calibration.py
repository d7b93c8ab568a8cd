"""Whether stated probabilities are true: calibration errors (Sec. 4.1), proper scores and what diagrams draw.

Where a figure looks at the whole table of probabilities, clusters stand for classes by `true_columns`: a class
without a cluster counts as one more column in which every probability is 0, and a cluster without a class as a
class that no sample has. More and fewer clusters than classes need no further rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cdc_plugin.metrics.validation import (
    Floats,
    Integers,
    Table,
    at_least,
    confidences,
    probability_table,
    right_or_wrong,
    true_column,
)

BINS = 15
HISTOGRAM_BINS = 30
# The least probability that the likelihood sees, whatever the precision: one sample costs 15.9 nats at most.
LEAST_PROBABILITY = float(np.finfo(np.float32).eps)


def mean_confidence(confidence: ArrayLike) -> float:
    """Average of the (N,) confidences; equal to the accuracy for a network that is right about itself."""
    return float(confidences(confidence).mean())


def expected_calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> float:
    """Mean gap between confidence and accuracy over equal-width bins, weighted by their samples.

    A bin holds its upper edge, not its lower one: (0, 1/bins], ..., (1 - 1/bins, 1]; a confidence of 0 goes
    to the first. Libraries differ only for values exactly on an edge (torchmetrics bins [lower, upper) and
    keeps a bin of its own for confidence 1).

    Args:
        confidence: (N,) from 0 to 1.
        correct: (N,) whether each prediction is right.
    """
    stated = confidences(confidence)
    right = right_or_wrong(correct, stated)
    at_least("bins", bins, 1)
    gap = np.bincount(_bin_of(stated, bins), weights=right - stated, minlength=bins)
    return float(np.abs(gap).sum() / len(stated))  # gap: samples x (accuracy - confidence)


def adaptive_calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> float:
    """Mean gap between confidence and accuracy over bins that hold the same number of samples.

    The samples, ranked by confidence, are cut into ``bins`` parts of exactly N / ``bins``: a sample on a cut
    counts in both parts by its share, so that N need be no multiple of ``bins`` and may be smaller. Samples of
    one confidence cannot be ranked; each of them counts as right by the share that is right among them, and
    the order of samples does not matter.

    Args:
        confidence: (N,) from 0 to 1.
        correct: (N,) whether each prediction is right.
    """
    stated = confidences(confidence)
    right = right_or_wrong(correct, stated)
    at_least("bins", bins, 1)
    order = np.argsort(stated)
    ranked = stated[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # last of every confidence
    gap = np.append(0.0, np.cumsum(right[order] - ranked)[ends])
    cuts = np.linspace(0.0, len(stated), bins + 1)
    # Between two confidences the sum of gaps grows evenly: that is the mean over the order of ties.
    return float(np.abs(np.diff(np.interp(cuts, np.append(0, ends + 1), gap))).sum() / len(stated))


def class_wise_calibration_error(probs: ArrayLike, columns: ArrayLike, bins: int = BINS) -> float:
    """Calibration error of every class' probability as such, averaged over the classes.

    A class' error compares its column with whether a sample is of it, over the equal-width bins of
    `expected_calibration_error`. Averaged are max(clusters, classes) columns: a cluster without a class ought
    to have probability 0 everywhere; a class without a cluster adds the share of its samples.

    Args:
        probs: (N, C).
        columns: (N,) of `true_columns`.
    """
    table = probability_table(probs)
    truth = true_column(columns, table)
    at_least("bins", bins, 1)
    samples, clusters = table.shape
    # A row sums to 1, so only a few of its entries lie above the first bin. Those are counted; the first bin
    # is what they leave of the column. The factor lets rounding of the edge to float32 not lose one.
    above = np.flatnonzero(table > 0.999 / bins)
    row, column = np.divmod(above, clusters)
    value = table[row, column].astype(np.float64)
    flat = column * bins + _bin_of(value, bins)
    found = np.bincount(flat, weights=(truth[row] == column) - value, minlength=clusters * bins)
    gap = found.reshape(clusters, bins).astype(np.float64)  # bincount of nothing gives integers
    without_cluster = truth >= clusters
    samples_of = np.bincount(truth[~without_cluster], minlength=clusters)
    gap[:, 0] = samples_of - table.sum(axis=0, dtype=np.float64) - gap[:, 1:].sum(axis=1)
    total = np.abs(gap).sum() + without_cluster.sum()
    return float(total / samples / (clusters + len(np.unique(truth[without_cluster]))))


def brier_score(probs: ArrayLike, columns: ArrayLike) -> float:
    """Mean squared distance between a sample's probabilities and its class (1 there, 0 elsewhere): from 0 to 2.

    The sum over columns, as Brier defined it; for two classes it is twice what binary scorers give.

    Args:
        probs: (N, C).
        columns: (N,) of `true_columns`.
    """
    table = probability_table(probs)
    squares = np.einsum("nc,nc->n", table, table).mean(dtype=np.float64)
    score = squares - 2 * _probability_of(table, true_column(columns, table)).mean() + 1
    return max(0.0, float(score))  # rounding may carry a perfect score a hair below 0


def negative_log_likelihood(probs: ArrayLike, columns: ArrayLike) -> float:
    """Mean of -log(probability of the sample's class), natural logarithm.

    Probabilities below 2^-23, the resolution of float32, count as 2^-23, among them the 0 of a class without a
    cluster; scikit-learn clips at the resolution of whatever precision it is given.

    Args:
        probs: (N, C).
        columns: (N,) of `true_columns`.
    """
    table = probability_table(probs)
    likelihood = _probability_of(table, true_column(columns, table))
    return float(np.abs(np.log(np.clip(likelihood, LEAST_PROBABILITY, 1.0))).mean())


def reliability_table(
    confidence: ArrayLike, correct: ArrayLike | None = None, bins: int = BINS
) -> dict[str, list[Any]]:
    """Return samples, mean confidence and accuracy of every bin of `expected_calibration_error`; None for an empty bin.

    Args:
        confidence: (N,) from 0 to 1.
        correct: (N,) whether each prediction is right; None where nobody knows, and no accuracy is given.
    """
    stated = confidences(confidence)
    at_least("bins", bins, 1)
    index = _bin_of(stated, bins)
    count = np.bincount(index, minlength=bins)
    accuracy: list[float | None] = [None] * bins
    if correct is not None:
        accuracy = _means(right_or_wrong(correct, stated).astype(np.float64), index, count)
    return {"count": count.tolist(), "confidence": _means(stated, index, count), "accuracy": accuracy}


def confidence_histogram(
    confidence: ArrayLike, correct: ArrayLike | None = None, bins: int = HISTOGRAM_BINS
) -> dict[str, list[int] | None]:
    """Count the right, the wrong and all predictions in equal-width bins of confidence over [0, 1].

    Edges as in `expected_calibration_error`. Without ``correct``, ``right`` and ``wrong`` are None.
    """
    stated = confidences(confidence)
    at_least("bins", bins, 1)
    index = _bin_of(stated, bins)
    both = np.bincount(index, minlength=bins)
    if correct is None:
        return {"right": None, "wrong": None, "all": both.tolist()}
    right = np.bincount(index[right_or_wrong(correct, stated)], minlength=bins)
    return {"right": right.tolist(), "wrong": (both - right).tolist(), "all": both.tolist()}


def _bin_of(values: Floats, bins: int) -> Integers:
    return np.searchsorted(np.linspace(0.0, 1.0, bins + 1)[1:-1], values, side="left")


def _means(values: Floats, index: Integers, count: Integers) -> list[float | None]:
    total = np.bincount(index, weights=values, minlength=len(count))
    return [float(part / samples) if samples else None for part, samples in zip(total, count, strict=True)]


def _probability_of(table: Table, truth: Integers) -> Floats:
    """(N,) what each sample's class was given: 0 where the class has no column."""
    inside = np.flatnonzero(truth < table.shape[1])
    found = np.zeros(len(table))
    found[inside] = table[inside, truth[inside]]
    return found
