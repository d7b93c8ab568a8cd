"""Compute targets of the calibration head: mean predictions of mini-clusters (Sec. 3.1), or hard pseudo-labels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.core.kmeans import count_members, kmeans


def mini_cluster_targets(probs: Tensor, assignment: Tensor, mini_clusters: int) -> Tensor:
    """Return the mean prediction q̂_k of the mini-cluster of every sample (Sec. 3.1): (B, C), rows sum to 1.

    ``probs`` (B, C) are those of the clustering head for the plain views, ``assignment`` (B,) is the mini-cluster of
    every sample. Mini-clusters without samples do not appear in the result, so they cannot yield NaN.

    >>> mini_cluster_targets(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([0, 0]), 1)
    tensor([[0.7500, 0.2500],
            [0.7500, 0.2500]])
    """
    sums = probs.new_zeros(mini_clusters, probs.shape[1]).index_add_(0, assignment, probs)
    sizes = count_members(assignment, mini_clusters).clamp(min=1)
    return (sums / sizes.unsqueeze(1))[assignment]


def hard_targets(probs: Tensor) -> Tensor:
    """Return the one-hot rows (B, C) of the most probable clusters."""
    return F.one_hot(probs.argmax(dim=1), probs.shape[1]).to(probs.dtype)


def mini_cluster_count(confidence: float, batch: int, clusters: int, largest: float) -> int:
    """Choose K where no recipe sets it, from the mean calibrated confidence of the current batch.

    The paper tunes K for each data set: fewer mini-clusters, and so more penalty, where data are hard. Its values
    are 2 to 25 samples per mini-cluster, 2 to 3 where the accuracy ends above 93 %, 25 where it ends at 62 %.
    The calibrated confidence measures the same without labels, so it sets the size: 800 · (1 - confidence)²,
    from 50 at 75 % over 18 at 85 % and 8 at 90 % down to 3, and no more than ``largest``.

    >>> mini_cluster_count(0.9, batch=1000, clusters=10, largest=50)
    125
    """
    # In this order the bounds also catch NaN, the confidence of a diverged network, which the loss then reports.
    size = min(largest, max(3.0, 800 * (1 - confidence) ** 2))
    return min(max(round(batch / size), 2 * clusters), batch)


def find_mini_clusters(features: Tensor, mini_clusters: int, generator: torch.Generator) -> Tensor:
    """Partition (B, D) features into K mini-clusters and return the mini-cluster (B,) of every sample (Sec. 3.1).

    Rows are L2-normalised. The paper takes the features unchanged, the released code L1-normalises them;
    for non-negative features both normalisations keep directions only. Up to 10 restarts there, one here.
    Centres of the batch before are no good start: they save half of this step, which takes 0.2 to 3 % of an epoch,
    but leave up to three times the inertia and many empty mini-clusters where these are small.
    """
    return kmeans(F.normalize(features, dim=1), mini_clusters, generator, iterations=20).assignment
