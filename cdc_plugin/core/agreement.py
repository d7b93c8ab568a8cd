"""Measure an assignment to clusters without labels: agreement with another one, neighbours, separation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.errors import DataError


def agreement(first: Tensor, second: Tensor, clusters: int) -> float:
    """Return the share of images in corresponding clusters of two assignments (N,), under the best matching.

    >>> agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 1]), clusters=2)
    0.75
    """
    from scipy.optimize import linear_sum_assignment  # half a second of import

    counts = torch.bincount(first * clusters + second, minlength=clusters**2).reshape(clusters, clusters).cpu()
    rows, columns = linear_sum_assignment(counts.numpy(), maximize=True)
    return counts[rows, columns].sum().item() / len(first)


def neighbour_consistency(features: Tensor, assignment: Tensor, neighbours: int = 10) -> float:
    """Return the mean share of the nearest neighbours (cosine, features (N, D)) in the image's own cluster (N,)."""
    if len(features) < 2:
        return 1.0
    nearest = nearest_neighbours(features, neighbours)
    return (assignment[nearest] == assignment[:, None]).float().mean(dim=1).mean().item()


def nearest_neighbours(features: Tensor, count: int) -> Tensor:
    """Return rows (N, k) of the k = min(count, N - 1) nearest by cosine, nearest first and without the row itself.

    >>> nearest_neighbours(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]), 1).tolist()
    [[1], [0], [1]]
    """
    if len(features) < 2:
        raise DataError(f"neighbours need at least 2 images; found {len(features)}: add images")
    unit = F.normalize(features, dim=1)
    nearest = []
    for rows in torch.arange(len(unit), device=unit.device).split(1024):
        similarity = unit[rows] @ unit.T
        similarity[torch.arange(len(rows), device=unit.device), rows] = -2.0  # below every cosine
        nearest.append(similarity.topk(min(count, len(unit) - 1), dim=1).indices)
    return torch.cat(nearest)


def separation(features: Tensor, halves: Tensor) -> float:
    """Return the distance of the means of two groups over the sum of their spreads, along the line of the means.

    A round group cut in two through its middle has 1.3, two groups that do not touch have 3 and more. ``halves`` (N,)
    is True for rows of features (N, D) that belong to the first group.
    """
    first, second = features[halves], features[~halves]
    if len(first) < 2 or len(second) < 2:
        return 0.0
    line = F.normalize(first.mean(dim=0) - second.mean(dim=0), dim=0)
    one, two = first @ line, second @ line
    return ((one.mean() - two.mean()).abs() / (one.std() + two.std()).clamp_min(1e-9)).item()
