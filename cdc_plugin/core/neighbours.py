"""The losses of SCAN (Van Gansbeke et al., 2020): agreement with nearest neighbours, then balanced self-labelling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.core.losses import negative_entropy
from cdc_plugin.errors import UserError


def nearest_neighbours(features: Tensor, count: int) -> Tensor:
    """Rows (N, k) of the k = min(count, N - 1) nearest by cosine, nearest first; none is its own neighbour.

    Args:
        features: (N, D), of any length.
    """
    if len(features) < 2:
        raise UserError(f"neighbours are looked for among at least 2 images; found {len(features)}: add images")
    unit = F.normalize(features, dim=1)
    nearest = []
    for rows in torch.arange(len(unit), device=unit.device).split(1024):
        likeness = unit[rows] @ unit.T
        likeness[torch.arange(len(rows), device=unit.device), rows] = -2.0  # below every cosine
        nearest.append(likeness.topk(min(count, len(unit) - 1), dim=1).indices)
    return torch.cat(nearest)


def consistency_loss(logits: Tensor, neighbour_logits: Tensor) -> Tensor:
    """First term of SCAN's Eq. 2: minus the mean log of <p(x), p(neighbour)>; 0 for equal, sure predictions.

    Args:
        logits, neighbour_logits: (b, C) of images and of one neighbour each.
    """
    # By logsumexp: finite, with a gradient, where the product underflows to 0 (SCAN's code cuts at -100).
    log_products = F.log_softmax(logits, dim=1) + F.log_softmax(neighbour_logits, dim=1)
    return -log_products.logsumexp(dim=1).mean()


def scan_loss(logits: Tensor, neighbour_logits: Tensor, entropy_weight: float) -> Tensor:
    """SCAN's Eq. 2: consistency + lambda * sum of p' log p', p' being the mean prediction for the images."""
    return consistency_loss(logits, neighbour_logits) + entropy_weight * negative_entropy(logits)


def balanced_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """SCAN's third stage: cross-entropy over trusted samples, each weighted by 1 / (share of its label in them).

    Weights are normalised to the sum of 1, so this is the mean over the labels that occur of their mean losses.
    It is 0, with a zero gradient, where no sample is trusted.

    Args:
        logits: (b, C) of the strong views.
        labels: (b,) pseudo-labels.
        mask: (b,) which of them are trusted.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    trusted = mask.to(losses.dtype)
    counts = torch.zeros_like(logits[0]).index_add_(0, labels, trusted)  # (C,)
    weights = trusted / counts.clamp(min=1)[labels]
    return (weights * losses).sum() / weights.sum().clamp(min=1)
