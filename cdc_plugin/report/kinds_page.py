"""The page of new kinds: groups of images that no cluster fits, each by its typical and its most distant images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.report.gallery import Thumbnail, encode_picture, size_within
from cdc_plugin.report.run_page import render_template
from cdc_plugin.report.words import count, percent, say_page, shorten

TYPICAL, FRINGE, NEIGHBOURS = 16, 8, 8  # pictures of a kind, and of the cluster that it was sorted into
BUDGET = 4_500_000  # bytes of all pictures

# From rows of the table, rising, to their pixels; None for a sample without a picture.
Read = Callable[[NDArray[np.int64]], Sequence[NDArray[np.uint8] | None]]


@dataclass(frozen=True)
class KindCard:
    """One new kind in words, with pictures of it and of the cluster that most of it was sorted into."""

    number: int
    facts: str
    cluster: int
    typical: list[Thumbnail]
    fringe: list[Thumbnail]
    neighbours: list[Thumbnail]


def render_kinds(
    table: np.recarray, distance: NDArray[np.float32], read: Read, facts: list[tuple[str, str]], command: str
) -> str:
    """Return the page; ``distance`` (N,) is that of each image to the centre of its kind."""
    kinds = range(int(table["new_kind"].max()) + 1)
    shown = [_choose(table, distance, kind) for kind in kinds]
    rows = np.unique(np.concatenate([part for parts in shown for part in parts]))
    size = size_within(BUDGET, len(rows))
    uris = {row: encode_picture(pixels, size) for row, pixels in zip(rows.tolist(), read(rows), strict=True)}

    def show(chosen: NDArray[np.int64]) -> list[Thumbnail]:
        return [Thumbnail(uris[row], shorten(str(table[row][0])), "") for row in chosen.tolist()]

    cards = []
    for kind, (typical, fringe, neighbours) in zip(kinds, shown, strict=True):
        members = table["new_kind"] == kind
        cluster, share = _find_cluster(table, members)
        words = (
            f"{count(int(members.sum()), 'image')}, {percent(float(table['outlier'][members].mean()), 0)} of them "
            f"outliers; {percent(share, 0)} were sorted into cluster {cluster}"
        )
        cards.append(KindCard(kind, words, cluster, show(typical), show(fringe), show(neighbours)))
    values: dict[str, Any] = {"kinds": cards, "settings": "", "command": command}
    contents = [(f"kind-{card.number}", f"New kind {card.number}", True) for card in cards]
    title = f"{count(len(cards), 'new kind')} of images"
    text = render_template("kinds.html", title, facts, [*contents, ("settings", "What to type next", True)], values)
    return text if any(uris.values()) else say_page(text, "sample")


def _choose(table: np.recarray, distance: NDArray[np.float32], kind: int) -> list[NDArray[np.int64]]:
    """Return the rows of a kind that are nearest to its centre, farthest from it, and typical of its cluster."""
    members = np.flatnonzero(table["new_kind"] == kind)
    order = members[np.argsort(distance[members], kind="stable")]
    typical = order[:TYPICAL]
    fringe = order[max(len(typical), len(order) - FRINGE) :]
    cluster, _ = _find_cluster(table, table["new_kind"] == kind)
    known = np.flatnonzero((table["cluster"] == cluster) & (table["new_kind"] < 0))
    surest = known[np.argsort(-table["confidence"][known], kind="stable")[:NEIGHBOURS]]
    return [typical, fringe, surest]


def _find_cluster(table: np.recarray, members: NDArray[np.bool_]) -> tuple[int, float]:
    """Return the cluster that most of the members were sorted into, and their share."""
    sizes = np.bincount(table["cluster"][members])
    return int(sizes.argmax()), float(sizes.max() / sizes.sum())
