"""Choose and encode the pictures of a page: examples of each cluster, confused clusters, images to look at first.

Which images are shown is a pure function of the predictions, never of labels, and all orders are deterministic.
Pictures are inside the page itself, as data URIs, within a number of bytes that is fixed beforehand.
"""

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdc_plugin.data.images import ImageSet
from cdc_plugin.report.page_data import ClusterFigures, PageData
from cdc_plugin.report.words import count, percent, shorten

Integers = NDArray[np.int64]
Reals = NDArray[np.floating]
# A reason to look at images: which, scores of all (the higher, the more pressing), and what to say of one.
Reason = tuple[Integers, Reals, Callable[[int], str]]

SURE = 0.995  # reads as 100 %: nothing to doubt
LEAST_SECOND = 0.05  # probability of the second cluster from which an image can be borderline
TIE = 3  # confidences that agree to so many decimals are equally typical
PATIENCE = 8  # looks at so many candidates for every picture before near-duplicates are taken after all
SAME_PICTURE = 4.0  # mean difference of two fingerprints in grey levels; nearest strangers lie at 6 and more
PAIR_SHARE = 0.01  # of the images of both clusters

CARDS_SHARE, PAIRS_SHARE, LOOK_SHARE, CHANGES_SHARE = 0.75, 0.12, 0.11, 0.02  # of the bytes of all pictures
PICTURES = 1200  # on the cards of all clusters together, before every cluster has few
FEW, MANY = 4, 12  # pictures of one kind on a card
EXAMPLES = 4  # pictures from each side of a pair
UNSURE = 0.8  # confidence below which an image may repay a look
TORN = 0.25  # probability of a second cluster that tears an image between two
DROP = 0.2  # by which the calibrated confidence falls below that of the clustering head

BUDGET = 4_500_000  # bytes of all pictures of a page; a third more as base64, so that a page stays below 8 MB
LEAST_BYTES = 900  # below this a thumbnail of a photograph shows nothing
LARGEST_SIDE, SMALLEST_SIDE = 96, 32
QUALITIES = (85, 70, 50, 30)
HEADER_BYTES, BYTES_PER_PIXEL = 350, 0.37  # of photographs as JPEG of the first quality
FINGERPRINT_SIDE = 8
GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True)
class Thumbnail:
    """A small picture: ``uri`` is its content if there is one, ``name`` that of the image, ``caption`` stands below."""

    uri: str
    name: str
    caption: str


@dataclass(frozen=True)
class ThumbnailSize:
    """Longer side in pixels, and the bytes that one picture may take."""

    side: int
    most_bytes: int


@dataclass(frozen=True)
class Examples:
    """Images that show what a cluster is, by index and best example first; none is in two lists."""

    typical: list[int]
    borderline: list[int]
    doubtful: list[int]


@dataclass(frozen=True)
class ClusterCard:
    """One cluster in words, with the class it stands for if labels exist, and its pictures."""

    number: int
    size: str
    confidence: str
    class_name: str | None
    accuracy: str | None
    typical: list[Thumbnail]
    borderline: list[Thumbnail]
    doubtful: list[Thumbnail]


@dataclass(frozen=True)
class ConfusedPair:
    """Two clusters, how many images of the two are expected in the wrong one, and those likeliest to be."""

    first: int
    second: int
    images: str
    examples: list[Thumbnail]


def cluster_cards(page: PageData, clusters: Sequence[ClusterFigures], budget: int = BUDGET) -> list[ClusterCard]:
    """Return a card for every cluster with images, in order of number; of too many clusters for the largest."""
    table = page.table
    confidence, second, second_confidence = table["confidence"], table["second_cluster"], table["second_confidence"]
    share = int(CARDS_SHARE * budget)
    filled = [number for number, cluster in enumerate(clusters) if cluster.size]
    each = pictures_per_kind(len(filled), share)
    chosen = choose_examples(table, len(clusters), each, lambda index: fingerprint(page.images.picture(index)))
    largest = sorted(filled, key=lambda number: -clusters[number].size)[: share // (3 * each * LEAST_BYTES)]
    size = size_within(share, 3 * each * len(largest))

    def say_own(index: int) -> str:
        return _chance(confidence[index])

    def say_both(index: int) -> str:
        return f"{say_own(index)} here, {_chance(second_confidence[index])} cluster {second[index]}"

    def show(indices: list[int], say: Callable[[int], str]) -> list[Thumbnail]:
        return make_thumbnails(page.images, indices, [say(index) for index in indices], size)

    return [
        ClusterCard(
            number,
            count(clusters[number].size, "image"),
            percent(clusters[number].confidence),
            None if (name := clusters[number].class_name) is None else shorten(name, 80),
            None if (accuracy := clusters[number].accuracy) is None else percent(accuracy),
            show(chosen[number].typical, say_own),
            show(chosen[number].borderline, say_both),
            show(chosen[number].doubtful, say_own),
        )
        for number in sorted(largest)
    ]


def show_changes(page: PageData, budget: int = BUDGET) -> list[tuple[str, list[list[Thumbnail]]]]:
    """Return what would be merged and split next, each as a sentence and examples of both sides."""
    words = {
        "merge": "One cluster fewer would put {} together: no other two are so hard to tell apart.",
        "split": "One cluster more would cut {} into these two: no other cluster is so clearly two.",
    }
    changes = [(words[kind], change) for kind, change in page.next_changes.items() if change]
    size = size_within(int(CHANGES_SHARE * budget), sum(len(side) for _, c in changes for side in c["examples"]))
    return [
        (
            sentence.format(" and ".join(map(str, change["clusters"]))),
            [make_thumbnails(page.images, side, [""] * len(side), size) for side in change["examples"]],
        )
        for sentence, change in changes
    ]


def confused_pairs(page: PageData, limit: int = 12, budget: int = BUDGET) -> list[ConfusedPair]:
    """Return pairs of clusters with many images that are expected in the wrong one of the two, most first."""
    cluster, probs = page.table["cluster"], page.probs
    sizes = np.bincount(cluster, minlength=probs.shape[1])
    pairs = rank_pairs(confusion(cluster, probs), sizes, limit)
    size = size_within(int(PAIRS_SHARE * budget), 2 * EXAMPLES * len(pairs))
    shown = []
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
        thumbnails = make_thumbnails(page.images, examples, captions, size)
        shown.append(ConfusedPair(first, second, count(round(images), "image"), thumbnails))
    return shown


def look_first(page: PageData, limit: int = 48, budget: int = BUDGET) -> list[tuple[Thumbnail, str, str]]:
    """Return images that repay a look, with a shorter name and a reason each; reasons and their clusters take turns."""
    reasons = find_reasons(page)
    cluster = page.table["cluster"]
    orders = [spread_over_clusters(candidates, score, cluster) for candidates, score, _ in reasons]
    chosen = take_turns(orders, limit, limit)
    why = {index: say(index) for (_, _, say), indices in zip(reasons, chosen, strict=True) for index in indices}
    turns = sorted((turn, kind, index) for kind, indices in enumerate(chosen) for turn, index in enumerate(indices))
    shown = [index for _, _, index in turns]
    size = size_within(int(LOOK_SHARE * budget), len(shown))
    captions = [f"cluster {cluster[index]}, {_chance(page.table['confidence'][index])}" for index in shown]
    thumbnails = make_thumbnails(page.images, shown, captions, size)
    return [(picture, shorten(picture.name, 60), why[index]) for picture, index in zip(thumbnails, shown, strict=True)]


def find_reasons(page: PageData) -> list[Reason]:
    """Return the reasons: outliers, images torn between two clusters, those that calibration doubts, the least sure."""
    table = page.table
    cluster, confidence, before = table["cluster"], table["confidence"], table["clustering_confidence"]
    second, second_confidence = table["second_cluster"], table["second_confidence"]
    outlier, distance = _column(table, "outlier"), _column(table, "distance")
    nothing = np.zeros(len(table))

    def say_torn(index: int) -> str:
        own = f"cluster {cluster[index]} ({_chance(confidence[index])})"
        return f"torn between {own} and cluster {second[index]} ({_chance(second_confidence[index])})"

    def say_dropped(index: int) -> str:
        remaining = _chance(confidence[index])
        return f"the clustering head is {_chance(before[index])} sure, after calibration {remaining} remain"

    def say_unsure(index: int) -> str:
        following = f"cluster {second[index]} comes next with {_chance(second_confidence[index])}"
        return f"among the least sure of cluster {cluster[index]}; {following}"

    far = np.flatnonzero(nothing if outlier is None else outlier)
    return [
        (far, nothing if distance is None else distance, lambda index: "far from what is typical of any cluster"),
        (np.flatnonzero(second_confidence >= TORN), second_confidence - confidence, say_torn),
        (np.flatnonzero(before - confidence >= DROP), before - confidence, say_dropped),
        (np.flatnonzero(confidence < UNSURE), -confidence, say_unsure),
    ]


def pictures_per_kind(clusters: int, budget: int) -> int:
    """Return how many typical images a card shows (and as many borderline and doubtful ones): 12 down to 1."""
    kinds = 3 * max(clusters, 1)
    affordable = budget // (kinds * LEAST_BYTES)
    return max(min(MANY, max(PICTURES // kinds, FEW), affordable), 1)


def _column(table: np.recarray, name: str) -> NDArray[Any] | None:
    return table[name] if name in (table.dtype.names or ()) else None


def _chance(probability: float) -> str:
    """Return a probability in whole per cent that reads as 100 % or 0 % only where it is."""
    if SURE <= probability < 1:
        return f"over {percent(0.99, 0)}"
    if 0 < probability < 1 - SURE:
        return f"under {percent(0.01, 0)}"
    return percent(float(probability), 0)


def choose_examples(
    table: np.recarray, clusters: int, count: int, fingerprint: Callable[[int], Reals]
) -> list[Examples]:
    """Choose up to ``count`` images of each kind for every cluster.

    Typical are those with the highest confidence; equal ones go by ``distance`` or, without, from all over the data.
    Borderline have the smallest margin before a second cluster of at least 5 %, doubtful the lowest confidence of
    those that do not read as 100 %. Of a small cluster the two take no more than two thirds, in turn. Typical images
    whose fingerprints agree are near-duplicates: further ones are taken only where there is nothing else.
    """
    cluster, confidence, second_confidence = table["cluster"], table["confidence"], table["second_confidence"]
    distance = _column(table, "distance")
    # Steps of the golden ratio jump all over the data, so that equals do not all come from its beginning.
    ties = np.arange(len(cluster)) * GOLDEN_RATIO % 1.0 if distance is None else distance
    typical = _by_cluster(np.lexsort((ties, -np.round(confidence, TIE), cluster)), cluster, clusters)
    by_margin, by_confidence = np.lexsort((confidence - second_confidence, cluster)), np.lexsort((confidence, cluster))
    borderline = _by_cluster(by_margin[second_confidence[by_margin] >= LEAST_SECOND], cluster, clusters)
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
    """Return the (C, C) expected number of images of each cluster (row) that belong to each other one (column)."""
    clusters = probs.shape[1]
    rows = _by_cluster(np.argsort(cluster, kind="stable"), cluster, clusters)
    return np.stack([probs[members].sum(axis=0, dtype=np.float64) for members in rows])


def rank_pairs(expected: NDArray[np.float64], sizes: Integers, limit: int) -> list[tuple[int, int, float]]:
    """Return pairs of clusters (first < second) and how many images are expected to be in the wrong one of the two.

    That number is the sum of p(b) over the images of cluster a, plus that of p(a) over those of b. Most images come
    first. A pair is left out below one image, and below 1 % of the images of both clusters: every softmax gives a
    little to every cluster.
    """
    first, second = np.triu_indices(len(sizes), k=1)
    images = expected[first, second] + expected[second, first]
    shown = images >= np.maximum(1.0, PAIR_SHARE * (sizes[first] + sizes[second]))
    order = np.flatnonzero(shown)
    order = order[np.argsort(-images[order], kind="stable")][:limit]
    return [(int(first[i]), int(second[i]), float(images[i])) for i in order]


def spread_over_clusters(candidates: Integers, score: Reals, cluster: Integers) -> Integers:
    """Return candidates (indices) by falling score, but the best of every cluster before the second best of any."""
    own = cluster[candidates]
    order = np.lexsort((-score[candidates], own))
    starts = np.searchsorted(own[order], own[order])  # where the run of the same cluster begins
    rank = np.arange(len(order)) - starts
    ordered = candidates[order]
    return ordered[np.lexsort((-score[ordered], rank))]


def take_turns(orders: Sequence[Iterable[int]], limit: int, each: int) -> list[list[int]]:
    """Let every order in turn take its next image that none has taken, until ``limit`` in all or ``each`` of one."""
    chosen: list[list[int]] = [[] for _ in orders]
    waiting = [(iter(order), own) for order, own in zip(orders, chosen, strict=True)]
    taken: set[int] = set()
    while waiting and len(taken) < limit:
        for turn in list(waiting):
            order, own = turn
            found = next((int(index) for index in order if int(index) not in taken), None)
            if found is not None and len(taken) < limit:
                own.append(found)
                taken.add(found)
            if found is None or len(own) == each:
                waiting.remove(turn)
    return chosen


def _by_cluster(order: Integers, cluster: Integers, clusters: int) -> list[Integers]:
    """Return indices that are sorted by cluster, cut into one part per cluster."""
    return np.split(order, np.searchsorted(cluster[order], np.arange(1, clusters)))


def _distinct(candidates: Iterable[int], count: int, fingerprint: Callable[[int], Reals]) -> list[int]:
    """Return the first ``count`` candidates that do not look like one before; the first that do where these run out."""
    chosen: list[int] = []
    alike: list[int] = []
    seen: list[Reals] = []
    for looked_at, index in enumerate(candidates):
        if len(chosen) == count or looked_at >= PATIENCE * count:
            break
        look = fingerprint(index)
        if any(np.abs(look - other).mean() < SAME_PICTURE for other in seen):
            alike.append(index)
        else:
            seen.append(look)
            chosen.append(index)
    return chosen + alike[: count - len(chosen)]


def size_within(budget: int, count: int) -> ThumbnailSize:
    """Return the largest size at which ``count`` pictures fit into ``budget`` bytes: 32 to 96 pixels, in steps of 8."""
    most_bytes = budget // max(count, 1)
    side = int(np.sqrt(max(most_bytes - HEADER_BYTES, 0) / BYTES_PER_PIXEL)) // 8 * 8
    return ThumbnailSize(min(max(side, SMALLEST_SIDE), LARGEST_SIDE), most_bytes)


def encode(pixels: NDArray[np.uint8], size: ThumbnailSize) -> bytes:
    """Encode an image (H, W, 3) as a JPEG that keeps its shape and is never enlarged.

    Images of up to 32 pixels keep every pixel: the page enlarges them. Quality gives way before size where an image
    would take more than its bytes.
    """
    image = Image.fromarray(np.ascontiguousarray(pixels))
    side = min(max(image.size), size.side)
    while True:
        small = image.copy()
        small.thumbnail((side, side), Image.Resampling.BILINEAR, reducing_gap=2.0)
        colours = np.asarray(small)
        if (colours == colours[:, :, :1]).all():
            small = small.convert("L")
        # Pixels that are shown enlarged keep their own colour each; elsewhere the eye does not see the difference.
        subsampling = 0 if max(small.size) <= SMALLEST_SIDE else 2
        for quality in QUALITIES:
            stream = io.BytesIO()
            small.save(stream, "JPEG", quality=quality, optimize=True, subsampling=subsampling)
            data = stream.getvalue()
            if len(data) <= size.most_bytes:
                return data
        if side <= FINGERPRINT_SIDE:
            return data
        side = max(side * 3 // 4, FINGERPRINT_SIDE)


def make_thumbnails(
    images: ImageSet, indices: Sequence[int], captions: Sequence[str], size: ThumbnailSize
) -> list[Thumbnail]:
    """Make a thumbnail for every index; an image that comes up again is read and encoded once."""
    uris: dict[int, str] = {}  # one image at a time, so that a memory map on disk stays there
    for index in sorted(set(indices)):
        uris[index] = encode_picture(images.picture(index), size)
    return [
        Thumbnail(uris[index], shorten(images.names[index]), caption)
        for index, caption in zip(indices, captions, strict=True)
    ]


def encode_picture(pixels: NDArray[np.uint8] | None, size: ThumbnailSize) -> str:
    """Return an image (H, W, 3) as a data URI, empty for a sample without a picture."""
    return "" if pixels is None else f"data:image/jpeg;base64,{base64.b64encode(encode(pixels, size)).decode('ascii')}"


def fingerprint(pixels: NDArray[np.uint8] | None) -> NDArray[np.float32]:
    """Return the brightness of an image (H, W, 3) on 8 x 8 fields, (64,): what two copies of one picture share.

    No number is like those of a sample without a picture.
    """
    if pixels is None:
        return np.full(FINGERPRINT_SIDE**2, np.nan, dtype=np.float32)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    fields = image.resize((FINGERPRINT_SIDE, FINGERPRINT_SIDE), Image.Resampling.BOX, reducing_gap=2.0)
    return np.asarray(fields.convert("L"), dtype=np.float32).ravel()
