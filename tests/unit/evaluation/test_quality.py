"""The card must stay silent on clean clusters, and speak up for each of the ways in which they go wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cdc_plugin.config.schema import AugmentConfig
from cdc_plugin.data.images import ImageSet
from cdc_plugin.evaluation.quality import Evidence, assess
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import ClusterHead
from cdc_plugin.training.batches import SNAPSHOT_IMAGES, predict_augmented, predict_snapshot
from cdc_plugin.training.runtime import Runtime

CLUSTERS, IMAGES = 4, 400
CPU = Runtime(torch.device("cpu"))


def probabilities(assignment: torch.Tensor, confidence: float, clusters: int = CLUSTERS) -> torch.Tensor:
    rest = (1 - confidence) / (clusters - 1)
    return F.one_hot(assignment, clusters) * (confidence - rest) + rest


@pytest.fixture
def clean(randomness) -> Evidence:
    """Four groups far from each other, sure heads, everything found again."""
    assignment = torch.arange(IMAGES) % CLUSTERS
    features = 10 * torch.eye(CLUSTERS, 16)[assignment] + torch.randn(IMAGES, 16, generator=randomness)
    probs = probabilities(assignment, 0.97)
    seen = torch.arange(100)
    return Evidence(probs, probs, features, (assignment + 1) % CLUSTERS, seen, assignment[seen], assignment)


def kinds(card: dict) -> set[str]:
    return {warning["kind"] for warning in card["warnings"]}


def test_clean_clusters_get_full_marks_and_no_warning(clean):
    card = assess(replace(clean, last_epochs=[clean.augmented, clean.augmented]))
    assert card["warnings"] == []
    assert card["expected_accuracy"] == pytest.approx(0.97)
    for name in ("heads_agree", "augmentation_agreement", "neighbour_consistency", "kmeans_agreement", "balance"):
        assert card[name] == pytest.approx(1.0), name
    assert card["start_agreement"] == card["stability"] == 1.0
    assert card["empty_clusters"] == 0


def test_what_is_not_known_is_none_and_raises_no_doubt(clean):
    card = assess(replace(clean, start=None))
    assert card["start_agreement"] is None
    assert card["stability"] is None
    assert card["warnings"] == []


def test_stability_is_that_of_the_worst_step(clean):
    changed = clean.augmented.clone()
    changed[:10] = (changed[:10] + 1) % CLUSTERS
    card = assess(replace(clean, last_epochs=[clean.augmented, changed, changed]))
    assert card["stability"] == pytest.approx(0.9)
    assert "estimate" in kinds(card)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: {"calibration": probabilities(e.calibration.argmax(1), 0.8)}, "differs by 17"),
        (lambda e: {"kmeans": torch.arange(IMAGES) // 100}, "on its features"),
        (lambda e: {"start": torch.arange(IMAGES) // 100}, "features before refinement"),
        (lambda e: {"augmented": (e.augmented + (torch.arange(100) < 20)) % CLUSTERS}, "80%"),
    ],
)  # fmt: skip
def test_each_second_opinion_that_differs_puts_the_estimate_in_doubt(clean, change, words):
    card = assess(replace(clean, **change(clean)))
    assert kinds(card) == {"estimate"}
    assert words in card["warnings"][0]["text"]
    assert "--audit" in card["warnings"][0]["text"]


def test_few_images_put_the_estimate_in_doubt(clean):
    few = Evidence(
        clean.clustering[:40], clean.calibration[:40], clean.features[:40], clean.kmeans[:40],
        clean.seen[:40], clean.augmented[:40],
    )  # fmt: skip
    assert "40 images" in assess(few)["warnings"][0]["text"]


def test_a_cluster_that_holds_nearly_everything_is_a_collapse(clean):
    assignment = clean.calibration.argmax(dim=1).clone()
    assignment[20:] = 0
    card = assess(replace(clean, calibration=probabilities(assignment, 0.97)))
    assert "collapse" in kinds(card)
    assert card["largest_cluster_share"] > 0.9
    assert card["balance"] < 0.3


@pytest.mark.parametrize(("second", "collapsed"), [(100, False), (10, True)])
def test_of_two_clusters_one_may_be_much_larger(clean, second, collapsed):
    probs = probabilities((torch.arange(IMAGES) < second).long(), 0.97, 2)
    assignment = probs.argmax(dim=1)
    heads = {"calibration": probs, "clustering": probs, "kmeans": assignment, "start": None}
    assert ("collapse" in kinds(assess(replace(clean, **heads, augmented=assignment[:100])))) == collapsed


def test_empty_and_hardly_used_clusters_are_named(clean):
    assignment = clean.calibration.argmax(dim=1).clone()
    assignment[assignment == 3] = 2
    assignment[assignment == 1] = 0
    assignment[:5] = 1
    card = assess(replace(clean, calibration=probabilities(assignment, 0.97)))
    texts = {warning["kind"]: warning["text"] for warning in card["warnings"]}
    assert card["empty_clusters"] == 1
    assert texts["empty"].startswith("1 cluster")
    assert texts["small"].startswith("Cluster 1 is")


def test_two_groups_in_one_cluster_raise_a_warning(clean):
    assignment = clean.calibration.argmax(dim=1) // 2  # groups 0 and 1 in cluster 0, 2 and 3 in cluster 1
    probs = probabilities(assignment, 0.97, 2)
    card = assess(
        replace(clean, calibration=probs, clustering=probs, kmeans=assignment, start=None, augmented=assignment[:100])
    )
    texts = {warning["kind"]: warning["text"] for warning in card["warnings"]}
    assert texts["merged"].startswith("Clusters 0, 1 ")
    assert "two kinds" in texts["estimate"]


def test_one_group_in_two_clusters_raise_a_warning(clean, randomness):
    features = 10 * torch.eye(3, 16)[(torch.arange(IMAGES) % CLUSTERS).clamp(max=2)]
    features = features + torch.randn(IMAGES, 16, generator=randomness)
    texts = {warning["kind"]: warning["text"] for warning in assess(replace(clean, features=features))["warnings"]}
    assert texts["split"].startswith("Clusters 2 and 3 ")


def test_the_numbers_of_clusters_do_not_matter(clean):
    order = torch.tensor([2, 0, 3, 1])
    moved = replace(
        clean,
        clustering=clean.clustering[:, order.argsort()],
        calibration=clean.calibration[:, order.argsort()],
        augmented=order[clean.augmented],
    )
    first, second = assess(clean), assess(moved)
    assert {k: v for k, v in first.items() if k != "warnings"} == pytest.approx(
        {k: v for k, v in second.items() if k != "warnings"}
    )


def test_everything_in_one_cluster_has_no_balance(clean):
    probs = probabilities(torch.zeros(IMAGES, dtype=torch.long), 0.97)
    assert str(assess(replace(clean, calibration=probs))["balance"]) == "0.0"  # and not -0.0


def test_two_clusters_and_three_images_have_a_card():
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    card = assess(
        Evidence(probs, probs, torch.eye(3), probs.argmax(1), torch.arange(3), probs.argmax(1), probs.argmax(1))
    )
    assert all(value is None or isinstance(value, list) or math.isfinite(value) for value in card.values())


@pytest.fixture
def model(tiny_backbone) -> Clusterer:
    torch.manual_seed(0)
    heads = [ClusterHead(8, 16, 3) for _ in range(2)]
    return Clusterer(tiny_backbone, *heads)


def test_the_same_images_are_watched_every_time_and_training_state_does_not_move(model, digits):
    pixels = np.concatenate([digits[0]] * 3)
    images = ImageSet(pixels, [str(index) for index in range(len(pixels))])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    model.train()
    first, second = (predict_snapshot(model.backbone, model.calibration_head, images, CPU) for _ in range(2))
    assert len(first) == SNAPSHOT_IMAGES
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_augmented_images_are_another_view_of_the_same_images(model, digits, randomness):
    images = ImageSet(digits[0], [str(index) for index in range(len(digits[0]))])
    parts = model.backbone, model.calibration_head, images
    mild = AugmentConfig(flip=False, crop_scale=1.0)
    chosen, clusters = predict_augmented(*parts, mild, CPU, randomness)
    assert chosen.tolist() == list(range(200))
    plain = predict_snapshot(*parts, CPU)
    assert (clusters == plain).float().mean() > 0.8
