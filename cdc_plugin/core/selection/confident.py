"""Which pseudo-labels are trusted: what every selection is given, and the confidence-aware one (Sec. 3.2, Eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cdc_plugin.errors import UserError


@dataclass(frozen=True)
class Selection:
    """Pseudo-labels (B,), which of them are trusted (B,), and how many each cluster may contribute (C,)."""

    labels: Tensor
    mask: Tensor
    quota: Tensor


@dataclass(frozen=True)
class SelectionInput:
    """What the selecting head made of the weak views of a batch.

    Args:
        probs: (B, C) its probabilities.
        rows: (B,) numbers of the images in the whole set, from 0.
        features: (B, D) the features it was given.
        hidden: (B, H) what its last layer was given.
    """

    probs: Tensor
    rows: Tensor
    features: Tensor
    hidden: Tensor


class Selector:
    """One way to select, made once a run; ``state`` is all that it remembers between batches.

    Args:
        images: N, how many there are.
        clusters: C.
        threshold: confidence asked for, where the way has a fixed threshold.
        momentum: share of the past in moving averages, where the way has any.
        device: where the state lives.
    """

    def __init__(self, images: int, clusters: int, threshold: float, momentum: float, device: torch.device) -> None:
        self.images, self.clusters, self.threshold, self.momentum = images, clusters, threshold, momentum
        self.state: dict[str, Tensor] = {}

    def __call__(self, seen: SelectionInput) -> Selection:
        raise NotImplementedError


class Confident(Selector):
    """`select_confident`: the selection of CDC."""

    def __call__(self, seen: SelectionInput) -> Selection:
        return select_confident(seen.probs)


class ConfidentColumn(Selector):
    """`select_confident_column`: the stricter reading of Eq. 4."""

    def __call__(self, seen: SelectionInput) -> Selection:
        return select_confident_column(seen.probs)


def select_confident(probs: Tensor) -> Selection:
    """Trust the top M(c) samples of every cluster c, M(c) being their summed confidence (Eq. 4).

    TOP(c) holds the B // C samples with the largest probability of c. "Confidence" is read as the largest
    probability of a sample, as in the released code, whose mean times B // C is the sum taken here. The
    label of a trusted sample is its own most probable cluster, even where another cluster's list holds it.

    Args:
        probs: (B, C) calibrated probabilities of the weak views.
    """
    confidence, labels = probs.max(dim=1)
    top = _top_samples(probs)
    return _trust(labels, top, confidence[top].sum(dim=0))


def select_confident_column(probs: Tensor) -> Selection:
    """As ``confident``, with M(c) the summed probability *of cluster c*: the stricter reading of Eq. 4.

    The readings part where a cluster's list holds samples of other clusters, that is, where the cluster is
    smaller than B // C: this one then trusts fewer of them.
    """
    labels = probs.argmax(dim=1)
    top = _top_samples(probs)
    return _trust(labels, top, probs.gather(0, top).sum(dim=0))


def _top_samples(probs: Tensor) -> Tensor:
    batch, clusters = probs.shape
    if batch < clusters:
        raise UserError(
            f"a batch of {batch} images cannot hold one image for each of {clusters} clusters; "
            f"pass batch_size={2 * clusters} or more (and at least as many images), or fewer --clusters"
        )
    # (B // C, C), best sample first and of equal ones the first, so that ties are the same on every device.
    best = probs.topk(batch // clusters, dim=0)
    if ((probs >= best.values[-1]).sum(dim=0) == len(best.values)).all():  # no tie for the last place
        rows = best.indices.sort(dim=0).values
        return rows.gather(0, probs.gather(0, rows).sort(dim=0, descending=True, stable=True).indices)
    return probs.sort(dim=0, descending=True, stable=True).indices[: batch // clusters]


def _trust(labels: Tensor, top: Tensor, mass: Tensor) -> Selection:
    quota = mass.floor().long()
    rank = torch.arange(len(top), device=top.device).unsqueeze(1)
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[top[rank < quota]] = True
    return Selection(labels, mask, quota)
