"""The label-free quality card: what can be said of clusters without knowing a single class.

Nothing here sees ground truth, and nothing here measures accuracy: each number is a second opinion on the same
clusters. Where the opinions differ, the card warns; where they agree, clusters may still not be the classes that
somebody has in mind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.core.agreement import agreement, neighbour_consistency, separation
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.selection import select_confident
from cdc_plugin.data.images import ImageSet
from cdc_plugin.data.views import ViewSettings, plain_view, view_settings, weak_view
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.training.runtime import Runtime

SAMPLE = 1024  # images that are looked at again in another view
WATCHED, SNAPSHOT_EPOCHS = 512, 3  # images that are looked at after each of the last epochs
NEIGHBOURS_AMONG = 5000  # neighbours of all pairs of more images take long and say the same

# Thresholds of warnings. They are constants: no run sees a label. They were set in development, on 15 runs on digits,
# Fashion-MNIST and its halves, CIFAR-10 and ten ImageNet classes, with the right and with wrong numbers of clusters,
# so that all 9 runs whose mean confidence was more than 5 points off the accuracy are warned of; 3 others are, too.
HEADS_APART = 0.05
FOUND_AGAIN = 0.85
SEEN_ANEW = 0.9
UNSTABLE = 0.95
COLLAPSED, COLLAPSED_OF_TWO = 0.5, 0.95
HARDLY_USED = 0.1
TWO_KINDS, ONE_KIND, LEAST_PART = 2.2, 1.5, 0.08
FEW_IMAGES = 20


@dataclass(frozen=True)
class Evidence:
    """What a card is made of.

    Args:
        clustering, calibration: (N, C) probabilities of both heads; the same where a model has one.
        features: (N, D) of the model, or those of a sample of very many images.
        kmeans: (N,) k-means on these features.
        seen, anew: indices (n,) of some images, and the clusters (n,) they are put in when seen in another view.
        start: (N,) k-means on the features that a run began with; None where there was no run.
        last_epochs: clusters (m,) of the same m images after each of the last epochs.
        sample: (n,) which images the features are of; None for all.
    """

    clustering: Tensor
    calibration: Tensor
    features: Tensor
    kmeans: Tensor
    seen: Tensor
    anew: Tensor
    start: Tensor | None = None
    last_epochs: Sequence[Tensor] = ()
    sample: Tensor | None = None


def snapshot(model: Clusterer, images: ImageSet, runtime: Runtime) -> Tensor:
    """Clusters (m,) of a few images, the same ones every time: how many change them between the last epochs?"""
    view = partial(plain_view, settings=view_settings(model.backbone))
    return _clusters_of(model, images, snapshot_rows(len(images)), view, runtime)


def snapshot_rows(count: int) -> Tensor:
    """Which of so many images `snapshot` looks at."""
    return torch.linspace(0, count - 1, min(WATCHED, count)).long()


def predict_augmented(
    model: Clusterer,
    images: ImageSet,
    settings: ViewSettings,
    runtime: Runtime,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return indices of a sample of images, and the cluster that the calibration head gives a weak view of each."""
    chosen = torch.randperm(len(images), generator=generator)[:SAMPLE].sort().values
    found = _clusters_of(model, images, chosen, lambda pixels: weak_view(pixels, settings, generator), runtime)
    return chosen, found


def assess(evidence: Evidence) -> dict[str, Any]:
    """Return the card: fractions of 1, None for what is not known, and warnings in plain words."""
    calibration = evidence.calibration
    clusters = calibration.shape[1]
    confidence, assignment = calibration.max(dim=1)
    sizes = torch.bincount(assignment, minlength=clusters)
    shares = sizes[sizes > 0] / sizes.sum()
    entropy = -(shares * shares.log()).sum().item()
    features, known = evidence.features, assignment if evidence.sample is None else assignment[evidence.sample]
    some = torch.linspace(0, len(known) - 1, min(NEIGHBOURS_AMONG, len(known))).long()
    stability = [(a == b).float().mean().item() for a, b in pairwise(evidence.last_epochs)]
    start = evidence.start
    card: dict[str, Any] = {
        "expected_accuracy": confidence.mean().item(),
        "clustering_confidence": evidence.clustering.max(dim=1).values.mean().item(),
        "heads_agree": (evidence.clustering.argmax(dim=1) == assignment).float().mean().item(),
        "augmentation_agreement": (assignment[evidence.seen] == evidence.anew).float().mean().item(),
        "neighbour_consistency": neighbour_consistency(features[some], known[some]),
        "kmeans_agreement": agreement(assignment, evidence.kmeans, clusters),
        "trusted_share": select_confident(calibration).mask.float().mean().item(),
        "start_agreement": None if start is None else agreement(assignment, start, clusters),
        "stability": min(stability) if stability else None,
        "balance": max(0.0, entropy / math.log(clusters)),
        "empty_clusters": int((sizes == 0).sum()),
        "largest_cluster_share": (sizes.max() / sizes.sum()).item(),
    }
    warnings = [*_about_sizes(sizes), *_about_kinds(features, known, torch.bincount(known, minlength=clusters))]
    doubts = _doubts(card, len(assignment), clusters)
    if any(warning["kind"] == "merged" for warning in warnings):
        doubts.append("some clusters may hold two kinds of images")
    if doubts:
        warnings.insert(
            0,
            _warning(
                "estimate",
                f"The expected accuracy of {card['expected_accuracy']:.0%} may be off by more than 5 points: "
                f"{'; '.join(doubts)}. Label some images by hand to know: cdc-predict --audit 100.",
            ),
        )
    card["warnings"] = warnings
    return card


@torch.no_grad()
def _clusters_of(
    model: Clusterer,
    images: ImageSet,
    chosen: Tensor,
    view: Callable[[Tensor], Tensor],
    runtime: Runtime,
) -> Tensor:
    model.eval()
    found = []
    for part in chosen.split(256):
        views = view(images.batch(part).to(runtime.device)).contiguous(memory_format=torch.channels_last)
        with runtime.autocast():
            found.append(model(views).float().argmax(dim=1).cpu())
    return torch.cat(found)


def _doubts(card: dict[str, Any], images: int, clusters: int) -> list[str]:
    """Reasons not to take the mean confidence for the accuracy."""
    apart = card["clustering_confidence"] - card["expected_accuracy"]
    again = {"kmeans_agreement": "its features", "start_agreement": "the features it began with"}
    doubts = []
    if abs(apart) > HEADS_APART:
        doubts.append(f"the mean confidence of the two heads differs by {100 * abs(apart):.0f} points")
    for name, what in again.items():
        if card[name] is not None and card[name] < FOUND_AGAIN:
            doubts.append(f"k-means on {what} puts only {card[name]:.0%} of the images in the same cluster")
    if card["augmentation_agreement"] < SEEN_ANEW:
        doubts.append(f"only {card['augmentation_agreement']:.0%} of the images keep their cluster in another view")
    if card["stability"] is not None and card["stability"] < UNSTABLE:
        doubts.append(f"in the last epochs only {card['stability']:.0%} of the images kept their cluster")
    if images < FEW_IMAGES * clusters:
        doubts.append(f"{images} images are few for {clusters} clusters")
    return doubts


def _about_sizes(sizes: Tensor) -> list[dict[str, str]]:
    clusters, images = len(sizes), int(sizes.sum())
    empty = int((sizes == 0).sum())
    small = [number for number, size in enumerate(sizes.tolist()) if 0 < size < HARDLY_USED * images / clusters]
    largest = sizes.max().item() / images
    found = []
    if largest > (COLLAPSED if clusters > 2 else COLLAPSED_OF_TWO):
        found.append(
            _warning(
                "collapse",
                f"Cluster {sizes.argmax().item()} holds {largest:.0%} of all images: the clusters have collapsed, "
                "or the data are very unequal. A better backbone or a lower lr_backbone may help.",
            )
        )
    if empty:
        several = "cluster is" if empty == 1 else "clusters are"
        found.append(_warning("empty", f"{empty} {several} empty; try fewer --clusters."))
    if small:
        found.append(_warning("small", f"{_named(small)} {'is' if len(small) == 1 else 'are'} hardly used."))
    return found


def _about_kinds(features: Tensor, assignment: Tensor, sizes: Tensor) -> list[dict[str, str]]:
    """Clusters that fall in two as clearly as from their neighbour, and pairs that hardly fall apart."""
    unit = F.normalize(features, dim=1)
    used = [number for number, size in enumerate(sizes.tolist()) if size >= FEW_IMAGES]
    rows = {number: unit[assignment == number][: NEIGHBOURS_AMONG // 10] for number in used}
    centers = {number: points.mean(dim=0) for number, points in rows.items()}
    two_kinds, one_kind = [], []
    for number, points in rows.items():
        # Only the nearest cluster is asked, not all of them: 200 clusters have 20,000 pairs.
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
    found = []
    if two_kinds:
        text = f"{_named(two_kinds)} may hold two kinds of images; more --clusters may part them."
        found.append(_warning("merged", text))
    if one_kind:
        pairs = _listed([f"{a} and {b}" for a, b in sorted(set(one_kind))])
        found.append(_warning("split", f"Clusters {pairs} hardly differ: they may be one kind of images."))
    return found


def _named(numbers: list[int]) -> str:
    return f"{'Cluster' if len(numbers) == 1 else 'Clusters'} {_listed(list(map(str, numbers)))}"


def _listed(names: list[str], most: int = 12) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _warning(kind: str, text: str) -> dict[str, str]:
    return {"kind": kind, "text": text}
