"""Whether confidences are true (calibration) and whether they tell right from wrong predictions (rejection), Sec. 4.1.

Figures take ``confidence`` (N,), from 0 to 1, and ``correct`` (N,), whether each prediction is right; or a whole table
``probs`` (N, C) and ``columns`` (N,), where clusters stand for classes by `true_columns`: a class without a cluster
counts as one more column in which every probability is 0, and a cluster without a class as a class that no sample has.
More and fewer clusters than classes need no further rule.

Samples of one score cannot be told apart: they pass a threshold together, so no figure depends on their order.
Selective prediction accepts the images that a model is sure of and leaves the others to people. There, confidences
count as the table states them, in millionths: what is accepted is what the numbers in the file say, and sums are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdc_plugin.errors import UserError

Table = NDArray[np.floating[Any]]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

BINS = 15
HISTOGRAM_BINS = 30
# The least probability that the likelihood sees, whatever the precision: one sample costs 15.9 nats at most.
LEAST_PROBABILITY = float(np.finfo(np.float32).eps)
# Softmax in half precision overshoots 1 a little and misses the sum of 1; what is further away is no probability.
OVERSHOOT = 1e-3
SUM_TOLERANCE = 1e-2
UNIT = 1_000_000


def mean_confidence(confidence: ArrayLike) -> float:
    """Return the mean of the (N,) confidences; equal to the accuracy for a network that is right about itself."""
    return float(_confidences(confidence).mean())


def expected_calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> float:
    """Return the mean gap between confidence and accuracy over equal-width bins, weighted by their samples.

    A bin holds its upper edge, not its lower one: (0, 1/bins], ..., (1 - 1/bins, 1]; a confidence of 0 goes
    to the first. Libraries differ only for values exactly on an edge (torchmetrics bins [lower, upper) and
    keeps a bin of its own for confidence 1).
    """
    stated, right = _judged(confidence, correct)
    gap = np.bincount(_bin_of(stated, bins), weights=right - stated, minlength=bins)
    return float(np.abs(gap).sum() / len(stated))  # gap: samples x (accuracy - confidence)


def adaptive_calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> float:
    """Return the mean gap between confidence and accuracy over bins that hold the same number of samples.

    The samples, ranked by confidence, are cut into ``bins`` parts of exactly N / ``bins``: a sample on a cut
    counts in both parts by its share, so that N need be no multiple of ``bins`` and may be smaller. Samples of
    one confidence cannot be ranked; each of them counts as right by the share that is right among them, and
    the order of samples does not matter.
    """
    stated, right = _judged(confidence, correct)
    _check_least("bins", bins, 1)
    order = np.argsort(stated)
    ranked = stated[order]
    ends = _last_of_ties(ranked)
    gap = np.append(0.0, np.cumsum(right[order] - ranked)[ends])
    cuts = np.linspace(0.0, len(stated), bins + 1)
    # Between two confidences the sum of gaps grows evenly: that is the mean over the order of ties.
    return float(np.abs(np.diff(np.interp(cuts, np.append(0, ends + 1), gap))).sum() / len(stated))


def class_wise_calibration_error(probs: ArrayLike, columns: ArrayLike, bins: int = BINS) -> float:
    """Return the calibration error of every class' probability as such, averaged over the classes.

    A class' error compares its column with whether a sample is of it, over the equal-width bins of
    `expected_calibration_error`. Averaged are max(clusters, classes) columns: a cluster without a class ought
    to have probability 0 everywhere; a class without a cluster adds the share of its samples.
    """
    table, truth = _table_and_truth(probs, columns)
    _check_least("bins", bins, 1)
    samples, clusters = table.shape
    # A row sums to 1, so only a few of its entries lie above the first bin. Those are counted; the first bin
    # is what they leave of the column. The factor lets rounding of the edge to float32 not lose one.
    row, column = np.divmod(np.flatnonzero(table > 0.999 / bins), clusters)
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
    """Return the mean squared distance of probabilities to the class (1 there, 0 elsewhere): from 0 to 2.

    The sum over columns, as Brier defined it; for two classes it is twice what binary scorers give.
    """
    table, truth = _table_and_truth(probs, columns)
    squares = np.einsum("nc,nc->n", table, table).mean(dtype=np.float64)
    score = squares - 2 * _probability_of(table, truth).mean() + 1
    return max(0.0, float(score))  # rounding may carry a perfect score a hair below 0


def negative_log_likelihood(probs: ArrayLike, columns: ArrayLike) -> float:
    """Return the mean of -log(probability of the sample's class), natural logarithm.

    Probabilities below 2^-23, the resolution of float32, count as 2^-23, among them the 0 of a class without a
    cluster; scikit-learn clips at the resolution of whatever precision it is given.
    """
    likelihood = _probability_of(*_table_and_truth(probs, columns))
    return float(np.abs(np.log(np.clip(likelihood, LEAST_PROBABILITY, 1.0))).mean())


def reliability_table(
    confidence: ArrayLike, correct: ArrayLike | None = None, bins: int = BINS
) -> dict[str, list[Any]]:
    """Return samples, mean confidence and accuracy (None if unknown) of every bin of `expected_calibration_error`."""
    stated = _confidences(confidence)
    index = _bin_of(stated, bins)
    count = np.bincount(index, minlength=bins)

    def means(values: NDArray[Any]) -> list[float | None]:
        total = np.bincount(index, weights=values, minlength=bins)
        return [float(part / samples) if samples else None for part, samples in zip(total, count, strict=True)]

    accuracy = [None] * bins if correct is None else means(_right_or_wrong(correct, stated))
    return {"count": count.tolist(), "confidence": means(stated), "accuracy": accuracy}


def confidence_histogram(
    confidence: ArrayLike, correct: ArrayLike | None = None, bins: int = HISTOGRAM_BINS
) -> dict[str, list[int] | None]:
    """Count right and wrong (None if unknown) and all predictions in bins as of `expected_calibration_error`."""
    stated = _confidences(confidence)
    index = _bin_of(stated, bins)
    both = np.bincount(index, minlength=bins)
    if correct is None:
        return {"right": None, "wrong": None, "all": both.tolist()}
    right = np.bincount(index[_right_or_wrong(correct, stated)], minlength=bins)
    return {"right": right.tolist(), "wrong": (both - right).tolist(), "all": both.tolist()}


class Thresholds(NamedTuple):
    """What is accepted at every distinct score, from the highest down."""

    score: Floats  # (T,)
    positives: Integers  # (T,) positive samples that score at least as much
    negatives: Integers  # (T,) negative ones


def thresholds(scores: Floats, positive: Booleans) -> Thresholds:
    """Count both groups at every distinct one of the (N,) scores."""
    order = np.argsort(scores)[::-1]
    ranked = scores[order]
    last = _last_of_ties(ranked)
    positives = np.cumsum(positive[order], dtype=np.int64)[last]
    return Thresholds(ranked[last], positives, last + 1 - positives)


def area_under_roc(found: Thresholds) -> float | None:
    """Return the chance that a positive outscores a negative, a tie counting half; None if one group is empty."""
    positives, negatives = found.positives[-1], found.negatives[-1]
    if positives == 0 or negatives == 0:
        return None
    # The whole sum in integers: exact, whatever the order of the samples.
    twice = np.sum(np.diff(found.negatives, prepend=0) * (found.positives + np.append(0, found.positives[:-1])))
    return float(twice / (2 * positives * negatives))


def false_positive_rate(found: Thresholds, percent: int) -> float | None:
    """Return the share of negatives at the highest threshold that ``percent`` of the positives reach; None if empty."""
    positives, negatives = found.positives[-1], found.negatives[-1]
    if positives == 0 or negatives == 0:
        return None
    needed = -(-percent * positives // 100)  # rounded up, in integers: 95 % of 20 is 19
    return float(found.negatives[np.searchsorted(found.positives, needed)] / negatives)


def failure_auroc(confidence: ArrayLike, correct: ArrayLike) -> float | None:
    """Return the chance that a right prediction is more confident than a wrong one, a tie counting half.

    >>> failure_auroc([0.9, 0.8, 0.6], [True, False, True])
    0.5

    None if all predictions are right or all are wrong.
    """
    return area_under_roc(thresholds(*_judged(confidence, correct)))


def failure_fpr95(confidence: ArrayLike, correct: ArrayLike) -> float | None:
    """Return the share of wrong predictions accepted at the highest threshold that keeps 95 % of the right ones.

    All predictions at the threshold itself are accepted. None if all predictions are right or all are wrong.
    """
    return false_positive_rate(thresholds(*_judged(confidence, correct)), 95)


def area_under_risk_coverage(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return the mean over k = 1..N of the share of errors among the k most confident predictions (AURC).

    Predictions of one confidence come in no order, so the mean over all their orders is taken: among the first
    j of m tied ones with e errors, j * e / m are expected. A sort alone gives anything between the best and the
    worst order, and a trapezoid over distinct thresholds leaves open what a tie at the top, such as many
    confidences of 1, is joined with. From 0 (all right) to 1 (all wrong), always defined.
    """
    found = thresholds(*_judged(confidence, correct))
    accepted = np.append(0, found.positives + found.negatives)
    first = np.arange(1, accepted[-1] + 1)
    errors = np.interp(first, accepted, np.append(0, found.negatives))
    return float((errors / first).mean())


class RiskCoverage(NamedTuple):
    """Accepting confidences from ``threshold`` on keeps the share ``coverage``; the share ``risk`` of that is wrong."""

    threshold: Floats  # (P,) falling
    coverage: Floats  # (P,) rising, the last one 1
    risk: Floats  # (P,)


def risk_coverage_curve(confidence: ArrayLike, correct: ArrayLike, points: int = 200) -> RiskCoverage:
    """Return coverage and risk at the distinct confidences; of more than ``points``, ends and even steps between."""
    _check_least("points", points, 2)
    found = thresholds(*_judged(confidence, correct))
    accepted = found.positives + found.negatives
    kept = np.arange(len(accepted))
    if len(kept) > points:
        kept = np.unique(np.searchsorted(accepted, np.linspace(accepted[0], accepted[-1], points)))
    return RiskCoverage(found.score[kept], accepted[kept] / accepted[-1], found.negatives[kept] / accepted[kept])


@dataclass(frozen=True)
class Acceptance:
    """Which images are accepted."""

    mask: Booleans  # (N,)
    threshold: float | None  # every accepted image is at least so sure, no other candidate is; None where none is
    expected_accuracy: float | None  # mean confidence of the accepted ones, None where there are none

    @property
    def count(self) -> int:
        return int(self.mask.sum())

    @property
    def coverage(self) -> float:
        """Return the share of all images that is accepted."""
        return self.count / len(self.mask) if len(self.mask) else 0.0


def accept_above(confidence: NDArray[np.floating], threshold: float) -> Acceptance:
    """Return the images (N,) whose confidence is the threshold or more."""
    return _acceptance(_millionths(confidence), _level(threshold))


def accept_to_target(confidence: NDArray[np.floating], target: float) -> Acceptance:
    """Return the largest set of surest images (N,) whose mean confidence is the target or more.

    Images that are equally sure are taken or left together. Nothing is accepted where even the surest stay below
    the target.
    """
    parts, level = _millionths(confidence), _level(target)
    ranked = np.sort(parts)[::-1]
    last = _last_of_ties(ranked)
    reached = last[np.cumsum(ranked)[last] >= level * (last + 1)]
    return _acceptance(parts, int(ranked[reached[-1]]) if len(reached) else UNIT + 1)


def accept_inside(
    outlier: NDArray[np.bool_] | None, confidence: NDArray[np.floating], accept: Callable[..., Acceptance], share: float
) -> Acceptance:
    """Return what ``accept``, one of the two functions above, accepts of the images that are no outliers.

    >>> accept_inside(np.array([False, True]), np.array([0.9, 0.99]), accept_above, 0.5).mask.tolist()
    [True, False]
    """
    if outlier is None:
        return accept(confidence, share)
    found = accept(confidence[~outlier], share)
    mask = np.zeros(len(outlier), dtype=bool)
    mask[~outlier] = found.mask
    return replace(found, mask=mask)


def _acceptance(parts: Integers, lowest: int) -> Acceptance:
    mask = parts >= lowest
    if not mask.any():
        return Acceptance(mask, None, None)
    return Acceptance(mask, lowest / UNIT, int(parts[mask].sum()) / (int(mask.sum()) * UNIT))


def _millionths(confidence: NDArray[np.floating]) -> Integers:
    values = np.asarray(confidence, dtype=np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1 + 1e-6)).all():
        raise ValueError("expected confidences (N,) from 0 to 1")
    return np.rint(values * UNIT).clip(0, UNIT).astype(np.int64)


def _level(share: float) -> int:
    if not 0 < share <= 1:
        raise ValueError(f"expected a share above 0 and up to 1, found {share}")
    return round(share * UNIT)


def _last_of_ties(ranked: NDArray[Any]) -> Integers:
    """Return the index of the last of every distinct value of a sorted vector."""
    return np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True)[: len(ranked)])


def _bin_of(values: Floats, bins: int) -> Integers:
    _check_least("bins", bins, 1)
    return np.searchsorted(np.linspace(0.0, 1.0, bins + 1)[1:-1], values, side="left")


def _probability_of(table: Table, truth: Integers) -> Floats:
    """Return what each sample's class was given, (N,): 0 where the class has no column."""
    inside = np.flatnonzero(truth < table.shape[1])
    found = np.zeros(len(table))
    found[inside] = table[inside, truth[inside]]
    return found


def check_probabilities(probs: ArrayLike) -> Table:
    """Return (N, C) probabilities whose rows sum to 1, in the precision they have, at least float32."""
    table = _numbers(probs, "probabilities")
    if table.ndim != 2 or 0 in table.shape:
        raise UserError(f"probabilities have shape (samples, clusters); found {table.shape}; pass one row per image")
    if table.dtype not in (np.float32, np.float64):
        table = table.astype(np.float32 if table.dtype == np.float16 else np.float64)
    _refuse_outside(table, "probabilities")
    sums = table.sum(axis=1)
    if abs(sums - 1).max() > SUM_TOLERANCE:
        raise UserError(
            f"the probabilities of every sample sum to 1; found sums of {sums.min():.4g} to {sums.max():.4g}; "
            "apply softmax to logits before passing them"
        )
    return table


def check_scores(values: ArrayLike, name: str) -> Floats:
    """Return (N,) numbers, at least one."""
    found = _numbers(values, name).astype(np.float64)
    if found.ndim != 1 or len(found) == 0:
        raise UserError(f"{name} are a list of at least one number; found shape {found.shape}; pass one for each image")
    return found


def _confidences(values: ArrayLike) -> Floats:
    found = check_scores(values, "confidences")
    _refuse_outside(found, "confidences")
    return np.clip(found, 0.0, 1.0)


def _judged(confidence: ArrayLike, correct: ArrayLike) -> tuple[Floats, Booleans]:
    stated = _confidences(confidence)
    return stated, _right_or_wrong(correct, stated)


def _right_or_wrong(correct: ArrayLike, confidence: Floats) -> Booleans:
    right = np.asarray(correct)
    if right.shape != confidence.shape:
        raise UserError(
            f"every confidence needs one right-or-wrong; found shapes {confidence.shape} and {right.shape}; "
            "pass both for the same samples"
        )
    if right.dtype != bool and not np.isin(right, (0, 1)).all():
        raise UserError(
            f"right-or-wrong is 1 or 0, True or False; found other values ({right.dtype}); pass predicted == true"
        )
    return right.astype(bool)


def _table_and_truth(probs: ArrayLike, columns: ArrayLike) -> tuple[Table, Integers]:
    """Return probabilities, and each sample's column; a number past the last one is a class without a column."""
    table, truth = check_probabilities(probs), np.asarray(columns)
    if truth.shape != (len(table),) or not np.issubdtype(truth.dtype, np.integer) or truth.min() < 0:
        raise UserError(
            f"the true columns are {len(table)} whole numbers from 0 on; found shape {truth.shape} of {truth.dtype}; "
            "match clusters to labels with true_columns"
        )
    return table, truth.astype(np.int64)


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name} is at least {least}; found {name}={value}; leave it out for the usual number")


def _numbers(values: ArrayLike, name: str) -> NDArray[Any]:
    found = np.asarray(values)
    if found.dtype.kind not in "fiub":
        raise UserError(f"{name} are numbers; found {found.dtype}; convert them to float32 first")
    return found


def _refuse_outside(values: NDArray[Any], name: str) -> None:
    low, high = float(values.min()), float(values.max())
    if not (low >= -OVERSHOOT and high <= 1 + OVERSHOOT):  # written so that NaN fails too
        raise UserError(
            f"{name} go from 0 to 1; found {low:.4g} to {high:.4g}; apply softmax to logits before passing them"
        )
