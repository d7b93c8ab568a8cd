"""Build the label-free quality card: what can be said about clusters without a single label.

Nothing here sees ground truth, and nothing here measures accuracy: each number is a second opinion on the same
clusters. Where all agree, the clusters may still not be the classes that a user has in mind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cdc_plugin.core.agreement import agreement, neighbour_consistency, separation
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.selection import select_confident
from cdc_plugin.errors import say

NEIGHBOURS_AMONG = 5000  # with more images, all pairs take long and give the same figure

# Thresholds of warnings. They are constants: no run sees a label.
COLLAPSED, COLLAPSED_OF_TWO = 0.5, 0.95
HARDLY_USED = 0.1
TWO_KINDS, ONE_KIND, LEAST_PART = 2.2, 1.5, 0.08
FEW_IMAGES = 20


@dataclass(frozen=True)
class Evidence:
    """The measurements behind a card."""

    clustering: Tensor  # (N, C) probabilities; those of the other head where a model has one
    calibration: Tensor  # (N, C)
    features: Tensor  # (N, D) of all images, or of a sample of them if there are very many
    kmeans: Tensor  # (N,) on these features
    seen: Tensor  # (n,) indices of some images
    augmented: Tensor | None  # (n,) clusters that are predicted for an augmented view of them, where there are any
    start: Tensor | None = None  # (N,) k-means on the features that a run started from; None if there was no run
    last_epochs: Sequence[Tensor] = ()  # clusters (m,) of the same m images after each of the last epochs
    sample: Tensor | None = None  # (n,) which images the features are of; None for all


def find_trusted(calibration: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which samples Sec. 3.2 would take as pseudo-labels, over the whole set, given (N, C) probabilities."""
    return select_confident(torch.from_numpy(calibration)).mask.numpy()


def assess(evidence: Evidence) -> dict[str, Any]:
    """Return the card: fractions of 1, None for what is unknown, and warnings as sentences."""
    calibration = evidence.calibration
    clusters = calibration.shape[1]
    confidence, assignment = calibration.max(dim=1)
    sizes = torch.bincount(assignment, minlength=clusters)
    shares = sizes[sizes > 0] / sizes.sum()
    entropy = -(shares * shares.log()).sum().item()
    features = evidence.features
    sampled = assignment if evidence.sample is None else assignment[evidence.sample]
    subset = torch.linspace(0, len(sampled) - 1, min(NEIGHBOURS_AMONG, len(sampled))).long()
    stability = [(a == b).float().mean().item() for a, b in pairwise(evidence.last_epochs)]
    start, again = evidence.start, evidence.augmented
    card: dict[str, Any] = {
        "expected_accuracy": confidence.mean().item(),
        "clustering_confidence": evidence.clustering.max(dim=1).values.mean().item(),
        "heads_agree": (evidence.clustering.argmax(dim=1) == assignment).float().mean().item(),
        "augmentation_agreement": None if again is None else (assignment[evidence.seen] == again).float().mean().item(),
        "neighbour_consistency": neighbour_consistency(features[subset], sampled[subset]),
        "kmeans_agreement": agreement(assignment, evidence.kmeans, clusters),
        "trusted_share": select_confident(calibration).mask.float().mean().item(),
        "start_agreement": None if start is None else agreement(assignment, start, clusters),
        "stability": min(stability) if stability else None,
        "balance": max(0.0, entropy / math.log(clusters)),
        "empty_clusters": int((sizes == 0).sum()),
        "largest_cluster_share": (sizes.max() / sizes.sum()).item(),
    }
    warnings = [*_check_sizes(sizes), *_check_kinds(features, sampled, torch.bincount(sampled, minlength=clusters))]
    return card | {"warnings": warnings}


def name_samples(card: dict[str, Any], noun: str) -> None:
    """Let the warnings of a card speak of what its samples are called."""
    card["warnings"] = [warning | {"text": say(warning["text"], noun)} for warning in card["warnings"]]


def _check_sizes(sizes: Tensor) -> list[dict[str, str]]:
    clusters, image_count = len(sizes), int(sizes.sum())
    empty = int((sizes == 0).sum())
    small = [number for number, size in enumerate(sizes.tolist()) if 0 < size < HARDLY_USED * image_count / clusters]
    largest = sizes.max().item() / image_count
    warnings = []
    if largest > (COLLAPSED if clusters > 2 else COLLAPSED_OF_TWO):
        text = (
            f"Cluster {sizes.argmax().item()} contains {largest:.0%} of all images: the clusters have collapsed, "
            "or the classes are very unbalanced. A better backbone or a lower lr_backbone may help."
        )
        warnings.append({"kind": "collapse", "text": text})
    if empty:
        several = "cluster is" if empty == 1 else "clusters are"
        warnings.append({"kind": "empty", "text": f"{empty} {several} empty: others may hold two kinds."})
    if small:
        verb = "is" if len(small) == 1 else "are"
        warnings.append({"kind": "small", "text": f"{_name_clusters(small)} {verb} nearly empty."})
    return warnings


def _check_kinds(features: Tensor, assignment: Tensor, sizes: Tensor) -> list[dict[str, str]]:
    """Warn of clusters whose halves lie further apart than their neighbour, and of pairs that hardly differ."""
    unit = F.normalize(features, dim=1)
    used = [number for number, size in enumerate(sizes.tolist()) if size >= FEW_IMAGES]
    rows = {number: unit[assignment == number][: NEIGHBOURS_AMONG // 10] for number in used}
    centers = {number: points.mean(dim=0) for number, points in rows.items()}
    two_kinds, one_kind = [], []
    for number, points in rows.items():
        # Only the nearest cluster is compared, not all of them: 200 clusters have 20,000 pairs.
        others = [other for other in used if other != number]
        nearest = min(others, key=lambda other: float((centers[other] - centers[number]).norm()), default=None)
        if nearest is None:
            continue
        both = torch.cat([points, rows[nearest]])
        apart = separation(both, torch.arange(len(both), device=both.device) < len(points))
        halves = kmeans(points, 2, torch.Generator().manual_seed(0), starts=3).assignment.bool()
        if separation(points, halves) > max(TWO_KINDS, apart) and LEAST_PART < halves.float().mean() < 1 - LEAST_PART:
            two_kinds.append(number)
        if apart < ONE_KIND:
            one_kind.append(tuple(sorted((number, nearest))))
    warnings = []
    if two_kinds:
        text = f"{_name_clusters(two_kinds)} may contain two kinds of images; a larger --clusters may separate them."
        warnings.append({"kind": "merged", "text": text})
    if one_kind:
        pairs = _list([f"{a} and {b}" for a, b in sorted(set(one_kind))])
        text = f"Clusters {pairs} hardly differ: they may show the same kind of image."
        warnings.append({"kind": "split", "text": text})
    return warnings


def _name_clusters(numbers: list[int]) -> str:
    return f"{'Cluster' if len(numbers) == 1 else 'Clusters'} {_list(list(map(str, numbers)))}"


def _list(names: list[str], most: int = 12) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
