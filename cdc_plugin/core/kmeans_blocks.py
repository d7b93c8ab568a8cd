"""K-means on points that come in blocks and need not fit into memory, nor lie on one machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from cdc_plugin.core.kmeans import nearest

Blocks = Callable[[], Iterable[Tensor]]


def lloyd_blocks(
    blocks: Blocks,
    centers: Tensor,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
    iterations: int = 20,
    tolerance: float = 1e-4,
) -> Tensor:
    """Lloyd's iterations over blocks (n, D) of points, from given centres (K, D); returns the centres.

    As `core.kmeans.lloyd`: clusters without points keep their centre, and centres that move less than ``tolerance``
    of the variance are done.

    Args:
        blocks: gives all points anew at every call.
        total: sums a tensor over all processes, each of which has blocks of its own.
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
