"""Every threshold of the quality card from both of its sides."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.evaluation.quality import Evidence, assess


def probabilities(assignment: Tensor, confidence: float, clusters: int) -> Tensor:
    rest = (1 - confidence) / (clusters - 1)
    return F.one_hot(assignment, clusters) * (confidence - rest) + rest


def evidence(assignment: Tensor, features: Tensor | None = None, clusters: int = 4, **changes: Any) -> Evidence:
    """Return evidence without any doubt of an assignment, but for the changes; clusters lie far apart."""
    if features is None:
        features = 10 * torch.eye(clusters, 16)[assignment]
        features = features + torch.randn(len(assignment), 16, generator=torch.Generator().manual_seed(0))
    probs = probabilities(assignment, 0.9, clusters)
    given = {"clustering": probs, "calibration": probs, "kmeans": assignment, "start": assignment}
    return Evidence(
        **{**given, "features": features, "seen": torch.arange(100), "augmented": assignment[:100], **changes}
    )


def kinds(given: Evidence) -> set[str]:
    return {warning["kind"] for warning in assess(given)["warnings"]}


EVEN = torch.arange(400) % 4


def moved(assignment: Tensor, count: int) -> Tensor:
    """Put the first images into the next cluster."""
    return (assignment + (torch.arange(len(assignment)) < count)) % 4


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        ({"clustering": probabilities(EVEN, 0.949, 4)}, {"clustering": probabilities(EVEN, 0.951, 4)}),
        ({"clustering": probabilities(EVEN, 0.851, 4)}, {"clustering": probabilities(EVEN, 0.849, 4)}),
        ({"kmeans": moved(EVEN, 59)}, {"kmeans": moved(EVEN, 61)}),
        ({"start": moved(EVEN, 59)}, {"start": moved(EVEN, 61)}),
        ({"start": None}, {"start": moved(EVEN, 61)}),
        ({"augmented": moved(EVEN[:100], 9)}, {"augmented": moved(EVEN[:100], 11)}),
        ({"last_epochs": [EVEN[:100], moved(EVEN[:100], 4)]}, {"last_epochs": [EVEN[:100], moved(EVEN[:100], 6)]}),
    ],
    ids=["surer", "less sure", "k-means", "start", "no start", "another view", "last epochs"],
)
def test_a_second_opinion_is_a_doubt_only_beyond_its_threshold(within, beyond):
    assert kinds(evidence(EVEN, **within)) == set()
    assert kinds(evidence(EVEN, **beyond)) == {"estimate"}


def test_twenty_images_a_cluster_are_enough():
    for count, expected in ((80, set()), (79, {"estimate"})):
        few = EVEN[:count]
        assert kinds(evidence(few, seen=torch.arange(count), augmented=few)) == expected


def of_sizes(*sizes: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((200, 80, 60, 60), set()),
        ((201, 79, 60, 60), {"collapse"}),
        ((380, 20), set()),
        ((381, 19), {"collapse", "small"}),
        ((130, 130, 130, 10), set()),
        ((130, 130, 131, 9), {"small"}),
        ((134, 133, 133, 0), {"empty"}),
    ],
)
def test_sizes_are_warned_of_only_beyond_their_thresholds(sizes, expected):
    assert kinds(evidence(of_sizes(*sizes), clusters=len(sizes))) == expected


STEPS = torch.linspace(-1, 1, 10)
STEPS = STEPS / STEPS.std(unbiased=False)
SQUARE = torch.cartesian_prod(STEPS, STEPS)  # 100 points with a spread of 1 in both directions


def pair(half_gap: float, apart: float) -> Evidence:
    """Two clusters at a distance of ``apart`` spreads; the first is two squares at one of 2 ``half_gap``."""
    aside = torch.tensor([half_gap, 0.0])
    first = torch.cat([SQUARE - aside, SQUARE + aside])
    return plane([first, SQUARE + torch.tensor([0.0, 2 * apart])])


def plane(groups: list[Tensor]) -> Evidence:
    points = torch.cat(groups)
    features = torch.cat([torch.full((len(points), 1), 1000.0), points], dim=1)  # directions: as good as flat
    return evidence(of_sizes(*map(len, groups)), features, len(groups))


@pytest.mark.parametrize(
    ("half_gap", "apart", "merged"), [(2.3, 2.0, True), (2.1, 2.0, False), (2.7, 2.4, True), (2.7, 3.0, False)]
)
def test_two_kinds_lie_farther_apart_than_the_threshold_and_than_the_nearest_cluster(half_gap, apart, merged):
    assert ("merged" in kinds(pair(half_gap, apart))) is merged


@pytest.mark.parametrize(("count", "merged"), [(10, True), (7, False)])
def test_a_second_kind_is_more_than_a_few_images(count, merged):
    # 10 and 7 of about a hundred images lie aside; the order of the images decides how k-means numbers the parts.
    aside = torch.stack([STEPS[torch.arange(count) % 10], torch.linspace(-1, 1, count)], dim=1)
    first = torch.cat([SQUARE, aside + torch.tensor([12.0, 0.0])])
    for places in range(0, len(first), count):
        found = plane([first.roll(places, dims=0), SQUARE + torch.tensor([1.0, 4.0])])
        assert ("merged" in kinds(found)) is merged


@pytest.mark.parametrize(("count", "merged"), [(20, True), (19, False)])
def test_twenty_images_can_be_two_kinds(count, merged):
    line = torch.stack([STEPS, STEPS.roll(3)], dim=1)
    first = torch.cat([line - torch.tensor([6.0, 0.0]), line + torch.tensor([6.0, 0.0])])[:count]
    assert ("merged" in kinds(plane([first, SQUARE + torch.tensor([0.0, 4.0])]))) is merged


@pytest.mark.parametrize(("gap", "split"), [(2.95, True), (3.1, False)])
def test_clusters_are_one_kind_below_the_threshold_of_the_nearest_pair(gap, split):
    far = SQUARE + torch.tensor([0.0, 40.0])
    found = assess(plane([SQUARE, SQUARE + torch.tensor([0.0, gap]), far]))["warnings"]
    texts = {warning["kind"]: warning["text"] for warning in found}
    assert ("split" in texts) is split
    if split:
        assert "0 and 1" in texts["split"]
