"""Draw how clusters merge, from fine to coarse: the tree beside a row of pictures for every group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from cdc_plugin.report.charts import join, tag, text
from cdc_plugin.report.gallery import ClusterCard, Thumbnail
from cdc_plugin.report.page_data import ClusterFigures
from cdc_plugin.report.words import count, shorten

UNFOLDED, MOST_ROWS = 24, 150  # rows that are shown at once, and those of the tree that is folded
ROW, AXIS = 52.0, 22.0  # heights in pixels; those of the rows are also in the style sheet
PICTURES = 3
NAMED = 4  # clusters that a row names
LABEL, NARROW_LABEL = 0.045, 0.13  # shares of the width that a label needs, on a desk and on a phone

Merges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class TreeRow:
    """A group in words, with its clusters and typical images of them."""

    name: str
    clusters: list[int]
    size: str
    pictures: list[Thumbnail]


@dataclass(frozen=True)
class Tree:
    """The drawing of the tree, and the rows that its branches end at."""

    drawing: Markup
    rows: list[TreeRow]


def draw_trees(
    hierarchy: dict[str, Any] | None, clusters: Sequence[ClusterFigures], cards: Sequence[ClusterCard]
) -> list[Tree]:
    """Return the tree of a run, and before it that of its coarse levels alone where all have too many rows."""
    merges = [] if hierarchy is None else [(kept, absorbed) for kept, absorbed in hierarchy["merges"]]
    if not merges:
        return []
    rows = {min(level, len(merges) + 1) for level in (UNFOLDED, MOST_ROWS)}
    pictures = {card.number: card for card in cards}
    return [_draw_tree(merges, level, clusters, pictures) for level in sorted(rows)]


def _draw_tree(merges: Merges, level: int, clusters: Sequence[ClusterFigures], cards: dict[int, ClusterCard]) -> Tree:
    """Return the tree of the levels up to this one, whose groups are its rows."""
    fine = len(merges) + 1 - level  # merges within the rows
    members = {number: [number] for number in range(len(merges) + 1)}
    for kept, absorbed in merges[:fine]:
        members[kept] = sorted(members[kept] + members.pop(absorbed))
    order = {group: [group] for group in members}  # so that no branches cross
    for kept, absorbed in merges[fine:]:
        order[kept] += order.pop(absorbed)
    groups = order[0]
    rows = [_describe_row(members[group], clusters, cards) for group in groups]
    return Tree(_draw_branches(merges[fine:], groups), rows)


def _describe_row(members: list[int], clusters: Sequence[ClusterFigures], cards: dict[int, ClusterCard]) -> TreeRow:
    names = list(dict.fromkeys(name for number in members if (name := clusters[number].class_name) is not None))
    largest = sorted(members, key=lambda number: -clusters[number].size)
    turns = [cards[number].typical for number in largest if number in cards]
    # Of several clusters one picture each, the largest first.
    pictures = [pictures[turn] for turn in range(PICTURES) for pictures in turns if turn < len(pictures)][:PICTURES]
    size = count(sum(clusters[number].size for number in members), "image")
    named = ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")
    return TreeRow(shorten(named, 60), members, size, pictures)


def _draw_branches(merges: Merges, groups: list[int]) -> Markup:
    """Draw a horizontal line per group from where it begins to where it splits; widths are shares of the whole."""
    level = len(groups)
    height = {group: AXIS + ROW * (place + 0.5) for place, group in enumerate(groups)}
    reach = dict.fromkeys(groups, 100.0)  # how far to the right the line of a group is drawn already
    end = AXIS + ROW * level
    drawn: list[Markup] = []
    label = narrow = -1.0  # where the last one stands
    for number in range(1, level + 1):
        place = (number - 0.5) / level
        if place - label >= LABEL:
            label, minor = place, place - narrow < NARROW_LABEL
            narrow = narrow if minor else place
            share = f"{100 * place:.2f}%"
            drawn.append(tag("line", x1=share, x2=share, y1=AXIS - 6, y2=end, class_="grid"))
            drawn.append(text(share, AXIS - 10, str(number), "middle", "minor" if minor else None))
    for step, (kept, absorbed) in enumerate(merges):
        x = 100.0 * (level - 1 - step) / level
        for group in (kept, absorbed):
            drawn.append(_branch(x, reach[group], height[group], height[group]))
        drawn.append(_branch(x, x, height[kept], height[absorbed]))
        height[kept] = (height[kept] + height.pop(absorbed)) / 2
        reach[kept] = x
    drawn.append(_branch(0, reach[0], height[0], height[0]))  # the group of all has cluster 0
    title = tag("title", f"How {level} groups merge into one")
    return tag("svg", title, join(*drawn), class_="branches chart", height=end, role="img")


def _branch(x1: float, x2: float, y1: float, y2: float) -> Markup:
    return tag("line", x1=f"{x1:.2f}%", x2=f"{x2:.2f}%", y1=y1, y2=y2, class_="branch")
