import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss
from torchmetrics.functional.classification import binary_calibration_error

from cdc_plugin.errors import UserError
from cdc_plugin.metrics import (
    adaptive_calibration_error,
    brier_score,
    class_wise_calibration_error,
    confidence_histogram,
    expected_calibration_error,
    mean_confidence,
    negative_log_likelihood,
    reliability_table,
    true_columns,
)
from tests.helpers.metric_cases import CONFIDENCES, TABLES

PROBS = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])


def torchmetrics_error(confidence, correct, bins=15):
    return float(
        binary_calibration_error(torch.tensor(confidence), torch.tensor(correct).long(), n_bins=bins, norm="l1")
    )


def squared_up(probs, columns):
    """The table with a column of zeros for every class that has no cluster, for libraries that know no such class."""
    table = np.asarray(probs)
    missing = max(0, columns.max() + 1 - table.shape[1])
    return np.hstack([table, np.zeros((len(table), missing), table.dtype)])


def test_calibration_error_by_hand():
    # Bins of width 0.5: {0.2 wrong, 0.4 right} and {0.8 right, 1.0 wrong}.
    error = expected_calibration_error([0.2, 0.4, 0.8, 1.0], [0, 1, 1, 0], bins=2)
    assert error == pytest.approx((abs(0.5 - 0.3) * 2 + abs(0.5 - 0.9) * 2) / 4)


def test_upper_edge_belongs_to_the_lower_bin():
    # 0.5 shares a bin with 0.25: accuracy 1/2 against confidence 0.375; alone they miss by 0.75 and 0.5.
    assert expected_calibration_error([0.25, 0.5], [1, 0], bins=2) == pytest.approx(0.125)


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


def test_adaptive_error_by_hand():
    # Two bins of two samples: {0.2 wrong, 0.6 right} and {0.7 right, 0.9 right}.
    error = adaptive_calibration_error([0.9, 0.2, 0.7, 0.6], [1, 0, 1, 1], bins=2)
    assert error == pytest.approx((abs(0.5 - 0.4) + abs(1 - 0.8)) / 2)


def test_adaptive_error_counts_a_sample_on_the_cut_half_in_both_bins():
    # 1.5 samples a bin: {0.4 wrong, half of 0.6 right}, {half of 0.6 right, 0.8 right}.
    error = adaptive_calibration_error([0.4, 0.6, 0.8], [0, 1, 1], bins=2)
    assert error == pytest.approx((abs(-0.4 + 0.5 * 0.4) + (0.5 * 0.4 + 0.2)) / 3)


def test_adaptive_error_gives_tied_samples_the_accuracy_of_their_tie():
    # One confidence for all: every bin is 3/4 right, whoever comes first.
    assert adaptive_calibration_error([1.0] * 4, [1, 0, 1, 1], bins=2) == pytest.approx(0.25)


def test_adaptive_error_takes_fewer_samples_than_bins():
    assert adaptive_calibration_error([0.9, 0.6], [1, 0], bins=4) == pytest.approx((0.1 + 0.6) / 2)
    # Two thirds of a sample a bin: the middle one holds a third of either.
    expected = (0.6 * 2 / 3 + abs(0.1 - 0.6) / 3 + 0.1 * 2 / 3) / 2
    assert adaptive_calibration_error([0.9, 0.6], [1, 0], bins=3) == pytest.approx(expected)


def test_adaptive_error_agrees_with_scikit_learns_quantile_bins():
    # Scikit-learn cuts between samples: the same bins where no confidence is tied and 15 divides the samples.
    for case in ("random", "float32"):
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


def test_brier_and_likelihood_by_hand():
    columns = [0, 0, 1, 0]
    assert brier_score(PROBS, columns) == pytest.approx(2 * (0.1**2 + 0.2**2 + 0.3**2 + 0.4**2) / 4)
    expected = -(math.log(0.9) + math.log(0.8) + math.log(0.7) + math.log(0.6)) / 4
    assert negative_log_likelihood(PROBS, columns) == pytest.approx(expected)


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
def test_class_wise_error_agrees_with_torchmetrics_column_by_column(case):
    probs, labels = TABLES[case]
    columns = true_columns(probs, labels)
    table = squared_up(probs, columns)
    oracle = np.mean([torchmetrics_error(table[:, c], columns == c) for c in range(table.shape[1])])
    assert class_wise_calibration_error(probs, columns) == pytest.approx(oracle, abs=1e-6)


@pytest.mark.parametrize("case", TABLES)
def test_brier_agrees_with_scikit_learn_column_by_column(case):
    probs, labels = TABLES[case]
    columns = true_columns(probs, labels)
    table = squared_up(probs, columns)
    oracle = sum(brier_score_loss(columns == c, table[:, c], pos_label=True) for c in range(table.shape[1]))
    assert brier_score(probs, columns) == pytest.approx(oracle, abs=1e-6)


@pytest.mark.parametrize("case", TABLES)
def test_likelihood_agrees_with_scikit_learn_and_torch(case):
    probs, labels = TABLES[case]
    columns = true_columns(probs, labels)
    # A spare column, as scikit-learn refuses a single class. In float32 it clips where we always do.
    table = np.hstack([squared_up(probs, columns), np.zeros((len(probs), 1))]).astype(np.float32)
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


def test_reliability_table_by_hand():
    assert reliability_table([0.2, 0.4, 1.0], [0, 1, 1], bins=3) == {
        "count": [1, 1, 1],
        "confidence": [0.2, 0.4, 1.0],
        "accuracy": [0.0, 1.0, 1.0],
    }
    assert reliability_table([1.0, 0.9], bins=2) == {
        "count": [0, 2],
        "confidence": [None, 0.95],
        "accuracy": [None, None],
    }


def test_histogram_by_hand():
    found = confidence_histogram([0.0, 0.5, 0.51, 1.0, 1.0], [0, 1, 1, 0, 1], bins=2)
    assert found == {"right": [1, 2], "wrong": [1, 1], "all": [2, 3]}
    assert confidence_histogram([0.5, 1.0], bins=2) == {"right": None, "wrong": None, "all": [1, 1]}


def test_histogram_agrees_with_numpy_off_the_edges():
    confidence, correct = CONFIDENCES["random"]
    found = confidence_histogram(confidence, correct)
    assert {name: len(counts) for name, counts in found.items()} == {"right": 30, "wrong": 30, "all": 30}
    for name, part in (("right", correct), ("wrong", ~correct), ("all", correct | True)):
        assert found[name] == np.histogram(confidence[part], bins=30, range=(0, 1))[0].tolist()


def test_order_of_samples_does_not_matter():
    for confidence, correct in CONFIDENCES.values():
        order = np.random.default_rng(0).permutation(len(correct))
        for error in (expected_calibration_error, adaptive_calibration_error):
            assert error(confidence[order], correct[order]) == pytest.approx(error(confidence, correct), abs=1e-12)


def test_layout_in_memory_does_not_matter():
    probs, labels = TABLES["float32"]
    turned = np.asfortranarray(probs)
    assert class_wise_calibration_error(turned, labels) == class_wise_calibration_error(probs, labels)
    assert brier_score(turned, labels) == pytest.approx(brier_score(probs, labels))


@pytest.mark.parametrize("error", [expected_calibration_error, adaptive_calibration_error])
@pytest.mark.parametrize(("right", "expected"), [(1, 0.0), (0, 1.0)])
def test_full_confidence_is_as_wrong_as_the_predictions(error, right, expected):
    assert error(np.ones(7), np.full(7, right)) == pytest.approx(expected)


def test_one_sample_is_enough():
    assert expected_calibration_error([0.7], [1]) == pytest.approx(0.3)
    assert adaptive_calibration_error([0.7], [1]) == pytest.approx(0.3)
    assert mean_confidence([0.7]) == pytest.approx(0.7)


@pytest.mark.parametrize(
    "measure",
    [
        expected_calibration_error,
        adaptive_calibration_error,
        reliability_table,
        confidence_histogram,
    ],
)
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
    with pytest.raises(UserError, match="bins=0"):
        measure([0.2], [1], bins=0)


@pytest.mark.parametrize("measure", [class_wise_calibration_error, brier_score, negative_log_likelihood])
def test_bad_tables_are_refused_in_one_line(measure):
    nan = float("nan")
    for probs, columns, words in [
        (np.ones(4), [0] * 4, "samples, clusters"),
        (np.ones((0, 3)), [], "samples, clusters"),
        ([[0.5, nan]], [0], "found nan"),
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
