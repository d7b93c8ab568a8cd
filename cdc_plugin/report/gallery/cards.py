"""What a page shows of the images: each cluster by examples, clusters that are confused, images to look at first.

Labels decide nothing here: they name clusters and say how many images are right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.metrics import correct_samples, match_clusters
from cdc_plugin.report.gallery.choose import (
    SURE,
    Examples,
    Integers,
    Reals,
    choose_examples,
    confusion,
    rank_pairs,
    spread_over_clusters,
    take_turns,
)
from cdc_plugin.report.gallery.thumbnails import (
    BUDGET,
    LEAST_BYTES,
    Thumbnail,
    fingerprint,
    make_thumbnails,
    size_within,
)
from cdc_plugin.report.page_data import PageData
from cdc_plugin.report.words import percent

CARDS_SHARE, PAIRS_SHARE, LOOK_SHARE = 0.76, 0.12, 0.12  # of the bytes of all pictures
PICTURES = 1200  # on the cards of all clusters together, before every cluster has few
FEW, MANY = 4, 12  # pictures of one kind on a card
EXAMPLES = 4  # pictures from each side of a pair
UNSURE = 0.8  # confidence below which an image may repay a look
TORN = 0.25  # probability of a second cluster that tears an image between two
NOTHING = Examples([], [], [])
DROP = 0.2  # by which the calibrated confidence falls below that of the clustering head


@dataclass(frozen=True)
class ClusterCard:
    """One cluster: its mean confidence (0 if empty), the class it stands for where labels exist, and its pictures."""

    number: int
    size: int
    confidence: float
    class_name: str | None
    accuracy: float | None
    typical: list[Thumbnail]
    borderline: list[Thumbnail]
    doubtful: list[Thumbnail]


@dataclass(frozen=True)
class ConfusedPair:
    """Two clusters, how many images of the two are expected in the wrong one, and those likeliest to be."""

    first: int
    second: int
    images: float
    examples: list[Thumbnail]


@dataclass(frozen=True)
class Reason:
    """A reason to look at images: which, the more pressing the higher their score, and what to say of one."""

    candidates: Integers
    score: Reals
    say: Callable[[int], str]


def cluster_cards(findings: PageData, budget: int = BUDGET) -> list[ClusterCard]:
    """One card a cluster, in order of number; an empty cluster has no pictures.

    Args:
        budget: bytes of all pictures of the page, of which the cards take about three quarters. Where there are more
            clusters than that has room for, the largest have pictures.
    """
    table, clusters = findings.table, findings.probs.shape[1]
    cluster, confidence = table["cluster"], table["confidence"]
    second, second_confidence = table["second_cluster"], _second_confidence(findings)
    sizes = np.bincount(cluster, minlength=clusters)
    share = int(CARDS_SHARE * budget)
    count = pictures_of_a_kind(int((sizes > 0).sum()), share)
    chosen = choose_examples(
        cluster,
        confidence,
        second_confidence,
        clusters,
        count,
        distance=_column(findings, "distance"),
        fingerprint=lambda index: fingerprint(np.asarray(findings.images.images[index])),
    )
    largest = np.argsort(-sizes, kind="stable")[: share // (3 * count * LEAST_BYTES)]
    size = size_within(share, 3 * count * int((sizes[largest] > 0).sum()))

    def own(index: int) -> str:
        return _chance(confidence[index])

    def both(index: int) -> str:
        return f"{own(index)} here, {_chance(second_confidence[index])} cluster {second[index]}"

    def show(indices: list[int], say: Callable[[int], str]) -> list[Thumbnail]:
        return make_thumbnails(findings.images, indices, [say(index) for index in indices], size)

    names, accuracies = class_of_clusters(findings)
    means = np.bincount(cluster, weights=confidence, minlength=clusters) / np.maximum(sizes, 1)
    illustrated = set(largest.tolist())
    cards = []
    for number in range(clusters):
        examples = chosen[number] if number in illustrated else NOTHING
        cards.append(
            ClusterCard(
                number,
                int(sizes[number]),
                float(means[number]),
                names[number],
                accuracies[number],
                show(examples.typical, own),
                show(examples.borderline, both),
                show(examples.doubtful, own),
            )
        )
    return cards


def confused_pairs(findings: PageData, limit: int = 12, budget: int = BUDGET) -> list[ConfusedPair]:
    """Pairs of clusters by the number of images expected in the wrong one of the two, most first.

    That number is the sum of p(b) over the images of cluster a, plus that of p(a) over those of b. Pairs below one
    image or below 1 % of the images of both clusters are left out.
    """
    cluster, probs = findings.table["cluster"], findings.probs
    sizes = np.bincount(cluster, minlength=probs.shape[1])
    pairs = rank_pairs(confusion(cluster, probs), sizes, limit)
    size = size_within(int(PAIRS_SHARE * budget), 2 * EXAMPLES * len(pairs))
    found = []
    for first, second, images in pairs:
        examples: list[int] = []
        for own, other in ((first, second), (second, first)):
            members = np.flatnonzero(cluster == own)
            likeliest = np.argsort(-probs[members, other], kind="stable")[:EXAMPLES]
            examples += members[likeliest].tolist()
        captions = [
            f"{_chance(probs[i, first])} cluster {first}, {_chance(probs[i, second])} cluster {second}"
            for i in examples
        ]
        found.append(ConfusedPair(first, second, images, make_thumbnails(findings.images, examples, captions, size)))
    return found


def look_first(findings: PageData, limit: int = 48, budget: int = BUDGET) -> list[tuple[Thumbnail, str]]:
    """Images that repay a look, and why: reasons in turn, clusters in turn within a reason, no image twice."""
    reasons = reasons_to_look(findings)
    cluster = findings.table["cluster"]
    orders = [spread_over_clusters(reason.candidates, reason.score, cluster) for reason in reasons]
    chosen = take_turns(orders, limit, limit)
    why = {index: reason.say(index) for reason, indices in zip(reasons, chosen, strict=True) for index in indices}
    turns = sorted((turn, kind, index) for kind, indices in enumerate(chosen) for turn, index in enumerate(indices))
    shown = [index for _, _, index in turns]
    size = size_within(int(LOOK_SHARE * budget), len(shown))
    captions = [f"cluster {cluster[index]}, {_chance(findings.table['confidence'][index])}" for index in shown]
    thumbnails = make_thumbnails(findings.images, shown, captions, size)
    return [(thumbnail, why[index]) for thumbnail, index in zip(thumbnails, shown, strict=True)]


def reasons_to_look(findings: PageData) -> list[Reason]:
    """Four reasons: outliers, images torn between two clusters, those that calibration doubts, and the least sure."""
    table = findings.table
    cluster, confidence = table["cluster"], table["confidence"]
    second, second_confidence = table["second_cluster"], _second_confidence(findings)
    before = table["clustering_confidence"]
    drop = before - confidence
    outlier, distance = _column(findings, "outlier"), _column(findings, "distance")
    outside = np.zeros(len(table), dtype=bool) if outlier is None else outlier.astype(bool)
    return [
        Reason(
            np.flatnonzero(outside),
            np.zeros(len(table)) if distance is None else distance,
            lambda index: "far from what is typical of any cluster",
        ),
        Reason(
            np.flatnonzero(second_confidence >= TORN),
            second_confidence - confidence,
            lambda index: (
                f"torn between cluster {cluster[index]} ({_chance(confidence[index])}) "
                f"and cluster {second[index]} ({_chance(second_confidence[index])})"
            ),
        ),
        Reason(
            np.flatnonzero(drop >= DROP),
            drop,
            lambda index: (
                f"the clustering head is {_chance(before[index])} sure, "
                f"after calibration {_chance(confidence[index])} remain"
            ),
        ),
        Reason(
            np.flatnonzero(confidence < UNSURE),
            -confidence,
            lambda index: (
                f"among the least sure of cluster {cluster[index]}; "
                f"cluster {second[index]} comes next with {_chance(second_confidence[index])}"
            ),
        ),
    ]


def class_of_clusters(findings: PageData) -> tuple[list[str | None], list[float | None]]:
    """For every cluster the name of the class that it stands for, and the share of its images that are of it.

    None without labels, and for a cluster that is empty or is left without a class.
    """
    clusters, labels, known = findings.probs.shape[1], findings.images.labels, findings.images.class_names or []
    if labels is None:
        return [None] * clusters, [None] * clusters
    cluster = findings.table["cluster"]
    sizes = np.bincount(cluster, minlength=clusters)
    right = np.bincount(cluster, weights=correct_samples(cluster, labels, clusters), minlength=clusters)
    names: list[str | None] = []
    accuracies: list[float | None] = []
    for label, size, correct in zip(match_clusters(cluster, labels, clusters), sizes, right, strict=True):
        matched = size > 0 and (label >= 0 or correct > 0)
        names.append((known[label] if 0 <= label < len(known) else f"class {label}") if matched else None)
        accuracies.append(float(correct / size) if matched else None)
    return names, accuracies


def pictures_of_a_kind(clusters: int, budget: int) -> int:
    """How many typical images a card shows (and as many borderline and doubtful ones): 12 down to 1."""
    kinds = 3 * max(clusters, 1)
    affordable = budget // (kinds * LEAST_BYTES)
    return max(min(MANY, max(PICTURES // kinds, FEW), affordable), 1)


def _column(findings: PageData, name: str) -> NDArray[Any] | None:
    return findings.table[name] if name in (findings.table.dtype.names or ()) else None


def _second_confidence(findings: PageData) -> Reals:
    return findings.probs[np.arange(len(findings.table)), findings.table["second_cluster"]]


def _chance(probability: float) -> str:
    """A probability in whole per cent that reads as 100 % or 0 % only where it is."""
    if SURE <= probability < 1:
        return f"over {percent(0.99, 0)}"
    if 0 < probability < 1 - SURE:
        return f"under {percent(0.01, 0)}"
    return percent(float(probability), 0)
