"""The equations of SeCu ("Stable Cluster Discrimination for Deep Clustering", Qian, ICCV 2023).

Points are features of unit length, clusters are unit centres, and the probability of a cluster is the softmax of the
cosines over a temperature. Features, centres and assignments take turns: each has a loss or rule of its own here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def stable_center_loss(cosines: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Cluster discrimination that moves a centre by its own points only.

    In cross-entropy, points of other clusters push a centre away; a batch that holds none of its own points
    then moves it to nowhere, which makes training unstable. So the gradient of a point reaches the centre of
    its cluster alone, with weight 1 - p: hard points count more, where k-means counts all the same.

    Args:
        cosines: (b, C) of points without gradient and centres with.
        labels: (b,) cluster of every point.
    """
    own = F.one_hot(labels, cosines.shape[1]).bool()
    return F.cross_entropy(torch.where(own, cosines, cosines.detach()) / temperature, labels)


def representation_loss(
    first: Tensor, second: Tensor, labels: Tensor, temperature: float, label_weight: float
) -> Tensor:
    """Cross-entropy of each view to its label, mixed with what the other view says.

    The target of a view is τ · one-hot label + (1 - τ) · probabilities of the other view (no gradient).

    Args:
        first, second: (b, C) cosines of two views, with gradient, and the centres as the epoch began.
        labels: (b,) clusters as the epoch began.
        label_weight: τ.
    """
    hard = label_weight * F.one_hot(labels, first.shape[1])
    losses = [
        F.cross_entropy(view / temperature, hard + (1 - label_weight) * F.softmax(other.detach() / temperature, dim=1))
        for view, other in ((first, second), (second, first))
    ]
    return (losses[0] + losses[1]) / 2


def assign_by_entropy(cosines: Tensor, labels: Tensor, sizes: Tensor, weight: float) -> Tensor:
    """The best cluster (b,) of every point if it alone moved: cosine plus α times the entropy of all sizes.

    Moving a point from a cluster of n to one of m points changes N times the negative entropy by
    f(n - 1) - f(n) + f(m + 1) - f(m) with f(n) = n log n; log N cancels. The paper's α stands before the entropy
    itself; a point's share of that is 1 / N, so its weight of 6,000 for 50,000 images is 0.12 here, for any number.

    Args:
        cosines: (b, C), the mean of both views.
        labels: (b,) clusters of these points so far.
        sizes: (C,) points of every cluster so far, in the whole set.
        weight: α / N.
    """
    counts = sizes.to(cosines.dtype)
    change = _growth(counts) - _growth(counts - 1)[labels].unsqueeze(1)  # (b, C); no cluster of a point is empty
    change = change.scatter(1, labels.unsqueeze(1), 0)  # who stays changes nothing
    return (cosines - weight * change).argmax(dim=1)


def assign_by_size(cosines: Tensor, duals: Tensor) -> Tensor:
    """The best cluster (b,) of every point under a least size: cosine plus the dual variable (C,) of the cluster."""
    return (cosines + duals).argmax(dim=1)


def updated_duals(duals: Tensor, labels: Tensor, least_share: float, rate: float) -> Tensor:
    """One step of dual ascent: a cluster with less than its least share of the batch becomes more attractive.

    Args:
        duals: (C,) at least 0.
        labels: (b,) clusters of the batch.
        least_share: lower bound of a cluster's share of the points.
    """
    share = torch.bincount(labels, minlength=len(duals)) / len(labels)
    return (duals + rate * (least_share - share)).clamp(min=0)


def _growth(count: Tensor) -> Tensor:
    """f(n + 1) - f(n) for f(n) = n log n, to the last digit also where n is a million in single precision."""
    return torch.log(count + 1) + count * torch.log1p(1 / count.clamp(min=1))
