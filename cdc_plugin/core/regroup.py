"""Improve a partition whose clusters may differ much in size: join two that hang together, cut one that falls apart.

K-means weighs a cluster by its images: it would sooner cut a large kind in two than keep two small ones apart. The
links between near neighbours weigh them alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cdc_plugin.core.agreement import nearest_neighbours
from cdc_plugin.core.kmeans import count_members, kmeans

NEIGHBOURS = 15
PARTS = (2, 3, 5)  # into which a cluster is cut on trial; each of them may leave it
LEAST_MEMBERS, LEAST_SHARE = 8, 0.005  # of a part that may become a cluster
LOOSE = 0.02  # share of links below which a part is as good as apart
GONE = 0.05  # bond of a cluster that has lost its images with all others: one that stands apart may take its place
LARGEST = 2.0  # equal shares that two clusters may have once they are joined, or all kinds that overlap would be one


@dataclass(frozen=True)
class Cut:
    """A part that may leave its cluster: its members (N,), and the share of its links that would be cut."""

    part: Tensor
    bond: float


def regroup(
    points: Tensor, assignment: Tensor, clusters: int, margin: float, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Return a better partition (N,) of points (N, D) into as many clusters, and how much better its first move is.

    A move joins the two clusters with the strongest bond and cuts the one that has the weakest inside. Moves are made
    while the first is more than ``margin`` times the second; without any, the assignment is returned as it is.

    >>> points = torch.cat([torch.eye(3)[kind].repeat(20, 1) for kind in range(3)]) + torch.rand(60, 3) / 9
    >>> kind = torch.arange(60) // 20
    >>> torch.equal(regroup(points, kind, 3, 2.0, torch.Generator().manual_seed(0))[0], kind)
    True
    """
    near = nearest_neighbours(points, NEIGHBOURS)
    least = max(LEAST_MEMBERS, round(LEAST_SHARE * len(points)))
    cuts: dict[int, Cut | None] = {}
    first = 0.0
    for move in range(clusters):
        bonds = measure_bonds(assignment, near, clusters)
        sizes = count_members(assignment, clusters)
        gone = sizes < least
        bonds += GONE * (gone[:, None] | gone)
        bonds *= sizes[:, None] + sizes <= LARGEST * len(points) / clusters
        bonds.fill_diagonal_(0)
        for cluster in range(clusters):
            if cluster not in cuts:
                cuts[cluster] = find_weakest(points, assignment == cluster, near, least, generator)
        weak, cut = min(((c, cut) for c, cut in cuts.items() if cut), key=lambda each: each[1].bond, default=(0, None))
        if cut is None or clusters < 3:
            break
        bonds[weak] = bonds[:, weak] = 0
        one, other = divmod(int(bonds.argmax()), clusters)
        gain = float(bonds[one, other]) / max(cut.bond, LOOSE)
        first = first if move else gain
        if gain <= margin:
            break
        assignment = torch.where(assignment == other, one, assignment)
        assignment = torch.where(cut.part, other, assignment)
        for changed in (one, other, weak):
            del cuts[changed]
    return assignment, first


def measure_bonds(assignment: Tensor, near: Tensor, clusters: int) -> Tensor:
    """Return (C, C) how strongly clusters hang together: of the links of the smaller one, those that lead to the other.

    >>> measure_bonds(torch.tensor([0, 0, 1, 1]), torch.tensor([[1], [0], [3], [1]]), 2)
    tensor([[0.0000, 0.3333],
            [0.3333, 0.0000]])
    """
    pairs = assignment.repeat_interleave(near.shape[1]) * clusters + assignment[near.flatten()]
    links = count_members(pairs, clusters**2).view(clusters, clusters).float()
    links = links + links.T
    volume = links.sum(dim=1).clamp_min(1)
    bonds = links / torch.minimum(volume[:, None], volume)
    return bonds.fill_diagonal_(0)


def find_weakest(points: Tensor, members: Tensor, near: Tensor, least: int, generator: torch.Generator) -> Cut | None:
    """Return the part of a cluster (N,) that hangs least together with the rest; None if one would be too small."""
    rows = members.nonzero().flatten()
    best = None
    for parts in PARTS if len(rows) >= 2 * least else ():
        found = kmeans(points[rows], parts, generator, starts=2).assignment
        for number in range(parts):
            part = torch.zeros_like(members).index_fill_(0, rows[found == number], True)
            rest = members & ~part
            if min(int(part.sum()), int(rest.sum())) < least:
                continue
            # 0 stands for all other clusters.
            bond = float(measure_bonds(part.long() + 2 * rest.long(), near, 3)[1, 2])
            if best is None or bond < best.bond:
                best = Cut(part, bond)
    return best
