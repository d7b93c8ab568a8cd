"""The losses of Contrastive Clustering (CC; Li et al., AAAI 2021): rows are instances, columns are clusters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.core.losses import negative_entropy


def pair_contrast(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """NT-Xent: row i of one view should be closest to row i of the other among all other rows of both views.

    L_ins of CC (Eqs. 2-3) where rows are projections of images, and the first term of L_clu where they are
    clusters. The sum in the paper's denominator runs over a row itself as well; as in the released code it is
    left out, since a row's likeness to itself is a constant.

    Args:
        first, second: (n, d) rows of both views, of any length: cosines are compared.
    """
    count = len(first)
    rows = F.normalize(torch.cat([first, second]), dim=1)
    likeness = rows @ rows.T / temperature  # (2n, 2n)
    itself = torch.eye(2 * count, dtype=torch.bool, device=rows.device)
    partner = torch.arange(2 * count, device=rows.device).roll(count)
    return F.cross_entropy(likeness.masked_fill(itself, -torch.inf), partner)


def cluster_contrast(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """L_clu of CC (Eqs. 5-6): columns of the probabilities are told apart, minus the entropy of cluster sizes.

    A column says how much every image of the batch belongs to one cluster. Without the entropies, one of
    each view, most images could go to a single cluster.

    Args:
        first, second: (b, C) logits of the same images in two views.
    """
    contrast = pair_contrast(F.softmax(first, dim=1).T, F.softmax(second, dim=1).T, temperature)
    return contrast + negative_entropy(first) + negative_entropy(second)
