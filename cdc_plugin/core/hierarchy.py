"""Order the clusters of a model from fine to coarse, so that one run has an answer at every number of clusters.

Clusters are joined by average linkage. Two of them are near when the calibrated probabilities overlap, that is when
the model itself takes images of the one for images of the other, and when the mean features of their images point in
the same direction. Overlap alone says nothing of clusters that are never confused, which are most pairs of a good
model; features alone know nothing of what the heads have learned. Average linkage neither chains, as single linkage
does along a row of overlapping clusters, nor prefers small groups, as complete linkage does, and its distances never
fall from one merge to the next.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdc_plugin.core.prototypes import standardize_rows
from cdc_plugin.errors import CheckpointError, ConfigError, option


@dataclass(frozen=True)
class Hierarchy:
    """How C clusters merge into one: C - 1 merges in order, the nearest groups first.

    A group bears the number of its smallest cluster, so a merge is a pair (kept, absorbed) with kept < absorbed.
    """

    merges: tuple[tuple[int, int], ...]
    distances: tuple[float, ...]  # of the groups that merge, rising

    @property
    def clusters(self) -> int:
        return len(self.merges) + 1

    def groups(self, level: int) -> NDArray[np.int64]:
        """Return the group (C,) of every cluster at a level of so many groups.

        Groups have the numbers 0 to level - 1 in the order of their smallest clusters: at level C every cluster has
        its own number.

        >>> Hierarchy(((1, 3), (0, 1), (0, 2)), (0.1, 0.4, 0.9)).groups(3).tolist()
        [0, 1, 2, 1]
        """
        if not 1 <= level <= self.clusters:
            raise ConfigError(
                f"{option('level', level)}: the model has {self.clusters} clusters; take 1 to {self.clusters}"
            )
        smallest = np.arange(self.clusters)
        for kept, absorbed in self.merges[: self.clusters - level]:
            smallest[smallest == absorbed] = kept
        return np.unique(smallest, return_inverse=True)[1].reshape(-1)

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"merges": [list(pair) for pair in self.merges], "distances": [round(d, 6) for d in self.distances]}


def sum_groups(probabilities: NDArray[np.float32], groups: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the probability (N, L) of every group: the sum over its clusters, (N, C).

    >>> sum_groups(np.array([[0.5, 0.25, 0.25]], np.float32), np.array([0, 1, 0])).tolist()
    [[0.75, 0.25]]
    """
    return (probabilities @ np.eye(int(groups.max()) + 1, dtype=np.float32)[groups]).clip(max=1)


def build_hierarchy(features: Tensor, probabilities: Tensor) -> Hierarchy:
    """Return the order in which clusters merge, from features (N, D) and calibrated probabilities (N, C) of images."""
    from scipy.cluster.hierarchy import linkage  # half a second of import
    from scipy.spatial.distance import squareform

    clusters = probabilities.shape[1]
    if clusters == 1:
        return Hierarchy((), ())
    distances = measure_distances(features, probabilities)
    steps = linkage(squareform(distances.numpy(), checks=False), method="average")
    smallest, merges = list(range(clusters)), []  # of every group so far, by scipy's number of it
    for first, second, *_ in steps:
        pair = sorted((smallest[int(first)], smallest[int(second)]))
        smallest.append(pair[0])
        merges.append((pair[0], pair[1]))
    return Hierarchy(tuple(merges), tuple(float(step[2]) for step in steps))


def measure_distances(features: Tensor, probabilities: Tensor) -> Tensor:
    """Return how far clusters are apart (C, C), from 0 to 1: the mean of both distances, the features' from 0 to 1.

    The overlap of two clusters is the cosine between their columns of probabilities. Prototypes are means weighted by
    the probabilities, so that a cluster without images has one as well.
    """
    probabilities = probabilities.detach().cpu().double()
    columns = torch.nn.functional.normalize(probabilities, dim=0, eps=1e-12)
    overlap = columns.T @ columns
    rows = standardize_rows(features.detach().cpu()).double()
    weights = probabilities / probabilities.sum(dim=0).clamp_min(1e-12)
    prototypes = weights.T @ rows
    prototypes = torch.nn.functional.normalize(prototypes - rows.mean(dim=0), dim=1, eps=1e-12)
    apart = (1 - prototypes @ prototypes.T) / 2
    distances = ((1 - overlap) + apart / apart.max().clamp_min(1e-12)) / 2
    distances = ((distances + distances.T) / 2).clamp(0, 1)
    return distances.fill_diagonal_(0)


def read_hierarchy(record: Any, clusters: int, source: str) -> Hierarchy | None:
    """Return the hierarchy that a file states for so many clusters, None where it states none; refuse any other."""
    if record is None:
        return None
    try:
        merges = tuple((kept, absorbed) for kept, absorbed in record["merges"])
        distances = tuple(float(distance) for distance in record["distances"])
        alive = set(range(clusters))
        for kept, absorbed in merges:
            whole = type(kept) is int and type(absorbed) is int
            if not (whole and kept < absorbed and {kept, absorbed} <= alive):
                raise ValueError
            alive.remove(absorbed)
        rising = all(0 <= low <= high <= 1 for low, high in zip((0.0, *distances), distances, strict=False))
        if len(alive) == 1 and len(distances) == len(merges) and rising:
            return Hierarchy(merges, distances)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        pass
    raise CheckpointError(
        f"{source} states a hierarchy that does not fit its {clusters} clusters; was it edited by hand?"
    )
