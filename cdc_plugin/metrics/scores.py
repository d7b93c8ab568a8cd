"""The numbers of the paper's tables in one dictionary, as fractions from 0 to 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from cdc_plugin.errors import UserError
from cdc_plugin.metrics.clustering import (
    accuracy,
    adjusted_rand_index,
    correct_samples,
    normalized_mutual_information,
)
from cdc_plugin.metrics.confidence import expected_calibration_error, mean_confidence


def summary(probs: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """ACC, NMI, ARI, ECE and CONF of calibrated predictions.

    Args:
        probs: (N, C) cluster probabilities; the cluster of a sample is its likeliest one.
        labels: (N,) class of every sample, used for these numbers only.
    """
    table = np.asarray(probs)
    if table.ndim != 2 or 0 in table.shape:
        raise UserError(f"probabilities have shape (samples, clusters); found {table.shape}")
    predicted = table.argmax(axis=1)
    confidence = table[np.arange(len(table)), predicted]
    correct = correct_samples(predicted, labels, table.shape[1])
    return {
        "ACC": float(correct.mean()),
        "NMI": normalized_mutual_information(predicted, labels),
        "ARI": adjusted_rand_index(predicted, labels),
        "ECE": expected_calibration_error(confidence, correct),
        "CONF": mean_confidence(confidence),
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
