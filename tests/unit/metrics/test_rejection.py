from itertools import permutations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve
from torchmetrics.functional.classification import binary_auroc

from cdc_plugin.errors import UserError
from cdc_plugin.metrics import (
    area_under_risk_coverage,
    failure_auroc,
    failure_fpr95,
    risk_coverage_curve,
)
from tests.helpers.metric_cases import CONFIDENCES, graded

MIXED = [name for name, (_, correct) in CONFIDENCES.items() if 0 < correct.sum() < len(correct)]
UNIFORM = sorted(set(CONFIDENCES) - set(MIXED))


def mean_risk(correct):
    """AURC of predictions in a given order, straight from its definition."""
    wrong = [not right for right in correct]
    return sum(sum(wrong[:k]) / k for k in range(1, len(wrong) + 1)) / len(wrong)


def test_auroc_by_hand():
    # Right ones: 0.9, 0.6; wrong ones: 0.6, 0.2. Pairs: 1, 1, 1/2, 1.
    assert failure_auroc([0.9, 0.6, 0.6, 0.2], [1, 1, 0, 0]) == pytest.approx(3.5 / 4)


def test_fpr95_by_hand():
    # 19 of 20 right ones are 95 %: the threshold is 0.5, at which one of the three wrong ones lies.
    confidence = [*np.linspace(0.5, 0.95, 19), 0.1, 0.5, 0.4, 0.3]
    assert failure_fpr95(confidence, [1] * 20 + [0] * 3) == pytest.approx(1 / 3)


def test_ninety_five_percent_of_few_right_predictions_is_all_of_them():
    assert failure_fpr95([0.9, 0.8, 0.3, 0.5, 0.2], [1, 1, 1, 0, 0]) == pytest.approx(0.5)


def test_predictions_at_the_threshold_are_accepted_together():
    assert failure_fpr95([1.0] * 4, [1, 1, 0, 0]) == 1.0
    assert failure_auroc([1.0] * 4, [1, 1, 0, 0]) == 0.5


def test_area_under_risk_coverage_by_hand():
    # Errors among the first k: 0, 1, 1, 2.
    area = area_under_risk_coverage([0.9, 0.8, 0.7, 0.6], [1, 0, 1, 0])
    assert area == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4)


def test_area_under_risk_coverage_is_the_mean_over_the_orders_of_ties():
    confidence = [1.0, 1.0, 1.0, 0.7, 0.7, 0.2]
    correct = [True, False, True, False, True, False]
    orders = [(*first, *second, 5) for first in permutations(range(3)) for second in permutations((3, 4))]
    expected = np.mean([mean_risk([correct[i] for i in order]) for order in orders])
    assert area_under_risk_coverage(confidence, correct) == pytest.approx(expected)


def test_limits_of_the_area_under_risk_coverage():
    confidence = [0.9, 0.9, 0.5]
    assert area_under_risk_coverage(confidence, [1, 1, 1]) == 0.0
    assert area_under_risk_coverage(confidence, [0, 0, 0]) == 1.0
    # When all are tied, whatever share is accepted errs as often as the whole.
    assert area_under_risk_coverage([1.0] * 8, [1, 0, 1, 1, 0, 1, 1, 1]) == pytest.approx(0.25)


def test_area_under_risk_coverage_without_ties_is_the_plain_mean():
    confidence, correct = graded(7, 400)
    ranked = correct[np.argsort(-confidence)]
    assert area_under_risk_coverage(confidence, correct) == pytest.approx(mean_risk(ranked))


@pytest.mark.parametrize("case", CONFIDENCES)
def test_area_under_risk_coverage_lies_between_the_best_and_the_worst_order_of_ties(case):
    confidence, correct = CONFIDENCES[case]
    best = correct[np.lexsort((~correct, -confidence))]
    worst = correct[np.lexsort((correct, -confidence))]
    area = area_under_risk_coverage(confidence, correct)
    assert mean_risk(best) - 1e-12 <= area <= mean_risk(worst) + 1e-12


@pytest.mark.parametrize("case", MIXED)
def test_auroc_agrees_with_scikit_learn_and_torchmetrics(case):
    confidence, correct = CONFIDENCES[case]
    ours = failure_auroc(confidence, correct)
    assert ours == pytest.approx(roc_auc_score(correct, confidence), abs=1e-12)
    theirs = binary_auroc(torch.tensor(confidence), torch.tensor(correct).long())
    assert ours == pytest.approx(float(theirs), abs=1e-6)


@pytest.mark.parametrize("case", MIXED)
def test_fpr95_agrees_with_scikit_learns_curve(case):
    confidence, correct = CONFIDENCES[case]
    false_rate, true_rate, _ = roc_curve(correct, confidence, drop_intermediate=False)
    oracle = false_rate[np.flatnonzero(true_rate >= 0.95 - 1e-12)[0]]
    assert failure_fpr95(confidence, correct) == pytest.approx(oracle, abs=1e-12)


@pytest.mark.parametrize("case", UNIFORM)
def test_nothing_to_tell_apart_has_no_auroc_and_no_fpr95(case):
    confidence, correct = CONFIDENCES[case]
    assert failure_auroc(confidence, correct) is None
    assert failure_fpr95(confidence, correct) is None
    assert area_under_risk_coverage(confidence, correct) == (0.0 if correct.all() else 1.0)


def test_the_curve_by_hand():
    curve = risk_coverage_curve([0.9, 0.9, 0.5, 0.2], [1, 0, 1, 0])
    assert curve.threshold.tolist() == [0.9, 0.5, 0.2]
    assert curve.coverage.tolist() == [0.5, 0.75, 1.0]
    assert curve.risk == pytest.approx([1 / 2, 1 / 3, 2 / 4])


@pytest.mark.parametrize("case", MIXED)
def test_the_curve_agrees_with_scikit_learns_counts(case):
    confidence, correct = CONFIDENCES[case]
    curve = risk_coverage_curve(confidence, correct, points=10_000)
    false_rate, true_rate, cuts = roc_curve(correct, confidence, drop_intermediate=False)
    wrong, right = false_rate[1:] * (~correct).sum(), true_rate[1:] * correct.sum()
    assert curve.threshold == pytest.approx(cuts[1:])
    assert curve.coverage == pytest.approx((wrong + right) / len(correct))
    assert curve.risk == pytest.approx(wrong / (wrong + right))


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    confidence, correct = graded(8, 5000)
    whole = risk_coverage_curve(confidence, correct, points=5000)
    thin = risk_coverage_curve(confidence, correct)
    assert len(whole.risk) == 5000
    assert 190 <= len(thin.risk) <= 200
    assert [thin.threshold[0], thin.threshold[-1]] == [confidence.max(), confidence.min()]
    assert thin.coverage[-1] == 1.0
    assert thin.risk[-1] == pytest.approx(1 - correct.mean())
    assert (np.diff(thin.coverage) > 0).all()
    assert np.diff(thin.coverage).max() < 0.01
    assert set(zip(thin.coverage, thin.risk, strict=True)) <= set(zip(whole.coverage, whole.risk, strict=True))


@pytest.mark.parametrize("case", CONFIDENCES)
def test_order_of_samples_does_not_matter(case):
    confidence, correct = CONFIDENCES[case]
    order = np.random.default_rng(0).permutation(len(correct))
    for measure in (failure_auroc, failure_fpr95, area_under_risk_coverage):
        assert measure(confidence[order], correct[order]) == measure(confidence, correct)
    for ours, again in zip(
        risk_coverage_curve(confidence, correct),
        risk_coverage_curve(confidence[order], correct[order]),
        strict=True,
    ):
        assert (ours == again).all()


def test_only_the_ranking_counts_not_the_scale():
    confidence, correct = CONFIDENCES["many ties"]
    for measure in (failure_auroc, failure_fpr95, area_under_risk_coverage):
        assert measure(confidence**3, correct) == measure(confidence, correct)


@pytest.mark.parametrize("measure", [failure_auroc, failure_fpr95, area_under_risk_coverage, risk_coverage_curve])
def test_bad_input_is_refused_in_one_line(measure):
    for confidence, correct, words in [
        ([0.2, 3.0], [1, 0], "softmax"),
        ([0.2, float("nan")], [1, 0], "found nan"),
        ([0.2, 0.3], [1], "same samples"),
        ([], [], "at least one"),
        ([0.2, 0.3], [2, 1], "1 or 0"),
    ]:
        with pytest.raises(UserError, match=words) as caught:
            measure(confidence, correct)
        assert "\n" not in str(caught.value)


def test_a_curve_of_one_point_is_refused():
    with pytest.raises(UserError, match="points=1"):
        risk_coverage_curve([0.2], [1], points=1)
