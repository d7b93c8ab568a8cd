"""Which images a page shows: pure functions of predictions, which know neither pixels nor labels.

Clusters are numbered 0 to C - 1, ``confidence`` is that of an image's own cluster, and all orders are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Reals = NDArray[np.floating]

SURE = 0.995  # reads as 100 %: nothing to doubt
SECOND = 0.05  # probability of the second cluster from which an image can be borderline
TIE = 3  # confidences that agree to so many decimals are equally typical
PATIENCE = 8  # looks at so many candidates for every picture before near-duplicates are taken after all
SAME_PICTURE = 4.0  # mean difference of two fingerprints in grey levels; nearest strangers lie at 6 and more
PAIR_SHARE = 0.01  # of the images of both clusters


@dataclass(frozen=True)
class Examples:
    """Images that show what a cluster is, by index and best example first; none is in two lists."""

    typical: list[int]
    borderline: list[int]
    doubtful: list[int]


def choose_examples(
    cluster: Integers,
    confidence: Reals,
    second_confidence: Reals,
    clusters: int,
    count: int,
    *,
    distance: Reals | None = None,
    fingerprint: Callable[[int], Reals] | None = None,
) -> list[Examples]:
    """For every cluster, up to ``count`` images of each kind.

    Typical are those with the highest confidence; equal ones go by ``distance`` or, without, from all over the data.
    Borderline have the smallest margin before a second cluster of at least 5 %, doubtful the lowest confidence of
    those that do not read as 100 %. Of a small cluster the two take no more than two thirds, in turn.

    Args:
        cluster, confidence, second_confidence, distance: (N,) each.
        fingerprint: of an image, by index; typical images whose fingerprints agree are near-duplicates, and further
            ones are taken only where there is nothing else.
    """
    ties = spread(len(cluster)) if distance is None else distance
    typical = _by_cluster(np.lexsort((ties, -np.round(confidence, TIE), cluster)), cluster, clusters)
    by_margin, by_confidence = np.lexsort((confidence - second_confidence, cluster)), np.lexsort((confidence, cluster))
    borderline = _by_cluster(by_margin[second_confidence[by_margin] >= SECOND], cluster, clusters)
    doubtful = _by_cluster(by_confidence[confidence[by_confidence] < SURE], cluster, clusters)
    chosen = []
    for number in range(clusters):
        most = min(2 * count, 2 * len(typical[number]) // 3)
        between, lowest = take_turns([borderline[number], doubtful[number]], most, count)
        taken = {*between, *lowest}
        rest = (int(index) for index in typical[number] if index not in taken)
        chosen.append(Examples(_distinct(rest, count, fingerprint), between, lowest))
    return chosen


def confusion(cluster: Integers, probs: NDArray[np.float32]) -> NDArray[np.float64]:
    """(C, C) expected number of images of each cluster (row) that belong to each other one (column)."""
    clusters = probs.shape[1]
    rows = _by_cluster(np.argsort(cluster, kind="stable"), cluster, clusters)
    return np.stack([probs[members].sum(axis=0, dtype=np.float64) for members in rows])


def rank_pairs(expected: NDArray[np.float64], sizes: Integers, limit: int) -> list[tuple[int, int, float]]:
    """Pairs of clusters (first < second) and how many images are expected to be in the wrong one of the two.

    Most images first. A pair is left out below one image, and below 1 % of the images of both clusters: every
    softmax gives a little to every cluster.

    Args:
        expected: (C, C) of `confusion`.
        sizes: (C,) images in each cluster.
    """
    first, second = np.triu_indices(len(sizes), k=1)
    images = expected[first, second] + expected[second, first]
    shown = images >= np.maximum(1.0, PAIR_SHARE * (sizes[first] + sizes[second]))
    order = np.flatnonzero(shown)
    order = order[np.argsort(-images[order], kind="stable")][:limit]
    return [(int(first[i]), int(second[i]), float(images[i])) for i in order]


def spread_over_clusters(candidates: Integers, score: Reals, cluster: Integers) -> Integers:
    """Candidates by falling score, but the best of every cluster before the second best of any.

    Args:
        candidates: (M,) indices of images.
        score, cluster: (N,) of all images.
    """
    own = cluster[candidates]
    order = np.lexsort((-score[candidates], own))
    starts = np.searchsorted(own[order], own[order])  # where the run of the same cluster begins
    rank = np.arange(len(order)) - starts
    ordered = candidates[order]
    return ordered[np.lexsort((-score[ordered], rank))]


def take_turns(orders: Sequence[Iterable[int]], limit: int, each: int) -> list[list[int]]:
    """Every order in turn takes its next image that none has taken, until ``limit`` in all or ``each`` of one."""
    waiting: list[Iterator[int]] = [iter(order) for order in orders]
    chosen: list[list[int]] = [[] for _ in orders]
    taken: set[int] = set()
    open_orders = list(range(len(orders)))
    while open_orders and len(taken) < limit:
        for turn in list(open_orders):
            found = next((int(index) for index in waiting[turn] if int(index) not in taken), None)
            if found is not None and len(taken) < limit:
                chosen[turn].append(found)
                taken.add(found)
            if found is None or len(chosen[turn]) == each:
                open_orders.remove(turn)
    return chosen


def spread(count: int) -> Reals:
    """(count,) keys whose order jumps all over the data, so that equals do not all come from its beginning."""
    return np.arange(count) * 0.6180339887498949 % 1.0


def _by_cluster(order: Integers, cluster: Integers, clusters: int) -> list[Integers]:
    """Indices that are sorted by cluster, cut into one part a cluster."""
    return np.split(order, np.searchsorted(cluster[order], np.arange(1, clusters)))


def _distinct(candidates: Iterable[int], count: int, fingerprint: Callable[[int], Reals] | None) -> list[int]:
    """The first ``count`` candidates that do not look like one before; the first that do where these run out."""
    chosen: list[int] = []
    alike: list[int] = []
    seen: list[Reals] = []
    for looked_at, index in enumerate(candidates):
        if len(chosen) == count or looked_at >= PATIENCE * count:
            break
        if fingerprint is not None:
            look = fingerprint(index)
            if any(np.abs(look - other).mean() < SAME_PICTURE for other in seen):
                alike.append(index)
                continue
            seen.append(look)
        chosen.append(index)
    return chosen + alike[: count - len(chosen)]
