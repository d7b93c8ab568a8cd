"""Prototype pseudo-labels and the loss of SPICE-Self (Niu et al., 2022)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.errors import UserError

CENTRE_SHARE = 0.5  # of the B / C samples a cluster could have: those whose mean is its prototype


def prototype_labels(features: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Which samples of a batch are trained on, (C * (B // C),), and their labels; SPICE's E-step.

    The B // C / 2 samples that give most probability to a cluster are averaged to its prototype; the B // C
    samples nearest to the prototype by cosine get its label. Every cluster has as many, so a sample between
    clusters can have several labels and an outlying one has none.

    Args:
        features: (B, D) of the plain views.
        probs: (B, C) of the weak views.
    """
    batch, clusters = probs.shape
    if batch < clusters:
        raise UserError(
            f"a batch of {batch} images cannot hold one image for each of {clusters} clusters; "
            f"pass batch_size={2 * clusters} or more (and at least as many images), or fewer --clusters"
        )
    size = batch // clusters
    unit = F.normalize(features, dim=1)
    # Stable sorts make ties the same on every device.
    confident = probs.sort(dim=0, descending=True, stable=True).indices[: max(1, int(CENTRE_SHARE * size))]
    prototypes = F.normalize(unit[confident].mean(dim=0), dim=1)  # (C, D)
    nearest = (prototypes @ unit.T).sort(dim=1, descending=True, stable=True).indices[:, :size]
    labels = torch.arange(clusters, device=probs.device).repeat_interleave(size)
    return nearest.flatten(), labels


def double_softmax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """SPICE's cross-entropy of the softmax *of the probabilities*: its gradient lasts until they are 0 and 1.

    The smallest value, where every prediction is right and sure, is log(1 + (C - 1) / e).

    Args:
        logits: (b, C); what SPICE predicts with is their plain softmax.
        labels: (b,).
    """
    return F.cross_entropy(F.softmax(logits, dim=1), labels)
