"""The card must stay silent on clean clusters, and speak up beyond the threshold of each way in which they go wrong."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.config.schema import AugmentConfig
from cdc_plugin.data.images import ImageSet
from cdc_plugin.evaluation.quality import Evidence, assess
from cdc_plugin.training.batches import SNAPSHOT_IMAGES, predict_augmented, predict_snapshot
from cdc_plugin.training.runtime import Runtime


def probabilities(assignment: Tensor, confidence: float, clusters: int) -> Tensor:
    rest = (1 - confidence) / (clusters - 1)
    return F.one_hot(assignment, clusters) * (confidence - rest) + rest


def evidence(assignment: Tensor, features: Tensor | None = None, clusters: int = 4, **changes: Any) -> Evidence:
    """Return evidence that all agrees with an assignment, but for the changes; clusters lie far apart."""
    if features is None:
        features = 10 * torch.eye(clusters, 16)[assignment]
        features = features + torch.randn(len(assignment), 16, generator=torch.Generator().manual_seed(0))
    probs = probabilities(assignment, 0.9, clusters)
    given = {"clustering": probs, "calibration": probs, "kmeans": assignment, "start": assignment}
    return Evidence(
        **{**given, "features": features, "seen": torch.arange(100), "augmented": assignment[:100], **changes}
    )


def warnings_of(given: Evidence) -> dict[str, str]:
    """Return the texts of the warnings by their kinds."""
    return {warning["kind"]: warning["text"] for warning in assess(given)["warnings"]}


EVEN = torch.arange(400) % 4
CPU = Runtime(torch.device("cpu"))


def moved(assignment: Tensor, count: int) -> Tensor:
    """Put the first images into the next cluster."""
    return (assignment + (torch.arange(len(assignment)) < count)) % 4


def test_clean_clusters_get_full_marks_and_no_warning_whatever_their_numbers():
    last_epochs = [EVEN[:100], EVEN[:100]]
    card = assess(evidence(EVEN, kmeans=(EVEN + 1) % 4, last_epochs=last_epochs))
    assert card["warnings"] == []
    assert card["expected_accuracy"] == pytest.approx(0.9)
    for name in ("heads_agree", "augmentation_agreement", "neighbour_consistency", "kmeans_agreement", "balance"):
        assert card[name] == pytest.approx(1.0), name
    assert card["start_agreement"] == card["stability"] == 1.0
    assert card["empty_clusters"] == 0
    features, order = evidence(EVEN).features, torch.tensor([2, 0, 3, 1])
    other = assess(evidence(order[EVEN], features, kmeans=EVEN, start=EVEN, last_epochs=last_epochs))
    assert other.pop("warnings") == card.pop("warnings")
    assert other == pytest.approx(card)


def test_what_is_not_known_is_none():
    card = assess(evidence(EVEN, start=None))
    assert (card["start_agreement"], card["stability"], card["warnings"]) == (None, None, [])


def test_stability_is_that_of_the_worst_step():
    changed = moved(EVEN[:100], 10)
    assert assess(evidence(EVEN, last_epochs=[EVEN[:100], changed, changed]))["stability"] == pytest.approx(0.9)


def test_three_images_and_images_in_one_cluster_have_a_card():
    few = torch.tensor([0, 0, 1])
    card = assess(evidence(few, clusters=2, seen=torch.arange(3), augmented=few))
    assert all(value is None or isinstance(value, list) or math.isfinite(value) for value in card.values())
    card = assess(evidence(torch.zeros(400, dtype=torch.long)))
    assert (str(card["balance"]), card["largest_cluster_share"]) == ("0.0", 1.0)  # and not -0.0


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
    assert set(warnings_of(evidence(of_sizes(*sizes), clusters=len(sizes)))) == expected


def test_empty_and_hardly_used_clusters_are_named():
    texts = warnings_of(evidence(of_sizes(195, 5, 200, 0)))
    assert texts["empty"].startswith("1 cluster")
    assert texts["small"].startswith("Cluster 1 is")


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
    texts = warnings_of(pair(half_gap, apart))
    assert ("merged" in texts) is merged
    assert not merged or texts["merged"].startswith("Cluster 0 ")


@pytest.mark.parametrize(("count", "merged"), [(10, True), (7, False)])
def test_a_second_kind_is_more_than_a_few_images(count, merged):
    # 10 and 7 of about a hundred images lie aside; the order of the images decides how k-means numbers the parts.
    aside = torch.stack([STEPS[torch.arange(count) % 10], torch.linspace(-1, 1, count)], dim=1)
    first = torch.cat([SQUARE, aside + torch.tensor([12.0, 0.0])])
    for places in range(0, len(first), count):
        found = plane([first.roll(places, dims=0), SQUARE + torch.tensor([1.0, 4.0])])
        assert ("merged" in warnings_of(found)) is merged


@pytest.mark.parametrize(("count", "merged"), [(20, True), (19, False)])
def test_twenty_images_can_be_two_kinds(count, merged):
    line = torch.stack([STEPS, STEPS.roll(3)], dim=1)
    first = torch.cat([line - torch.tensor([6.0, 0.0]), line + torch.tensor([6.0, 0.0])])[:count]
    assert ("merged" in warnings_of(plane([first, SQUARE + torch.tensor([0.0, 4.0])]))) is merged


@pytest.mark.parametrize(("gap", "split"), [(2.95, True), (3.1, False)])
def test_clusters_are_one_kind_below_the_threshold_of_the_nearest_pair(gap, split):
    far = SQUARE + torch.tensor([0.0, 40.0])
    texts = warnings_of(plane([SQUARE, SQUARE + torch.tensor([0.0, gap]), far]))
    assert ("split" in texts) is split
    if split:
        assert "0 and 1" in texts["split"]


def test_the_same_images_are_watched_every_time_and_training_state_does_not_move(tiny_clusterer, digits):
    model, pixels = tiny_clusterer.train(), np.concatenate([digits[0]] * 3)
    images = ImageSet(pixels, [str(index) for index in range(len(pixels))])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = (predict_snapshot(model.backbone, model.calibration_head, images, CPU) for _ in range(2))
    assert len(first) == SNAPSHOT_IMAGES
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_augmented_images_are_another_view_of_the_same_images(tiny_clusterer, digits, randomness):
    images = ImageSet(digits[0], [str(index) for index in range(len(digits[0]))])
    parts = tiny_clusterer.backbone, tiny_clusterer.calibration_head, images
    chosen, clusters = predict_augmented(*parts, AugmentConfig(flip=False, crop_scale=1.0), CPU, randomness)
    assert chosen.tolist() == list(range(200))
    assert (clusters == predict_snapshot(*parts, CPU)).float().mean() > 0.8
