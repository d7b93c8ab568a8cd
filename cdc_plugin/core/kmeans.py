"""K-means by Lloyd's iterations from a greedy k-means++ start (Secs. 3.1 and 3.3 use it on features).

Plain matrix products, so that the same lines run on any device. The k-means++ start is greedy as in
scikit-learn: of a few random candidates the one that lowers the inertia most becomes the next centre.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cdc_plugin.core.random_streams import send

_BLOCK = 1 << 24  # distances that are computed at a time at most, to bound memory (64 MB in float32)
_PAIRS = 1 << 26  # distances of all pairs of points that are held at most (256 MB: 8,192 points)

LOOK_EVERY = 10  # iterations between two looks at whether centres still move, for which the host waits for a device

Blocks = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class Partition:
    """A partition of N points: centres (K, D), the centre of every point (N,), sum of squared distances."""

    centers: Tensor
    assignment: Tensor
    inertia: float


def kmeans(
    points: Tensor, clusters: int, generator: torch.Generator, *, starts: int = 1, iterations: int = 100
) -> Partition:
    """Return the best of ``starts`` runs of Lloyd's algorithm, each from its own k-means++ centres.

    >>> points = torch.tensor([[0.0], [1.0], [9.0], [10.0]])
    >>> sorted(kmeans(points, 2, torch.Generator().manual_seed(0)).centers.flatten().tolist())
    [0.5, 9.5]

    With as many clusters as points (N, D), or more, every point is its own cluster. Clusters that lose all their points
    keep their centre, so nothing here divides by zero. The generator is on the CPU: the start depends on nothing else.
    """
    count = len(points)
    if clusters < 1 or count < 1:
        raise ValueError(f"k-means needs at least one cluster and one point, found {clusters} and {count}")
    points = points.detach().float()
    if clusters >= count:
        padding = points[-1:].expand(clusters - count, -1)
        return Partition(torch.cat([points, padding]), torch.arange(count, device=points.device), 0.0)
    # Distances do not change when all points move together, but float32 products lose fewer digits at 0.
    shift = points.mean(dim=0, keepdim=True)
    centred = points - shift
    runs = (lloyd(centred, seed_centers(centred, clusters, generator), iterations) for _ in range(starts))
    best = min(runs, key=lambda run: run.inertia)
    return Partition(best.centers + shift, best.assignment, best.inertia)


def lloyd(points: Tensor, centers: Tensor, iterations: int = 100, tolerance: float = 1e-4) -> Partition:
    """Iterate from these centres until they move less than ``tolerance`` of the variance.

    Where the host would have to wait for a device, iterations go on for a while with centres that no longer move.
    """
    small = tolerance * points.var(dim=0, unbiased=False).mean()
    look_every = 1 if points.device.type == "cpu" else LOOK_EVERY
    stopped = torch.zeros((), dtype=torch.bool, device=points.device)
    assignment, distance = nearest(points, centers)
    for iteration in range(1, iterations + 1):
        sizes = count_members(assignment, len(centers)).to(points.dtype).unsqueeze(1)
        sums = torch.zeros_like(centers).index_add_(0, assignment, points)
        moved = torch.where((sizes > 0) & ~stopped, sums / sizes.clamp(min=1), centers)
        shift = (moved - centers).square().sum()
        centers, previous = moved, assignment
        assignment, distance = nearest(points, centers)
        stopped = stopped | (shift <= small) | (assignment == previous).all()
        if iteration % look_every == 0 and stopped:
            break
    return Partition(centers, assignment, distance.sum().item())


def compare_basins(points: Tensor, assignment: Tensor, generator: torch.Generator, starts: int = 20) -> float:
    """Return the inertia that Lloyd's iterations from an assignment (N,) end with, over that of free k-means.

    Above 1 the points (N, D) have a better partition than the one that the assignment belongs to. Both have as many
    clusters as the assignment uses: an empty one would count as worse whatever the others are.

    >>> points = torch.tensor([[0.0], [1.0], [9.0], [10.0], [20.0], [21.0]])
    >>> right, merged = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 2, 2, 2])
    >>> [round(compare_basins(points, each, torch.Generator().manual_seed(0)), 2) for each in (right, merged)]
    [1.0, 81.33]
    """
    used, place = assignment.unique(return_inverse=True)
    free = kmeans(points, len(used), generator, starts=starts)
    centred = points.float() - points.float().mean(dim=0, keepdim=True)
    sums = torch.zeros(len(used), points.shape[1], device=points.device).index_add_(0, place, centred)
    own = lloyd(centred, sums / count_members(place, len(used)).unsqueeze(1))
    return own.inertia / free.inertia if free.inertia > 0 else 1.0


def lloyd_blocks(
    blocks: Blocks,
    centers: Tensor,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
    iterations: int = 20,
    tolerance: float = 1e-4,
) -> Tensor:
    """Iterate as `lloyd` over blocks (n, D) of points that need not fit into memory, and return the centres (K, D).

    ``blocks`` returns all points at every call; ``total`` sums a tensor in place over all processes, each of which has
    its own blocks.
    """
    clusters, width = centers.shape
    for _ in range(iterations):
        # Sizes, sum of the squares and sum of the points themselves travel together.
        sums = torch.zeros(clusters, width + 2, dtype=torch.float64)
        for block in blocks():
            assignment, _ = nearest(block, centers.to(block.device))
            points = block.cpu().double()
            extended = torch.cat([points, torch.ones(len(points), 1), points.square().sum(dim=1)[:, None]], dim=1)
            sums.index_add_(0, assignment.cpu(), extended)
        total(sums)
        sizes, count = sums[:, width : width + 1], sums[:, width].sum()
        moved = torch.where(sizes > 0, sums[:, :width] / sizes.clamp(min=1), centers.cpu().double())
        mean = sums[:, :width].sum(dim=0) / count
        variance = (sums[:, width + 1].sum() / count - mean.square().sum()) / width
        shift = (moved - centers.cpu().double()).square().sum()
        centers = moved.to(centers)
        if shift <= tolerance * variance:
            break
    return centers


def nearest(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index (N,) of the nearest of the (K, D) centres and the squared distance (N,) to it."""
    half_norms = centers.square().sum(dim=1) / 2
    rows = max(1, _BLOCK // len(centers))
    best = [torch.addmm(half_norms, part, centers.T, alpha=-1).min(dim=1) for part in points.split(rows)]
    index = torch.cat([b.indices for b in best])
    score = torch.cat([b.values for b in best])
    return index, (points.square().sum(dim=1) + 2 * score).clamp(min=0)


def count_members(assignment: Tensor, clusters: int, mask: Tensor | None = None) -> Tensor:
    """Return how many of (N,) samples, or of those in a mask (N,), each cluster has; no device is waited for.

    Added up in 32 bits: torch before 2.9 adds no wider integers on MPS.

    >>> count_members(torch.tensor([0, 2, 2]), 3)
    tensor([1, 0, 2])
    """
    if assignment.device.type == "cpu" and mask is None:
        return torch.bincount(assignment, minlength=clusters)
    counts = torch.zeros(clusters, dtype=torch.int, device=assignment.device)
    members = torch.ones_like(assignment, dtype=torch.int) if mask is None else mask.int()
    return counts.index_add_(0, assignment, members).long()


def seed_centers(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Draw (K, D) centres among the points by greedy k-means++, in large sets among a random sample.

    A sample of 8 K points keeps the inertia within a few thousandths at a fraction of the work.
    """
    limit = max(8 * clusters, 2048)
    if len(points) > limit:
        chosen = torch.randperm(len(points), generator=generator)[:limit]
        points = points[send(chosen, points.device)]
    count = len(points)
    candidates = 2 + int(math.log(clusters))
    # All draws are made before the loop, on the CPU: one per candidate, and one for the first centre.
    draws = torch.rand(clusters, candidates, generator=generator)
    first = int(draws[0, 0] * count)
    draws = send(draws, points.device)
    norms = points.square().sum(dim=1)
    # With more candidates than points it is cheaper to compute all distances between points beforehand.
    cheaper = clusters * candidates > count and count * count <= _PAIRS
    all_distances = _distances(points, points, norms, norms) if cheaper else None

    chosen = torch.empty(clusters, dtype=torch.long, device=points.device)
    chosen[0] = first
    closest = _distances(points[first : first + 1], points, norms[first : first + 1], norms)[0]
    for step in range(1, clusters):
        mass = closest.cumsum(dim=0)
        # Points at distance 0 have no mass; where all have none (constant features) any point will do.
        tries = torch.searchsorted(mass, draws[step] * mass[-1], right=True).clamp_(max=count - 1)
        if all_distances is None:
            distance = _distances(points[tries], points, norms[tries], norms)
        else:
            distance = all_distances[tries]
        improved = torch.minimum(distance, closest)
        best = improved.sum(dim=1).argmin().view(1)  # by index_select below, which no host has to wait for
        chosen[step : step + 1] = tries.index_select(0, best)
        closest = improved.index_select(0, best)[0]
    return points[chosen]


def _distances(left: Tensor, right: Tensor, left_norms: Tensor, right_norms: Tensor) -> Tensor:
    squared = torch.addmm(right_norms, left, right.T, alpha=-2).add_(left_norms.unsqueeze(1))
    return squared.clamp_(min=0)
