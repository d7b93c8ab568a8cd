"""Mini-cluster targets of the calibration head (Sec. 3.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.core.kmeans import kmeans


def mini_cluster_targets(probs: Tensor, assignment: Tensor, mini_clusters: int) -> Tensor:
    """Give every sample the mean prediction of its mini-cluster, q̂_k.

    Mini-clusters without samples have no part in the result, so they cannot yield NaN.

    Args:
        probs: (B, C) probabilities of the clustering head for the plain views.
        assignment: (B,) mini-cluster of every sample, below ``mini_clusters``.

    Returns:
        (B, C) soft targets; each row sums to 1.
    """
    sums = probs.new_zeros(mini_clusters, probs.shape[1]).index_add_(0, assignment, probs)
    sizes = torch.bincount(assignment, minlength=mini_clusters).clamp(min=1)
    return (sums / sizes.unsqueeze(1))[assignment]


def mini_cluster_count(confidence: float, batch: int, clusters: int, largest: float) -> int:
    """K for data that no recipe is made for, from the mean calibrated confidence of the batch at hand.

    The paper tunes K by data set: fewer mini-clusters, and so more penalty, where data are hard. Its values
    are 2 to 25 samples a mini-cluster, 2 to 3 where the accuracy ends above 93 %, 25 where it ends at 62 %.
    The calibrated confidence is the label-free measure of just that, so it sets the size: 800 · (1 -
    confidence)², from 50 at 75 % over 18 at 85 % and 8 at 90 % down to 3, and no more than ``largest``.
    """
    # In this order the bounds also catch NaN, the confidence of a diverged network, which the loss then tells.
    size = min(largest, max(3.0, 800 * (1 - confidence) ** 2))
    return min(max(round(batch / size), 2 * clusters), batch)


def find_mini_clusters(features: Tensor, mini_clusters: int, generator: torch.Generator) -> Tensor:
    """Partition (B, D) features into K mini-clusters and return the mini-cluster (B,) of every sample.

    Rows are L2-normalised. The paper takes the features as they are, the released code L1-normalises them;
    for non-negative features both normalisations keep directions only. Up to 10 restarts there, one here.
    Centres of the batch before are no good start: they save half of this step, which takes 0.2 to 3 % of an epoch,
    but leave up to three times the inertia and many empty mini-clusters where these are small.
    """
    return kmeans(F.normalize(features, dim=1), mini_clusters, generator, iterations=20).assignment
