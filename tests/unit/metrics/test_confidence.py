import math
from itertools import permutations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score, roc_curve
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from cdc_plugin.errors import UserError
from cdc_plugin.metrics import (
    adaptive_calibration_error,
    area_under_risk_coverage,
    brier_score,
    class_wise_calibration_error,
    confidence_histogram,
    expected_calibration_error,
    failure_auroc,
    failure_fpr95,
    mean_confidence,
    negative_log_likelihood,
    reliability_table,
    risk_coverage_curve,
    true_columns,
)
from tests.helpers.metric_cases import CONFIDENCES, TABLES, graded

PROBS = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
MIXED = [name for name, (_, correct) in CONFIDENCES.items() if 0 < correct.sum() < len(correct)]
BINNED = [expected_calibration_error, adaptive_calibration_error, reliability_table, confidence_histogram]
RANKED = [failure_auroc, failure_fpr95, area_under_risk_coverage]


def torchmetrics_error(confidence, correct, bins=15):
    return float(
        binary_calibration_error(torch.tensor(confidence), torch.tensor(correct).long(), n_bins=bins, norm="l1")
    )


def squared_up(probs, columns):
    """The table with a column of zeros for every class that has no cluster, for libraries that know no such class."""
    table = np.asarray(probs)
    missing = max(0, columns.max() + 1 - table.shape[1])
    return np.hstack([table, np.zeros((len(table), missing), table.dtype)])


def mean_risk(correct):
    """AURC of predictions in a given order, straight from its definition."""
    wrong = [not right for right in correct]
    return sum(sum(wrong[:k]) / k for k in range(1, len(wrong) + 1)) / len(wrong)


@pytest.mark.parametrize(
    ("confidence", "correct", "error"),
    [
        # Bins of width 0.5: {0.2 wrong, 0.4 right} and {0.8 right, 1.0 wrong}.
        ([0.2, 0.4, 0.8, 1.0], [0, 1, 1, 0], (abs(0.5 - 0.3) * 2 + abs(0.5 - 0.9) * 2) / 4),
        # The upper edge belongs to the lower bin: 0.5 shares one with 0.25; alone they miss by 0.75 and 0.5.
        ([0.25, 0.5], [1, 0], 0.125),
    ],
)
def test_calibration_error_by_hand(confidence, correct, error):
    assert expected_calibration_error(confidence, correct, bins=2) == pytest.approx(error)


def test_torchmetrics_puts_full_confidence_in_a_bin_of_its_own():
    # Ours: one bin (14/15, 1], accuracy 0.5 against 0.975. Torchmetrics: 0.95 and 1.0 apart, errors 0.05 and 1.
    confidence, correct = [0.95, 1.0], [True, False]
    assert expected_calibration_error(confidence, correct) == pytest.approx(0.475)
    assert torchmetrics_error(confidence, correct) == pytest.approx(0.525)


@pytest.mark.parametrize("bins", [1, 10, 15])
@pytest.mark.parametrize("case", CONFIDENCES)
def test_calibration_error_agrees_with_torchmetrics(case, bins):
    confidence, correct = CONFIDENCES[case]
    if case in ("many ties", "mostly 1.0"):
        confidence = confidence * 0.9999  # off the edges of bins, where the definitions differ
    oracle = torchmetrics_error(confidence, correct, bins)
    assert expected_calibration_error(confidence, correct, bins) == pytest.approx(oracle, abs=1e-6)


@pytest.mark.parametrize(
    ("confidence", "correct", "bins", "error"),
    [
        # Two bins of two samples: {0.2 wrong, 0.6 right} and {0.7 right, 0.9 right}.
        ([0.9, 0.2, 0.7, 0.6], [1, 0, 1, 1], 2, (abs(0.5 - 0.4) + abs(1 - 0.8)) / 2),
        # A sample on the cut: {0.4 wrong, half of 0.6 right}, {half of 0.6 right, 0.8 right}.
        ([0.4, 0.6, 0.8], [0, 1, 1], 2, (abs(-0.4 + 0.5 * 0.4) + (0.5 * 0.4 + 0.2)) / 3),
        # One confidence for all: every bin is 3/4 right, whoever comes first.
        ([1.0] * 4, [1, 0, 1, 1], 2, 0.25),
        # Fewer samples than bins; of three bins the middle one holds a third of either sample.
        ([0.9, 0.6], [1, 0], 4, (0.1 + 0.6) / 2),
        ([0.9, 0.6], [1, 0], 3, (0.6 * 2 / 3 + abs(0.1 - 0.6) / 3 + 0.1 * 2 / 3) / 2),
    ],
)
def test_adaptive_error_by_hand(confidence, correct, bins, error):
    assert adaptive_calibration_error(confidence, correct, bins) == pytest.approx(error)


@pytest.mark.parametrize("case", ["random", "float32"])
def test_adaptive_error_agrees_with_scikit_learns_quantile_bins(case):
    # Scikit-learn cuts between samples: the same bins where no confidence is tied and 15 divides the samples.
    confidence, correct = CONFIDENCES[case]
    accuracy, stated = calibration_curve(correct, confidence, n_bins=15, strategy="quantile")
    assert len(accuracy) == 15
    oracle = np.abs(accuracy - stated).mean()
    assert adaptive_calibration_error(confidence, correct) == pytest.approx(oracle, abs=1e-6)


@pytest.mark.parametrize("case", CONFIDENCES)
def test_adaptive_error_is_that_of_every_sample_repeated_once_a_bin(case):
    confidence, correct = (np.asarray(values, dtype=np.float64) for values in CONFIDENCES[case])
    shared = np.array([correct[confidence == value].mean() for value in confidence])
    order = np.argsort(confidence)
    parts = np.split(np.repeat((shared - confidence)[order], 15), 15)
    oracle = np.mean([abs(part.mean()) for part in parts])
    assert adaptive_calibration_error(confidence, correct) == pytest.approx(oracle, abs=1e-9)


def test_class_wise_error_by_hand():
    # Two bins. Column 0: {0.3 no} and {0.9 yes, 0.8 yes, 0.6 no}; column 1: {0.1 no, 0.2 no, 0.4 yes}, {0.7 yes}.
    first = (0.3 * 1 + abs(2 - 2.3)) / 4
    second = (abs(1 - 0.7) + 0.3) / 4
    assert class_wise_calibration_error(PROBS, [0, 0, 1, 1], bins=2) == pytest.approx((first + second) / 2)


def test_a_class_without_cluster_adds_a_column_of_zeros():
    table = np.array([[1.0], [1.0], [1.0], [1.0]])
    # Half of the samples are of a class without cluster: |1/2 - 1| and |1/2 - 0|, over two columns.
    assert class_wise_calibration_error(table, [0, 0, 1, 1]) == pytest.approx(0.5)
    assert brier_score(table, [0, 0, 1, 1]) == pytest.approx((0 + 0 + 2 + 2) / 4)
    assert negative_log_likelihood(table, [0, 0, 1, 1]) == pytest.approx(math.log(2**23) / 2)


def test_a_cluster_without_class_ought_to_have_probability_zero():
    table = np.array([[0.8, 0.2], [0.6, 0.4]])
    assert class_wise_calibration_error(table, [0, 0], bins=1) == pytest.approx((0.3 + 0.3) / 2)
    assert brier_score(table, [0, 0]) == pytest.approx((0.04 + 0.04 + 0.16 + 0.16) / 2)


def test_brier_of_nearly_perfect_predictions_is_never_negative():
    rng = np.random.default_rng(0)
    for _ in range(100):
        doubt = 1e-9 * rng.random(7)
        assert 0 <= brier_score(np.stack([1 - doubt, doubt], axis=1), np.zeros(7, dtype=int)) < 1e-15


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_impossible_class_costs_the_same_in_every_precision(dtype):
    table = np.array([[1.0, 0.0]], dtype=dtype)
    assert negative_log_likelihood(table, [1]) == pytest.approx(23 * math.log(2))
    assert brier_score(table, [1]) == 2.0
    assert str(negative_log_likelihood(table, [0])) == "0.0"  # not -0.0


@pytest.mark.parametrize("case", TABLES)
def test_figures_of_whole_tables_agree_with_other_libraries(case):
    probs, labels = TABLES[case]
    columns = true_columns(probs, labels)
    table = squared_up(probs, columns)
    each = range(table.shape[1])
    errors = [torchmetrics_error(table[:, c], columns == c) for c in each]
    assert class_wise_calibration_error(probs, columns) == pytest.approx(np.mean(errors), abs=1e-6)
    squares = sum(brier_score_loss(columns == c, table[:, c], pos_label=True) for c in each)
    assert brier_score(probs, columns) == pytest.approx(squares, abs=1e-6)
    # A spare column, as scikit-learn refuses a single class. In float32 it clips where we always do.
    table = np.hstack([table, np.zeros((len(probs), 1))]).astype(np.float32)
    ours = negative_log_likelihood(probs, columns)
    assert ours == pytest.approx(log_loss(columns, table, labels=range(table.shape[1])), abs=1e-5)
    logarithms = torch.tensor(table, dtype=torch.float64).clamp(min=2.0**-23).log()
    assert ours == pytest.approx(float(F.nll_loss(logarithms, torch.tensor(columns))), abs=1e-6)


@pytest.mark.parametrize("case", CONFIDENCES)
def test_reliability_table_agrees_with_scikit_learns_uniform_bins(case):
    confidence, correct = CONFIDENCES[case]
    table = reliability_table(confidence, correct)
    accuracy, stated = calibration_curve(correct, confidence, n_bins=15, strategy="uniform")
    assert [value for value in table["accuracy"] if value is not None] == pytest.approx(accuracy)
    assert [value for value in table["confidence"] if value is not None] == pytest.approx(stated)
    gaps = [n * abs(a - c) for n, a, c in zip(table["count"], table["accuracy"], table["confidence"], strict=True) if n]
    assert sum(gaps) / len(correct) == pytest.approx(expected_calibration_error(confidence, correct))
    assert sum(table["count"]) == len(correct)


def test_reliability_table_and_histogram_by_hand():
    table = reliability_table([0.2, 0.4, 1.0], [0, 1, 1], bins=3)
    assert table == {"count": [1, 1, 1], "confidence": [0.2, 0.4, 1.0], "accuracy": [0.0, 1.0, 1.0]}
    table = reliability_table([1.0, 0.9], bins=2)
    assert table == {"count": [0, 2], "confidence": [None, 0.95], "accuracy": [None, None]}
    found = confidence_histogram([0.0, 0.5, 0.51, 1.0, 1.0], [0, 1, 1, 0, 1], bins=2)
    assert found == {"right": [1, 2], "wrong": [1, 1], "all": [2, 3]}
    assert confidence_histogram([0.5, 1.0], bins=2) == {"right": None, "wrong": None, "all": [1, 1]}


def test_histogram_agrees_with_numpy_off_the_edges():
    confidence, correct = CONFIDENCES["random"]
    found = confidence_histogram(confidence, correct)
    for name, part in (("right", correct), ("wrong", ~correct), ("all", correct | True)):
        assert found[name] == np.histogram(confidence[part], bins=30, range=(0, 1))[0].tolist()


def test_layout_in_memory_does_not_matter():
    probs, labels = TABLES["float32"]
    turned = np.asfortranarray(probs)
    assert class_wise_calibration_error(turned, labels) == class_wise_calibration_error(probs, labels)
    assert brier_score(turned, labels) == pytest.approx(brier_score(probs, labels))


@pytest.mark.parametrize(
    ("measure", "confidence", "correct", "expected"),
    [
        # Right ones: 0.9, 0.6; wrong ones: 0.6, 0.2. Pairs: 1, 1, 1/2, 1.
        (failure_auroc, [0.9, 0.6, 0.6, 0.2], [1, 1, 0, 0], 3.5 / 4),
        # 19 of 20 right ones are 95 %: the threshold is 0.5, at which one of the three wrong ones lies.
        (failure_fpr95, [*np.linspace(0.5, 0.95, 19), 0.1, 0.5, 0.4, 0.3], [1] * 20 + [0] * 3, 1 / 3),
        # 95 % of few right predictions is all of them.
        (failure_fpr95, [0.9, 0.8, 0.3, 0.5, 0.2], [1, 1, 1, 0, 0], 0.5),
        # Predictions at the threshold are accepted together.
        (failure_fpr95, [1.0] * 4, [1, 1, 0, 0], 1.0),
        (failure_auroc, [1.0] * 4, [1, 1, 0, 0], 0.5),
        # Errors among the first k: 0, 1, 1, 2.
        (area_under_risk_coverage, [0.9, 0.8, 0.7, 0.6], [1, 0, 1, 0], (0 + 1 / 2 + 1 / 3 + 2 / 4) / 4),
        # When all are tied, whatever share is accepted errs as often as the whole.
        (area_under_risk_coverage, [1.0] * 8, [1, 0, 1, 1, 0, 1, 1, 1], 0.25),
    ],
)
def test_rejection_by_hand(measure, confidence, correct, expected):
    assert measure(confidence, correct) == pytest.approx(expected)


def test_area_under_risk_coverage_is_the_mean_over_the_orders_of_ties():
    confidence = [1.0, 1.0, 1.0, 0.7, 0.7, 0.2]
    correct = [True, False, True, False, True, False]
    orders = [(*first, *second, 5) for first in permutations(range(3)) for second in permutations((3, 4))]
    expected = np.mean([mean_risk([correct[i] for i in order]) for order in orders])
    assert area_under_risk_coverage(confidence, correct) == pytest.approx(expected)


@pytest.mark.parametrize("case", CONFIDENCES)
def test_area_under_risk_coverage_lies_between_the_best_and_the_worst_order_of_ties(case):
    confidence, correct = CONFIDENCES[case]  # without ties, best and worst are the same order
    best = correct[np.lexsort((~correct, -confidence))]
    worst = correct[np.lexsort((correct, -confidence))]
    area = area_under_risk_coverage(confidence, correct)
    assert mean_risk(best) - 1e-12 <= area <= mean_risk(worst) + 1e-12


@pytest.mark.parametrize("case", MIXED)
def test_rejection_agrees_with_scikit_learn_and_torchmetrics(case):
    confidence, correct = CONFIDENCES[case]
    auroc = failure_auroc(confidence, correct)
    assert auroc == pytest.approx(roc_auc_score(correct, confidence), abs=1e-12)
    assert auroc == pytest.approx(float(binary_auroc(torch.tensor(confidence), torch.tensor(correct).long())), abs=1e-6)
    false_rate, true_rate, cuts = roc_curve(correct, confidence, drop_intermediate=False)
    oracle = false_rate[np.flatnonzero(true_rate >= 0.95 - 1e-12)[0]]
    assert failure_fpr95(confidence, correct) == pytest.approx(oracle, abs=1e-12)
    curve = risk_coverage_curve(confidence, correct, points=10_000)
    wrong, right = false_rate[1:] * (~correct).sum(), true_rate[1:] * correct.sum()
    assert curve.threshold == pytest.approx(cuts[1:])
    assert curve.coverage == pytest.approx((wrong + right) / len(correct))
    assert curve.risk == pytest.approx(wrong / (wrong + right))


@pytest.mark.parametrize("case", sorted(set(CONFIDENCES) - set(MIXED)))
def test_nothing_to_tell_apart_has_no_auroc_and_no_fpr95(case):
    confidence, correct = CONFIDENCES[case]
    assert failure_auroc(confidence, correct) is None
    assert failure_fpr95(confidence, correct) is None
    assert area_under_risk_coverage(confidence, correct) == (0.0 if correct.all() else 1.0)


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    confidence, correct = graded(8, 5000)
    whole = risk_coverage_curve(confidence, correct, points=5000)
    thin = risk_coverage_curve(confidence, correct)
    assert len(whole.risk) == 5000
    assert 190 <= len(thin.risk) <= 200
    assert [thin.threshold[0], thin.threshold[-1]] == [confidence.max(), confidence.min()]
    assert thin.coverage[-1] == 1.0
    assert thin.risk[-1] == pytest.approx(1 - correct.mean())
    assert 0 < np.diff(thin.coverage).min() < np.diff(thin.coverage).max() < 0.01
    assert set(zip(thin.coverage, thin.risk, strict=True)) <= set(zip(whole.coverage, whole.risk, strict=True))


@pytest.mark.parametrize("case", CONFIDENCES)
def test_neither_the_order_of_samples_nor_for_ranks_the_scale_matters(case):
    confidence, correct = CONFIDENCES[case]
    order = np.random.default_rng(0).permutation(len(correct))
    for error in (expected_calibration_error, adaptive_calibration_error):
        assert error(confidence[order], correct[order]) == pytest.approx(error(confidence, correct), abs=1e-12)
    for measure in RANKED:
        assert measure(confidence[order], correct[order]) == measure(confidence, correct)
        assert measure(confidence**3, correct) == measure(confidence, correct)
    curves = risk_coverage_curve(confidence, correct), risk_coverage_curve(confidence[order], correct[order])
    assert all((ours == again).all() for ours, again in zip(*curves, strict=True))


@pytest.mark.parametrize("measure", [*BINNED, *RANKED, risk_coverage_curve])
def test_bad_confidences_are_refused_in_one_line(measure):
    for confidence, correct, words in [
        ([0.2, 3.0], [1, 0], "softmax"),
        ([0.2, float("nan")], [1, 0], "found nan"),
        ([float("inf")], [1], "found inf"),
        ([0.2, 0.3], [1], "same samples"),
        ([], [], "at least one"),
        ([[0.2]], [[1]], "at least one"),
        (["a"], [1], "are numbers"),
        ([0.2, 0.3], [0.5, 1], "1 or 0"),
        ([0.2], [float("nan")], "1 or 0"),
    ]:
        with pytest.raises(UserError, match=words) as caught:
            measure(confidence, correct)
        assert "\n" not in str(caught.value)


def test_too_few_bins_and_points_are_refused():
    for measure in BINNED:
        with pytest.raises(UserError, match="bins=0"):
            measure([0.2], [1], bins=0)
    with pytest.raises(UserError, match="bins=0"):
        class_wise_calibration_error(PROBS, [0, 0, 1, 1], bins=0)
    with pytest.raises(UserError, match="points=1"):
        risk_coverage_curve([0.2], [1], points=1)
    with pytest.raises(UserError, match="softmax"):
        mean_confidence([3.0])


@pytest.mark.parametrize("measure", [class_wise_calibration_error, brier_score, negative_log_likelihood])
def test_bad_tables_are_refused_in_one_line(measure):
    for probs, columns, words in [
        (np.ones(4), [0] * 4, "samples, clusters"),
        (np.ones((0, 3)), [], "samples, clusters"),
        ([[0.5, float("nan")]], [0], "found nan"),
        ([[7.0, -2.0]], [0], "softmax"),
        ([[float("inf"), 0.0]], [0], "softmax"),
        ([[0.9, 0.9]], [0], "sums of 1.8"),
        ([["a", "b"]], [0], "are numbers"),
        ([[0.5, 0.5]], [0, 1], "1 whole numbers"),
        ([[0.5, 0.5]], [0.0], "whole numbers"),
        ([[0.5, 0.5]], [-1], "whole numbers"),
    ]:
        with pytest.raises(UserError, match=words) as caught:
            measure(probs, columns)
        assert "\n" not in str(caught.value)
