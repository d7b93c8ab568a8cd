"""Say which clusters would be merged or split next: what a number one lower or one higher would change."""

from typing import Any

import torch
from torch import Tensor

from cdc_plugin.core.cluster_count import DIRECTIONS
from cdc_plugin.core.hierarchy import Hierarchy
from cdc_plugin.core.probe import principal_components
from cdc_plugin.core.random_streams import QUALITY, generator
from cdc_plugin.core.valley import cut_groups, measure_valley

SEEN = 5000  # rows that are looked at; more give the same answer
SHOWN = 4  # examples of each side


def find_next_changes(features: Tensor, assignment: Tensor, rows: Tensor, hierarchy: Hierarchy) -> dict[str, Any]:
    """Return the two clusters that the hierarchy merges first, and the cluster with the deepest valley inside.

    Features (n, D) and clusters (n,) are those of the images ``rows`` (n,), whose numbers the examples bear.
    """
    chosen = torch.linspace(0, len(features) - 1, min(SEEN, len(features))).long()
    points = principal_components(features[chosen])[:, :DIRECTIONS].contiguous()
    clusters, places, randomness = assignment[chosen], rows[chosen], generator(0, QUALITY)
    cuts = cut_groups(points, clusters, randomness)
    merge, split = None, None
    both = hierarchy.merges[0]
    sides = [clusters == number for number in both]
    if all(side.any() for side in sides):
        valley = measure_valley(points[sides[0]], points[sides[1]], randomness)
        merge = {"clusters": list(both), "valley": valley, "examples": _show(points, places, sides)}
    number, (valley, half) = min(cuts.items(), key=lambda item: item[1][0])
    if valley < 1:
        inside = (clusters == number).nonzero().flatten()
        sides = [torch.zeros_like(clusters, dtype=torch.bool) for _ in range(2)]
        for side, part in zip(sides, (~half, half), strict=True):
            side[inside[part]] = True
        split = {"clusters": [number], "valley": valley, "examples": _show(points, places, sides)}
    return {"merge": merge, "split": split}


def _show(points: Tensor, places: Tensor, sides: list[Tensor]) -> list[list[int]]:
    """Return the images nearest to the middle of each side."""
    examples = []
    for side in sides:
        group = points[side]
        apart = (group - group.mean(dim=0)).square().sum(dim=1)
        examples.append(places[side][apart.argsort(stable=True)[:SHOWN]].tolist())
    return examples
