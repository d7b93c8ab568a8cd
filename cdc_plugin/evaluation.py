"""Predictions of a model, and what can be said of them with and without labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from cdc_plugin.clusterer import Clusterer, view_settings
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.prototypes import STARTS, standardize_rows
from cdc_plugin.core.selection import select_confident
from cdc_plugin.data.images import ImageSet, Progress
from cdc_plugin.data.views import plain_view
from cdc_plugin.metrics import summary, summary_hard, summary_unlabelled
from cdc_plugin.model import Backbone
from cdc_plugin.runtime import autocast


@dataclass(frozen=True)
class Report:
    """The outcome of a run: ``metrics`` is the content of report.json, ``predictions`` that of the CSV.

    ``predictions`` is a record array: ``report.predictions["cluster"]``, or ``pandas.DataFrame(...)`` of it.
    """

    metrics: dict[str, Any]
    predictions: np.recarray
    folder: Path | None = field(default=None)


@torch.no_grad()
def extract_features(
    backbone: Backbone, images: ImageSet, device: torch.device, precision: str, progress: Progress | None
) -> Tensor:
    """Features (N, D) of the plain views, on the CPU."""
    settings = view_settings(backbone)
    backbone.eval()
    parts = torch.arange(len(images)).split(256)
    rows = []
    for part in progress(parts, len(parts), "features") if progress else parts:
        views = plain_view(images.batch(part).to(device), settings)
        with autocast(device, precision):
            rows.append(backbone(views.contiguous(memory_format=torch.channels_last)).float().cpu())
    return torch.cat(rows)


@torch.no_grad()
def head_probabilities(head: nn.Module, features: Tensor) -> NDArray[np.float32]:
    """Softmax (N, C) of a head in evaluation mode."""
    head.eval()
    device = next(head.parameters()).device
    return torch.cat([F.softmax(head(f.to(device)), dim=1).cpu() for f in features.split(8192)]).numpy()


def kmeans_assignment(features: Tensor, clusters: int, generator: torch.Generator) -> NDArray[np.int64]:
    """The clustering that the stage competes with: the best of ten k-means starts on the same features."""
    return kmeans(standardize_rows(features), clusters, generator, starts=STARTS).assignment.cpu().numpy()


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


def predict(
    model: Clusterer, images: ImageSet, device: torch.device, precision: str, progress: Progress | None
) -> tuple[NDArray[np.float32], NDArray[np.float32], Tensor]:
    """Probabilities of the clustering and of the calibration head, and the features."""
    features = extract_features(model.backbone, images, device, precision, progress)
    clustering = head_probabilities(model.clustering_head, features)
    return clustering, head_probabilities(model.calibration_head, features), features
