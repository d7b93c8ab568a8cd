"""Predictions of a model, and what can be said of them with and without labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdc_plugin.checkpoints.load import Loaded
from cdc_plugin.core.selection.confident import select_confident
from cdc_plugin.data.images import ImageSet
from cdc_plugin.metrics import summary, summary_hard, summary_unlabelled


@dataclass(frozen=True)
class Report:
    """The outcome of a run: ``metrics`` is the content of report.json, ``predictions`` that of the CSV.

    ``predictions`` is a record array: ``report.predictions["cluster"]``, or ``pandas.DataFrame(...)`` of it.
    """

    metrics: dict[str, Any]
    predictions: np.recarray
    folder: Path | None = field(default=None)


def measure(
    clustering: NDArray[np.float32],
    calibration: NDArray[np.float32],
    kmeans_labels: NDArray[np.int64],
    labels: NDArray[np.int64] | None,
) -> dict[str, dict[str, Any]]:
    """Figures of k-means and both heads: ACC, NMI, ARI and ECE with labels; confidence and sizes always."""
    clusters = calibration.shape[1]
    found: dict[str, dict[str, Any]] = {}
    sizes = np.bincount(kmeans_labels, minlength=clusters)
    found["kmeans"] = {"cluster_sizes": sizes.tolist()}
    if labels is not None:
        found["kmeans"] |= {**summary_hard(kmeans_labels, labels, clusters), "ECE": None}
    found["clustering_head"] = measure_head(clustering, labels)
    found["calibration_head"] = measure_head(calibration, labels)
    return found


def measure_head(probs: NDArray[np.float32], labels: NDArray[np.int64] | None) -> dict[str, Any]:
    """Every figure of one head's probabilities (N, C); without labels those of `summary_unlabelled`."""
    return summary_unlabelled(probs) if labels is None else summary(probs, labels)


def trusted_samples(calibration: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which samples Sec. 3.2 would take as pseudo-labels, over the whole set."""
    return select_confident(torch.from_numpy(calibration)).mask.numpy()


def old_record(old: Any, initial: Any, loaded: Loaded, images: ImageSet) -> dict[str, Any] | None:
    """What the report says of the model that is retrofitted, and its assignment to compare the final one with."""
    if old is None:
        return None
    figures = measure_head(old, images.labels)
    figures |= {"writer": loaded.origin.writer, "clusters": old.shape[1]}
    figures["agreement_before"] = float((initial.argmax(axis=1) == old.argmax(axis=1)).mean())
    return {"figures": figures, "assignment": torch.from_numpy(old.argmax(axis=1))}
