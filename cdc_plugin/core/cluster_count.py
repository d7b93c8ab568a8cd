"""Find the number of clusters without labels, and the range that the evidence does not exclude.

Every candidate C is seen through k-means into C clusters. Too many cut kinds in two: there is no valley between
neighbours, and other halves of the data are cut elsewhere. Too few leave kinds together: there is a valley inside.
The communities of a graph of neighbours are a second opinion.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cdc_plugin.core.communities import count_communities
from cdc_plugin.core.kmeans import kmeans, nearest
from cdc_plugin.core.valley import compare_neighbours, cut_groups

DRAWS, STARTS = 2, 3  # of all that is random, whose mean is the evidence; of k-means in each
FINE = 20  # up to here every number is a candidate, above it steps of 10 %
SEEN_A_CLUSTER = 20  # points that a cluster needs, at the least, to be judged
DIRECTIONS = 32  # principal components in which valleys are looked for


class Weights(NamedTuple):
    """What the four signs of a right number weigh, and the share of all evidence that the range holds."""

    between: float  # valley between a cluster and the nearest to it, 1 for none; mean over clusters
    inside: float  # valley inside a cluster
    unsteady: float  # logarithm of the share of pairs that the other half of the data keeps apart
    off: float  # from the number of communities, as the size of the logarithm of the ratio
    held: float


# Chosen by tests/benchmarks/arena/count.py on real sets, each reported only by weights that were chosen without it.
WEIGHTS = Weights(between=-3.17, inside=11.24, unsteady=-0.79, off=-1.66, held=0.7)


@dataclass(frozen=True)
class Count:
    """The most likely number of clusters, the range that is not excluded, and what each candidate has for it."""

    number: int
    low: int
    high: int
    candidates: list[int]
    shares: list[float]  # of the evidence, for every candidate
    tried: list[int]  # numbers of clusters that were trained, this one the last

    def odds(self, other: int) -> float:
        """Return how much more there is for the number than for another one."""
        share = self.shares[self.candidates.index(other)] if other in self.candidates else 0.0
        return max(self.shares) / max(share, 1e-9)


def list_candidates(low: int, high: int) -> list[int]:
    """Return the numbers of clusters that are tried.

    >>> list_candidates(18, 30)
    [18, 19, 20, 22, 24, 26, 28, 30]
    """
    candidates = [low]
    while candidates[-1] < high:
        last = candidates[-1]
        candidates.append(min(high, last + 1 if last < FINE else last + last // 10))
    return candidates


def count_clusters(points: Tensor, low: int, high: int, generator: torch.Generator) -> Count:
    """Return how many clusters principal components (N, D) fall into; at most so many that each can be judged.

    >>> from cdc_plugin.core.probe import principal_components
    >>> centers = torch.eye(4).repeat_interleave(50, dim=0)
    >>> points = centers + 0.2 * torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> count_clusters(principal_components(points), 2, 10, torch.Generator().manual_seed(0)).number
    4
    """
    highest = max(low, min(high, len(points) // SEEN_A_CLUSTER))
    candidates = list_candidates(low, highest)
    return weigh(gather_evidence(points, candidates, generator), candidates)


def gather_evidence(points: Tensor, candidates: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return for every candidate (n,) the four signs that `Weights` weighs, (n, 4)."""
    drawn = []
    for _ in range(DRAWS):
        halves = torch.randperm(len(points), generator=generator).tensor_split(2)
        communities = count_communities(points, generator)
        off = [abs(math.log(clusters / communities)) for clusters in candidates]
        signs = [_judge(points, halves, clusters, generator) for clusters in candidates]
        drawn.append(torch.tensor([(*three, fourth) for three, fourth in zip(signs, off, strict=True)]))
    return torch.stack(drawn).mean(dim=0)


def _judge(
    points: Tensor, halves: Sequence[Tensor], clusters: int, generator: torch.Generator
) -> tuple[float, float, float]:
    assignment = kmeans(points, clusters, generator, starts=STARTS).assignment
    seen = points[:, :DIRECTIONS]
    pairs = compare_neighbours(seen, assignment, generator)
    used = assignment.unique().tolist()
    between = [max((value for pair, value in pairs.items() if number in pair), default=0.0) for number in used]
    inside = [value for value, _ in cut_groups(seen, assignment, generator).values()]
    kept_apart = max(1 - measure_strength(points, halves, clusters, generator), 1e-3)
    signs = sum(between) / len(used), sum(inside) / len(used)
    return *signs, float(torch.tensor(kept_apart).log())


def measure_strength(points: Tensor, halves: Sequence[Tensor], clusters: int, generator: torch.Generator) -> float:
    """Return the prediction strength: of pairs of points in one cluster, the share that the other half's k-means joins.

    Mean over clusters of both halves of the points (N, D), as Tibshirani and Walther (2005), who take the least.
    """
    partitions = [kmeans(points[half], clusters, generator, starts=STARTS) for half in halves]
    strengths = []
    for own, other, half in zip(partitions, partitions[::-1], halves, strict=True):
        named = nearest(points[half], other.centers)[0]
        counts = torch.zeros(clusters, clusters).index_put_(
            (own.assignment, named), torch.ones(len(half)), accumulate=True
        )
        sizes = counts.sum(dim=1)
        shares = (counts * (counts - 1)).sum(dim=1) / (sizes * (sizes - 1)).clamp_min(1)
        strengths.append(shares[sizes > 1])
    joined = torch.cat(strengths)
    return float(joined.mean()) if len(joined) else 0.0


def weigh(evidence: Tensor, candidates: Sequence[int], weights: Weights = WEIGHTS) -> Count:
    """Return the number with the most evidence (n, 4), and the smallest range that holds most of it."""
    shares = torch.softmax(evidence @ torch.tensor(weights[:4]), dim=0)
    order = shares.argsort(descending=True, stable=True)
    enough = int((shares[order].cumsum(dim=0) < weights.held).sum()) + 1
    kept = [candidates[place] for place in order[:enough].tolist()]
    number = candidates[int(order[0])]
    return Count(number, min(kept), max(kept), list(candidates), shares.tolist(), [number])
