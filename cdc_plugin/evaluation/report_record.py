"""Predictions of a model, and what can be said of them with and without labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from cdc_plugin.core.kmeans import kmeans, nearest
from cdc_plugin.core.kmeans_blocks import lloyd_blocks
from cdc_plugin.core.prototypes import STARTS, standardize_rows
from cdc_plugin.core.selection.confident import select_confident
from cdc_plugin.data.images import ImageSet, Progress
from cdc_plugin.data.sources.base import digest_of
from cdc_plugin.data.views import plain_view, view_settings
from cdc_plugin.metrics import summary, summary_hard, summary_unlabelled
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.training.device import autocast
from cdc_plugin.training.distributed import NEIGHBOURS, SINGLE, Distributed
from cdc_plugin.training.features import Features, find_rows, keep_rows


@dataclass(frozen=True)
class Report:
    """The outcome of a run: ``metrics`` is the content of report.json, ``predictions`` that of the CSV.

    ``predictions`` is a record array: ``report.predictions["cluster"]``, or ``pandas.DataFrame(...)`` of it.
    """

    metrics: dict[str, Any]
    predictions: np.recarray
    folder: Path | None = field(default=None)


def extract_features(
    backbone: Backbone, images: ImageSet, device: torch.device, precision: str, progress: Progress | None
) -> Tensor:
    """Features (N, D) of the plain views, on the CPU."""
    return torch.cat(list(_features_of(SINGLE, backbone, images, device, precision, progress)))


def shared_features(
    backbone: Backbone,
    images: ImageSet,
    device: torch.device,
    precision: str,
    progress: Progress | None,
    distributed: Distributed = SINGLE,
) -> Features:
    """As `extract_features`, for sets of any size and any number of processes: each looks at its share.

    They are kept in the cache, under a name made of weights, images and input, and found there again.
    """
    share = distributed.share_of(len(images))
    key = features_key(backbone, images, device, precision, str(distributed))
    shape = (len(share), backbone.feature_dim)
    rows = find_rows(key, shape)
    if rows is None:
        rows = keep_rows(key, shape, _features_of(distributed, backbone, images, device, precision, progress))
    return Features(rows, len(images), distributed)


def features_key(backbone: Backbone, images: ImageSet, device: torch.device, precision: str, more: str) -> str | None:
    """Name of features in the cache: changes with weights, images, how they are put in and what else matters.

    None for a module of the user's own: the same weights may stand in changed code.
    """
    if backbone.spec is None:
        return None
    facts = f"{backbone.mean.tolist()} {backbone.std.tolist()} {backbone.input_size} {backbone.spec}"
    how = f"{device.type} {precision} {len(images)} {more}"
    state = backbone.module.state_dict()
    return digest_of([facts, how, images.digest, *state, *(_bytes(tensor) for tensor in state.values())])


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@torch.no_grad()
def _features_of(
    distributed: Distributed,
    backbone: Backbone,
    images: ImageSet,
    device: torch.device,
    precision: str,
    progress: Progress | None,
) -> Iterator[Tensor]:
    """Features of this process's share of the images, part by part."""
    settings = view_settings(backbone)
    backbone.eval()
    share = distributed.share_of(len(images))
    if not len(share):
        yield torch.empty(0, backbone.feature_dim)
        return
    parts = share.split(NEIGHBOURS if distributed.exact else 256)
    for part in progress(parts, len(parts), "features") if progress else parts:
        views = plain_view(images.batch(part).to(device), settings)
        with autocast(device, precision):
            yield backbone(views.contiguous(memory_format=torch.channels_last)).float().cpu()


@torch.no_grad()
def head_probabilities(head: nn.Module, features: Tensor | Features) -> NDArray[np.float32]:
    """Softmax (N, C) of a head in evaluation mode."""
    head.eval()
    device = next(head.parameters()).device
    features = Features(features, len(features)) if isinstance(features, Tensor) else features
    return features.map(lambda block: F.softmax(head(block.to(device)), dim=1)).numpy()


def kmeans_assignment(features: Tensor, clusters: int, generator: torch.Generator) -> NDArray[np.int64]:
    """The clustering that the stage competes with: the best of ten k-means starts on the same features."""
    return kmeans(standardize_rows(features), clusters, generator, starts=STARTS).assignment.cpu().numpy()


def kmeans_of_all(
    features: Features, clusters: int, device: torch.device, generator: torch.Generator
) -> NDArray[np.int64]:
    """As `kmeans_assignment`, for features of any number: the starts see a sample, the last iterations everything."""
    rows, chosen = features.sample(clusters, generator)
    best = kmeans(standardize_rows(rows.to(device)), clusters, generator, starts=STARTS)
    if len(chosen) == len(features):
        return best.assignment.cpu().numpy()
    return nearest_of_all(features, refine_over_all(features)(best.centers)).numpy()


def refine_over_all(features: Features) -> Callable[[Tensor], Tensor]:
    """From k-means centres of a sample's standardised rows to those of all features, in all processes."""

    def refine(centers: Tensor) -> Tensor:
        def directions() -> Iterator[Tensor]:
            return (standardize_rows(block.to(centers.device)) for block in features.blocks())

        return lloyd_blocks(
            directions, features.distributed.broadcast_(centers.contiguous()), features.distributed.total
        )

    return refine


def nearest_of_all(features: Features, centers: Tensor) -> Tensor:
    """(N,) the nearest of centres among standardised rows."""
    return features.map(lambda block: nearest(standardize_rows(block.to(centers.device)), centers)[0])


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
    model: Clusterer,
    images: ImageSet,
    device: torch.device,
    precision: str,
    progress: Progress | None,
    distributed: Distributed = SINGLE,
) -> tuple[NDArray[np.float32], NDArray[np.float32], Features]:
    """Probabilities of the clustering and of the calibration head, and the features."""
    share = distributed.share_of(len(images))
    parts = _features_of(distributed, model.backbone, images, device, precision, progress)
    features = Features(keep_rows(None, (len(share), model.backbone.feature_dim), parts), len(images), distributed)
    clustering = head_probabilities(model.clustering_head, features)
    return clustering, head_probabilities(model.calibration_head, features), features
