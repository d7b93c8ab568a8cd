"""All figures of a set of predictions in one dictionary; shares and errors are fractions of 1."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cdc_plugin.metrics import clustering, confidence, ood


def summary(probs: ArrayLike, labels: ArrayLike) -> dict[str, Any]:
    """Return every figure of (N, C) probabilities, ready for JSON; AUROC and FPR95 are None where undefined.

    The cluster of a sample is its likeliest one (of equally likely ones the first), and clusters stand for classes as
    in `true_columns`. The class of every sample, ``labels`` (N,), is used for these numbers only.
    """
    table = confidence.check_probabilities(probs)
    predicted, stated = table.argmax(axis=1), table.max(axis=1)
    columns = clustering.true_columns(table, labels)
    correct = predicted == columns
    return {
        "ACC": float(correct.mean()),
        "NMI": clustering.normalized_mutual_information(predicted, labels),
        "ARI": clustering.adjusted_rand_index(predicted, labels),
        "ECE": confidence.expected_calibration_error(stated, correct),
        "AECE": confidence.adaptive_calibration_error(stated, correct),
        "CECE": confidence.class_wise_calibration_error(table, columns),
        "BRIER": confidence.brier_score(table, columns),
        "NLL": confidence.negative_log_likelihood(table, columns),
        "AUROC": confidence.failure_auroc(stated, correct),
        "AURC": confidence.area_under_risk_coverage(stated, correct),
        "FPR95": confidence.failure_fpr95(stated, correct),
    } | _describe_confidence(table, correct)


def summary_unlabelled(probs: ArrayLike) -> dict[str, Any]:
    """Return the figures of `summary` that need no labels, from (N, C) probabilities, under the same names."""
    return _describe_confidence(confidence.check_probabilities(probs), None)


def _describe_confidence(table: confidence.Table, correct: confidence.Booleans | None) -> dict[str, Any]:
    stated = table.max(axis=1)
    return {
        "CONF": confidence.mean_confidence(stated),
        "cluster_sizes": np.bincount(table.argmax(axis=1), minlength=table.shape[1]).tolist(),
        "bins": confidence.reliability_table(stated, correct),
        "histogram": confidence.confidence_histogram(stated, correct),
    }


def summary_hard(predicted: ArrayLike, labels: ArrayLike, clusters: int) -> dict[str, float]:
    """Return ACC, NMI and ARI of assignments (N,) without probabilities, such as those of k-means."""
    return {
        "ACC": clustering.accuracy(predicted, labels, clusters),
        "NMI": clustering.normalized_mutual_information(predicted, labels),
        "ARI": clustering.adjusted_rand_index(predicted, labels),
    }


def summary_outliers(inside: ArrayLike, outside: ArrayLike) -> dict[str, float | None]:
    """Return AUROC, FPR95 and AUPR of telling inside (N,) from outside images (M,) by scores, higher = more inside."""
    return {
        "AUROC": ood.outlier_auroc(inside, outside),
        "FPR95": ood.outlier_fpr95(inside, outside),
        "AUPR": ood.outlier_aupr(inside, outside),
    }
