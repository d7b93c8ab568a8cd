import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score, roc_auc_score

from cdc_plugin.errors import UserError
from cdc_plugin.metrics import (
    accuracy,
    adaptive_calibration_error,
    area_under_risk_coverage,
    brier_score,
    class_wise_calibration_error,
    expected_calibration_error,
    negative_log_likelihood,
    summary,
    summary_unlabelled,
    true_columns,
)
from tests.helpers.metric_cases import TABLES, softmax_table

ALWAYS = {"CONF", "cluster_sizes", "bins", "histogram"}
LABELLED = {"ACC", "NMI", "ARI", "ECE", "AECE", "CECE", "BRIER", "NLL", "AUROC", "AURC", "FPR95"}


def plain(figures):
    """The figures as one list of numbers, for comparing dictionaries within rounding."""
    found = [figures[name] for name in sorted(LABELLED & set(figures))]
    for part in ("bins", "histogram"):
        found += [value for name in sorted(figures[part]) for value in figures[part][name] or []]
    return [-1.0 if value is None else float(value) for value in found]


def test_summary_by_hand():
    scores = summary(np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]), [1, 1, 0, 0])
    assert set(scores) == ALWAYS | LABELLED
    assert scores["ACC"] == pytest.approx(0.75)
    assert scores["CONF"] == pytest.approx(0.75)
    assert scores["ECE"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.6) / 4)  # every sample in a bin of its own
    # 15 bins of 4/15 of a sample: one holds 3/4 of the wrong sample's gap of -0.6 and 1/4 of the next one's 0.3.
    assert scores["AECE"] == pytest.approx((1.2 - 2 * 0.3 / 4 * 4 / 15) / 4)
    assert scores["BRIER"] == pytest.approx(2 * (0.1**2 + 0.2**2 + 0.3**2 + 0.6**2) / 4)
    assert scores["AUROC"] == 1.0  # the wrong one is the least confident
    assert scores["FPR95"] == 0.0
    assert scores["AURC"] == pytest.approx(0.25 / 4)
    assert scores["cluster_sizes"] == [3, 1]
    assert sum(scores["bins"]["count"]) == 4
    assert sum(scores["histogram"]["wrong"]) == 1
    assert all(type(scores[name]) is float for name in LABELLED)


def test_without_labels_the_same_names_hold_what_can_be_known():
    probs, labels = TABLES["more clusters than classes"]
    found, labelled = summary_unlabelled(probs), summary(probs, labels)
    assert set(found) == ALWAYS
    assert found["CONF"] == labelled["CONF"]
    assert found["cluster_sizes"] == labelled["cluster_sizes"]
    assert found["bins"] == {**labelled["bins"], "accuracy": [None] * 15}
    assert found["histogram"] == {"right": None, "wrong": None, "all": labelled["histogram"]["all"]}


@pytest.mark.parametrize("case", TABLES)
def test_every_case_gives_whole_figures_without_a_warning(case, recwarn):
    probs, labels = TABLES[case]
    scores = summary(probs, labels)
    assert not recwarn.list
    assert json.loads(json.dumps(scores, allow_nan=False)) == scores
    correct = probs.argmax(axis=1) == true_columns(probs, labels)
    assert (scores["AUROC"] is None) == (scores["FPR95"] is None) == bool(correct.all())
    for name in LABELLED - {"NLL", "BRIER", "ARI"}:
        assert scores[name] is None or 0 <= scores[name] <= 1, name
    assert 0 <= scores["BRIER"] <= 2
    assert 0 <= scores["NLL"] < 16
    assert -1 <= scores["ARI"] <= 1
    assert len(scores["cluster_sizes"]) == probs.shape[1]
    for counts in (scores["cluster_sizes"], scores["bins"]["count"], scores["histogram"]["all"]):
        assert sum(counts) == len(labels)


@pytest.mark.parametrize("case", TABLES)
def test_the_summary_passes_the_right_numbers_to_each_figure(case):
    probs, labels = TABLES[case]
    scores = summary(probs, labels)
    predicted, confidence = probs.argmax(axis=1), probs.max(axis=1)
    columns = true_columns(probs, labels)
    correct = predicted == columns
    assert scores["ACC"] == pytest.approx(accuracy(predicted, labels, probs.shape[1]))
    assert scores["NMI"] == pytest.approx(normalized_mutual_info_score(labels, predicted), abs=1e-9)
    assert scores["ARI"] == pytest.approx(adjusted_rand_score(labels, predicted), abs=1e-9)
    assert scores["ECE"] == expected_calibration_error(confidence, correct)
    assert scores["AECE"] == adaptive_calibration_error(confidence, correct)
    assert scores["CECE"] == class_wise_calibration_error(probs, columns)
    assert scores["BRIER"] == brier_score(probs, columns)
    assert scores["NLL"] == negative_log_likelihood(probs, columns)
    assert scores["AURC"] == area_under_risk_coverage(confidence, correct)
    if not correct.all():
        assert scores["AUROC"] == pytest.approx(roc_auc_score(correct, confidence))


@pytest.mark.parametrize("case", TABLES)
def test_neither_order_of_samples_nor_numbers_of_clusters_nor_names_of_classes_matter(case):
    probs, labels = TABLES[case]
    rng = np.random.default_rng(0)
    before = plain(summary(probs, labels))
    order = rng.permutation(len(labels))
    assert plain(summary(probs[order], labels[order])) == pytest.approx(before, abs=1e-6)
    if "nothing known" not in case:  # of equally likely clusters the first is taken
        assert plain(summary(probs[:, rng.permutation(probs.shape[1])], labels)) == pytest.approx(before, abs=1e-6)
    assert plain(summary(probs, 5 - 3 * labels)) == pytest.approx(before, abs=1e-6)


def test_several_best_matchings_do_not_make_figures_depend_on_cluster_numbers():
    # Both matchings make two of four right; probability decides, not the number of a cluster.
    probs, labels = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.3, 0.7]]), np.array([0, 1, 0, 1])
    assert plain(summary(probs, labels)) == pytest.approx(plain(summary(probs[:, ::-1], labels)))
    # Cluster 0 gives 0.9 + 0.2 to class 0 and 0.6 + 0.3 to class 1.
    assert true_columns(probs, labels).tolist() == [0, 1, 0, 1]


def test_precisions_and_libraries_agree():
    probs, labels = softmax_table(9, 500, 10, 10)
    exact = summary(probs, labels)
    for dtype, within in ((np.float32, 1e-5), (np.float16, 5e-3)):
        found = summary(probs.astype(dtype), labels)
        assert found["CONF"] == pytest.approx(exact["CONF"], abs=1e-3)
        for name in LABELLED | {"CONF"}:
            assert found[name] == pytest.approx(exact[name], abs=within), (name, dtype)
    assert summary(torch.from_numpy(probs), torch.from_numpy(labels)) == exact


def test_scipy_is_imported_only_for_labels():
    code = "import sys, cdc_plugin.metrics as m; m.summary_unlabelled([[0.5, 0.5]]); sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bad_input_is_refused_in_one_line():
    good = np.full((2, 2), 0.5)
    for probs, labels, words in [
        (good / 2, [0, 1], "sums of 0.5"),
        (good, [0, 1, 1], "one length"),
        (good, [0.5, 1.0], "whole numbers"),
        (good, ["a", "b"], "whole numbers"),
        (good, [[0], [1]], "one length"),
    ]:
        with pytest.raises(UserError, match=words) as caught:
            summary(probs, labels)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="samples, clusters"):
        summary_unlabelled(np.ones(4))
