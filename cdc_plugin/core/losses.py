"""The losses of both heads (Eqs. 1-3 and 5)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def pseudo_label_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """L_clu (Eq. 5): cross-entropy over the trusted samples; 0, with a zero gradient, where none is trusted.

    Args:
        logits: (b, C) of the clustering head for the strong views.
        labels: (b,) pseudo-labels.
        mask: (b,) which of them are trusted.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def soft_target_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """L_cal (Eq. 1): mean cross-entropy between (b, C) soft targets and the calibration head."""
    return F.cross_entropy(logits, targets)


def negative_entropy(logits: Tensor) -> Tensor:
    """L_en (Eq. 2): negative entropy of the mean prediction; smallest, -log C, when clusters are even.

    Eq. 2 divides by C and the released code does not. Without the factor its weight w_en = 1 means the same
    for 10 and for 200 clusters, so that is what is computed here; ``entropy_weight=1/C`` gives the other.
    """
    # log of the mean probability by logsumexp: finite where a cluster's probability underflows to 0.
    log_mean = F.log_softmax(logits, dim=1).logsumexp(dim=0) - math.log(len(logits))
    return (log_mean.exp() * log_mean).sum()


def calibration_loss(
    logits: Tensor,
    targets: Tensor,
    entropy_weight: float,
    fit: Callable[[Tensor, Tensor], Tensor] = soft_target_loss,
) -> Tensor:
    """L = L_cal + w_en · L_en (Eq. 3); ``fit`` takes the place of L_cal where another calibration is compared."""
    return fit(logits, targets) + entropy_weight * negative_entropy(logits)
