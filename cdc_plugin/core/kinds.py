"""Find kinds of images that a model has no cluster for, among images far from everything it was refined on.

Groups of images compete with the clusters for every image: an image belongs to a new kind if it is nearer to the
centre of that than to the centre of any cluster. Whether a single image lies beyond the limit of outliers matters
little: with few images and many features the limit is so wide that most images of a new kind lie within, and yet they
agree with each other. What decides is the group as a whole: its centre has to be about as far from every cluster as
clusters are from each other.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.core.random_streams import fork_rng

SAMPLE = 8192  # images that groups are looked for in, at most
SEEDS = 4096  # images that groups begin with, at most: all their distances are held
FAR = 0.25  # share of the images that groups begin with, the farthest; more where more are outliers
LEAST = 10  # images of a group
MOST = 8  # groups
DIRECTIONS = 48  # in which the images spread most; the others hide groups in noise
TOLERANCE = 0.04  # of the silhouette, within which fewer groups are as good
CLOSER = 0.92  # of the distance to the nearest cluster
SEPARATION = 0.7  # of the distance between neighbouring clusters


@dataclass(frozen=True)
class Kinds:
    """Centres of new kinds beside those of the clusters, in a few directions of whitened features."""

    directions: Tensor  # (D, d), from features of unit length
    clusters: Tensor  # (C', d)
    centers: Tensor  # (K, d), of the largest kind first

    def assign(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kind (N,) of features (N, D), -1 for images of a cluster, and the distance to its centre."""
        if len(self.centers) == 0:
            return torch.full((len(features),), -1), torch.zeros(len(features))
        return compete(F.normalize(features.float(), dim=1) @ self.directions, self.clusters, self.centers)


def find_kinds(
    features: Tensor, prototypes: Prototypes, generator: torch.Generator, wanted: int | None = None
) -> Kinds:
    """Return the kinds among images with these features (N, D), N at most `SAMPLE`, that have no cluster.

    Without ``wanted`` as many as there are good reasons for, which may be none; else exactly so many.
    """
    unit = F.normalize(features.detach().cpu().float(), dim=1)
    whitening, centers = prototypes.whitening.cpu(), prototypes.centers.cpu()
    whitened = unit @ whitening
    count = min(max(DIRECTIONS, 2 * len(centers)), *whitened.shape)
    with fork_rng(generator, torch.device("cpu")):
        basis = torch.pca_lowrank(whitened, q=count)[2]
    rows, clusters = whitened @ basis, centers @ basis
    nearest = torch.cdist(rows, clusters).min(dim=1).values
    outliers = int((prototypes.distance(unit) > prototypes.limit).sum())
    order = nearest.argsort(descending=True)[: max(int(FAR * len(rows)), outliers)]
    seeds = rows[order[torch.linspace(0, len(order) - 1, min(len(order), SEEDS)).long()]]
    found = rows[:0]
    if wanted is None and len(seeds) >= LEAST:
        found = _separate(rows, clusters, split_seeds(seeds, generator))
    elif wanted is not None:
        for groups in range(wanted, MOST + 1):  # some of the groups may be the fringe of a cluster
            starts = kmeans(seeds, groups, generator, starts=5).centers
            found = _separate(rows, clusters, starts)[:wanted]
            if len(found) == wanted:
                break
        else:
            found = kmeans(seeds, wanted, generator, starts=5).centers
    return Kinds(whitening @ basis, clusters, found)


def split_seeds(seeds: Tensor, generator: torch.Generator) -> Tensor:
    """Return the centres (K, d) of the fewest groups that are about as distinct as groups can be."""
    partitions = [kmeans(seeds, count, generator, starts=5) for count in range(2, min(MOST, len(seeds) // 3) + 1)]
    distances = torch.cdist(seeds, seeds)
    scores = [measure_silhouette(distances, partition.assignment) for partition in partitions]
    chosen = next(number for number, score in enumerate(scores) if score >= max(scores) - TOLERANCE)
    return partitions[chosen].centers


def measure_silhouette(distances: Tensor, assignment: Tensor) -> float:
    """Return the mean silhouette, -1 to 1, of an assignment (N,) by the distances of all pairs (N, N).

    >>> points = torch.tensor([[0.0], [1.0], [9.0], [10.0]])
    >>> round(measure_silhouette(torch.cdist(points, points), torch.tensor([0, 0, 1, 1])), 2)
    0.89
    """
    members = F.one_hot(assignment).to(distances)
    sizes = members.sum(dim=0)
    sums = distances @ members
    own = sums.gather(1, assignment[:, None])[:, 0] / (sizes[assignment] - 1).clamp_min(1)
    others = (sums / sizes.clamp_min(1)).masked_fill(members.bool() | (sizes == 0), torch.inf).min(dim=1).values
    # By convention 0 for the only point of a group, and where all points are in one.
    alone = (sizes[assignment] < 2) | others.isinf()
    return float(((others - own) / torch.maximum(own, others).clamp_min(1e-12)).masked_fill(alone, 0).mean())


def compete(rows: Tensor, clusters: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of the new centres (K, d) each row (N, d) is nearest to, -1 for a cluster (C, d), and how near."""
    distance, kind = torch.cdist(rows, centers).min(dim=1)
    return torch.where(distance < torch.cdist(rows, clusters).min(dim=1).values, kind, -1), distance


def _separate(rows: Tensor, clusters: Tensor, centers: Tensor, iterations: int = 10) -> Tensor:
    """Move the centres to the images that they win, and return those of groups apart from every cluster."""
    for _ in range(iterations):
        kind, _ = compete(rows, clusters, centers)
        moved = [rows[kind == k].mean(dim=0) if (kind == k).any() else center for k, center in enumerate(centers)]
        centers = torch.stack(moved)
    kind, distance = compete(rows, clusters, centers)
    nearest = torch.cdist(rows, clusters).min(dim=1).values
    sizes = torch.bincount(kind[kind >= 0], minlength=len(centers))
    apart = torch.cdist(clusters, clusters).fill_diagonal_(torch.inf).min(dim=1).values
    usual = apart[apart.isfinite()].median() if len(apart) > 1 else torch.tensor(0.0)
    kept = []
    for k in sizes.argsort(descending=True).tolist():
        if sizes[k] >= LEAST:
            # The mean of few images lies apart by their noise alone.
            noise = distance[kind == k].square().mean() / sizes[k]
            separation = (torch.cdist(centers[k : k + 1], clusters).min().square() - noise).clamp_min(0).sqrt()
            # A centre is drawn to its own images: without each of them it would lie farther from it.
            closer = (distance[kind == k] * sizes[k] / (sizes[k] - 1) / nearest[kind == k].clamp_min(1e-12)).mean()
            if separation >= SEPARATION * usual and closer <= CLOSER:
                kept.append(k)
    return centers[kept]
