"""All figures of a set of predictions in one dictionary; shares and errors are fractions of 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cdc_plugin.metrics.calibration import (
    adaptive_calibration_error,
    brier_score,
    class_wise_calibration_error,
    confidence_histogram,
    expected_calibration_error,
    mean_confidence,
    negative_log_likelihood,
    reliability_table,
)
from cdc_plugin.metrics.clustering import (
    accuracy,
    adjusted_rand_index,
    normalized_mutual_information,
    true_columns,
)
from cdc_plugin.metrics.ood import outlier_aupr, outlier_auroc, outlier_fpr95
from cdc_plugin.metrics.rejection import area_under_risk_coverage, failure_auroc, failure_fpr95
from cdc_plugin.metrics.validation import probability_table


def summary(probs: ArrayLike, labels: ArrayLike) -> dict[str, Any]:
    """Every figure of calibrated predictions, ready for JSON; AUROC and FPR95 are None where undefined.

    The cluster of a sample is its likeliest one (of equally likely ones the first), and clusters stand for
    classes as in `true_columns`.

    Args:
        probs: (N, C) cluster probabilities.
        labels: (N,) class of every sample, used for these numbers only.
    """
    table = probability_table(probs)
    predicted = table.argmax(axis=1)
    confidence = table.max(axis=1)
    columns = true_columns(table, labels)
    correct = predicted == columns
    return {
        "ACC": float(correct.mean()),
        "NMI": normalized_mutual_information(predicted, labels),
        "ARI": adjusted_rand_index(predicted, labels),
        "ECE": expected_calibration_error(confidence, correct),
        "AECE": adaptive_calibration_error(confidence, correct),
        "CECE": class_wise_calibration_error(table, columns),
        "BRIER": brier_score(table, columns),
        "NLL": negative_log_likelihood(table, columns),
        "AUROC": failure_auroc(confidence, correct),
        "AURC": area_under_risk_coverage(confidence, correct),
        "FPR95": failure_fpr95(confidence, correct),
        "CONF": mean_confidence(confidence),
        "cluster_sizes": np.bincount(predicted, minlength=table.shape[1]).tolist(),
        "bins": reliability_table(confidence, correct),
        "histogram": confidence_histogram(confidence, correct),
    }


def summary_unlabelled(probs: ArrayLike) -> dict[str, Any]:
    """Return the figures of `summary` that need no labels, under the same names.

    Args:
        probs: (N, C) cluster probabilities.
    """
    table = probability_table(probs)
    confidence = table.max(axis=1)
    return {
        "CONF": mean_confidence(confidence),
        "cluster_sizes": np.bincount(table.argmax(axis=1), minlength=table.shape[1]).tolist(),
        "bins": reliability_table(confidence),
        "histogram": confidence_histogram(confidence),
    }


def summary_hard(predicted: ArrayLike, labels: ArrayLike, clusters: int) -> dict[str, float]:
    """ACC, NMI and ARI of assignments without probabilities, such as those of k-means.

    Args:
        predicted: (N,) cluster of every sample, from 0 to ``clusters`` - 1.
        labels: (N,) class of every sample.
    """
    return {
        "ACC": accuracy(predicted, labels, clusters),
        "NMI": normalized_mutual_information(predicted, labels),
        "ARI": adjusted_rand_index(predicted, labels),
    }


def summary_outliers(inside: ArrayLike, outside: ArrayLike) -> dict[str, float | None]:
    """AUROC, FPR95 and AUPR of telling inside from outside images by a score, higher = more inside.

    Args:
        inside: (N,) scores of images like those that the model was made with.
        outside: (M,) scores of foreign images.
    """
    return {
        "AUROC": outlier_auroc(inside, outside),
        "FPR95": outlier_fpr95(inside, outside),
        "AUPR": outlier_aupr(inside, outside),
    }
