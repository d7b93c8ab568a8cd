"""Measure how deep the valley between two groups of points is: whether they are two kinds, or one that was cut."""

import torch
from torch import Tensor

from cdc_plugin.core.kmeans import kmeans

RIDGE = 0.1  # times the mean variance, added to every variance
WIDTH = 0.35  # of the kernel, where the medians of the groups lie at -1 and 1
INNER = 0.8  # the valley is looked for between these
NEAREST = 3  # groups that a group is compared with: 200 clusters have 20,000 pairs
FEWEST = 8  # points of a group that can be cut
STARTS = 3  # of k-means
LEAST_PART = 0.1  # of a group; a smaller part is no kind of its own


def measure_valley(first: Tensor, second: Tensor, generator: torch.Generator) -> float:
    """Return the density between two groups of points (n, D), as a share of the lower of both peaks: 1 for no valley.

    Along the direction that separates one half of the points best, where only the other half is looked at: points of
    one kind that a partition has cut lie as densely at the cut as anywhere.

    >>> points = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    >>> cut, apart = points[:, 0] > 0, torch.tensor([9.0, 0.0, 0.0])
    >>> measure_valley(points[cut], points[~cut], torch.Generator().manual_seed(0)) > 0.8
    True
    >>> measure_valley(points[cut], points[~cut] + apart, torch.Generator().manual_seed(0)) < 0.1
    True
    """
    halves = [torch.randperm(len(group), generator=generator).tensor_split(2) for group in (first, second)]
    places, weights = [], []
    for seen in (0, 1):
        learnt, asked = (
            [group[half[turn]] for group, half in zip((first, second), halves, strict=True)]
            for turn in (seen, 1 - seen)
        )
        if min(map(len, (*learnt, *asked))) < 2:
            return 1.0
        direction = _find_direction(*learnt)
        projected = [group @ direction for group in asked]
        middles = [values.median() for values in projected]
        if middles[1] <= middles[0]:
            return 1.0
        places += [2 * (values - middles[0]) / (middles[1] - middles[0]) - 1 for values in projected]
        weights += [torch.full_like(values, 1 / len(values)) for values in projected]
    return _find_valley(torch.cat(places), torch.cat(weights))


def _find_direction(first: Tensor, second: Tensor) -> Tensor:
    """Return Fisher's discriminant (D,), from the first to the second group."""
    centred = torch.cat([first - first.mean(dim=0), second - second.mean(dim=0)])
    scatter = centred.T @ centred / len(centred)
    ridge = (RIDGE * scatter.diagonal().mean()).clamp_min(1e-12) * torch.eye(len(scatter))
    return torch.linalg.solve(scatter + ridge, second.mean(dim=0) - first.mean(dim=0))


def _find_valley(places: Tensor, weights: Tensor) -> float:
    points = torch.linspace(-1.5, 1.5, 61)
    density = (weights * torch.exp(-0.5 * ((points.unsqueeze(1) - places) / WIDTH).square())).sum(dim=1)
    lowest = int(torch.where(points.abs() < INNER, density, torch.inf).argmin())
    peak = torch.minimum(density[: lowest + 1].max(), density[lowest:].max())
    return float(density[lowest] / peak)


def compare_neighbours(points: Tensor, assignment: Tensor, generator: torch.Generator) -> dict[tuple[int, int], float]:
    """Return the valley between every group of points (N, D) and those nearest to it, by the numbers of the pair."""
    groups = {number: points[assignment == number] for number in assignment.unique().tolist()}
    numbers, centers = list(groups), torch.stack([group.mean(dim=0) for group in groups.values()])
    apart = torch.cdist(centers, centers).fill_diagonal_(torch.inf)
    near = apart.topk(min(NEAREST, len(numbers) - 1), largest=False).indices.tolist()
    pairs = {tuple(sorted((numbers[a], numbers[b]))) for a, others in enumerate(near) for b in others}
    return {(a, b): measure_valley(groups[a], groups[b], generator) for a, b in sorted(pairs)}


def cut_groups(points: Tensor, assignment: Tensor, generator: torch.Generator) -> dict[int, tuple[float, Tensor]]:
    """Return for every group the valley between its halves by k-means, and which of its points the second half has."""
    cuts = {}
    for number in assignment.unique().tolist():
        group = points[assignment == number]
        half = torch.zeros(len(group), dtype=torch.bool)
        if len(group) >= FEWEST:
            half = kmeans(group, 2, generator, starts=STARTS).assignment.bool()
        if LEAST_PART <= half.float().mean() <= 1 - LEAST_PART:
            cuts[number] = measure_valley(group[~half], group[half], generator), half
        else:
            cuts[number] = 1.0, half
    return cuts
