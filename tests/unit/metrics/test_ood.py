import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from cdc_plugin.errors import UserError
from cdc_plugin.metrics import outlier_aupr, outlier_auroc, outlier_fpr95, summary_outliers

RANDOM = np.random.default_rng(0)
CASES = {
    "random": (RANDOM.beta(5, 1, 700), RANDOM.beta(2, 2, 300)),
    "float32": (RANDOM.beta(5, 1, 50).astype(np.float32), RANDOM.beta(2, 2, 900).astype(np.float32)),
    "minus distances": (-RANDOM.gamma(2, 1, 400), -RANDOM.gamma(9, 3, 400)),
    "many ties": (np.round(RANDOM.beta(5, 1, 300), 1), np.round(RANDOM.beta(2, 2, 300), 1)),
    "ties at 1.0": (np.ones(30), np.ones(70)),
    "apart": (np.linspace(0.6, 1, 40), np.linspace(0, 0.5, 60)),
    "the wrong way round": (np.linspace(0, 0.5, 60), np.linspace(0.6, 1, 40)),
    "one of each": (np.array([0.7]), np.array([0.7])),
}


def test_higher_means_inside_and_a_constant_score_tells_nothing():
    assert summary_outliers([2.0, 3.0], [-5.0, 1.0]) == {"AUROC": 1.0, "FPR95": 0.0, "AUPR": 1.0}
    assert summary_outliers([1.0] * 3, [1.0] * 9) == {"AUROC": 0.5, "FPR95": 1.0, "AUPR": 0.25}


@pytest.mark.parametrize("case", CASES)
def test_figures_agree_with_scikit_learn(case):
    inside, outside = CASES[case]
    is_inside, scores = np.repeat([1, 0], [len(inside), len(outside)]), np.r_[inside, outside]
    ours = summary_outliers(*CASES[case])
    assert ours["AUROC"] == pytest.approx(roc_auc_score(is_inside, scores), abs=1e-12)
    assert ours["AUPR"] == pytest.approx(average_precision_score(is_inside, scores), abs=1e-12)
    false_rate, true_rate, _ = roc_curve(is_inside, scores, drop_intermediate=False)
    oracle = false_rate[np.flatnonzero(true_rate >= 0.95 - 1e-12)[0]]
    assert ours["FPR95"] == pytest.approx(oracle, abs=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_order_and_scale_do_not_matter(case):
    inside, outside = (np.asarray(scores, dtype=np.float64) for scores in CASES[case])
    rng = np.random.default_rng(1)
    before = summary_outliers(inside, outside)
    assert summary_outliers(rng.permutation(inside), rng.permutation(outside)) == before
    assert summary_outliers(8 * inside - 3, 8 * outside - 3) == pytest.approx(before)


@pytest.mark.parametrize("measure", [outlier_auroc, outlier_fpr95, outlier_aupr, summary_outliers])
def test_bad_input_is_refused_in_one_line(measure):
    for inside, outside, words in [
        ([], [0.5], "inside scores are a list"),
        ([0.5], [], "outside scores are a list"),
        ([[0.5]], [0.5], r"shape \(1, 1\)"),
        ([0.5, float("nan")], [0.5], "inside scores are finite; found 1"),
        ([0.5], [float("inf")], "outside scores are finite"),
        ([0.5], ["a"], "outside scores are numbers"),
    ]:
        with pytest.raises(UserError, match=words) as caught:
            measure(inside, outside)
        assert "\n" not in str(caught.value)
