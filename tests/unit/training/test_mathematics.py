"""Algorithm 1 on tiny networks, against the same steps written out here."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.core.random_streams import ORDER, TRAINING, VIEWS, generator
from cdc_plugin.core.selection import select_confident
from cdc_plugin.training.batches import make_batches
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.steps import BatchTargets, Views
from tests.helpers import seeded
from tests.helpers.refiners import make, settings, trust, views, weights, without_batchnorm

BATCH, CLUSTERS, SUB_BATCH = 24, 3, 12
HALVES = (slice(0, SUB_BATCH), slice(SUB_BATCH, BATCH))


def unlike_views() -> Views:
    """Plain, weak and strong views that have nothing in common, so that none can be taken for another."""
    return Views(*(torch.randn(BATCH, 10, generator=seeded(seed)) for seed in (1, 2, 3)), torch.arange(BATCH))


def judge(head: nn.Module, features: Tensor) -> Tensor:
    """Return the probabilities of a head under the statistics of the batch."""
    with torch.no_grad():
        return F.softmax(copy.deepcopy(head).train()(features), dim=1)


def compute_targets(refiner: Refiner, batch: Views) -> tuple[BatchTargets, Tensor, Tensor]:
    """Return the targets, and the probabilities of clustering and calibration head for plain and for weak views."""
    networks = refiner.networks
    clustering, calibration = judge(networks.clustering_head, batch.plain), judge(networks.calibration_head, batch.weak)
    return refiner.compute_targets(batch, seeded()), clustering, calibration


def test_the_calibration_head_selects_by_the_weak_views_and_the_clustering_head_gives_targets_by_the_plain_ones():
    batch, refiner = unlike_views(), make(settings(mini_clusters=BATCH), nn.Identity, features=10)
    targets, clustering, calibration = compute_targets(refiner, batch)
    expected = select_confident(calibration)
    assert torch.equal(targets.selection.labels, expected.labels)
    assert torch.equal(targets.selection.mask, expected.mask)
    assert targets.confidence == pytest.approx(calibration.max(dim=1).values.mean().item())
    torch.testing.assert_close(targets.soft, clustering)  # each image is a mini-cluster of its own
    assert torch.equal(targets.features, batch.plain)


def test_mini_clusters_hold_features_of_one_direction():
    # Six directions; lengths, and so the predictions, differ within each.
    directions = torch.eye(6, 10)[torch.arange(BATCH) % 6] * torch.linspace(0.2, 6, BATCH)[:, None]
    batch, refiner = Views(directions, *[directions] * 2, torch.arange(BATCH)), make(settings(), nn.Identity, 10)
    targets, clustering, _ = compute_targets(refiner, batch)
    expected = torch.stack([clustering[row % 6 :: 6].mean(dim=0) for row in range(BATCH)])
    torch.testing.assert_close(targets.soft, expected)
    assert targets.mini_clusters == 6


def test_without_a_number_of_mini_clusters_confidence_sets_it_within_the_limits_of_their_size():
    count = 480
    features = torch.randn(count, 10, generator=seeded())
    batch = Views(features, features, features, torch.arange(count))
    for frozen, largest in ((False, 50), (True, 8)):
        config = settings(mini_clusters=0, batch_size=count, freeze_backbone=frozen)
        targets = make(config, nn.Identity, features=10).compute_targets(batch, seeded())
        size = min(largest, max(3, 800 * (1 - targets.confidence) ** 2))
        assert targets.mini_clusters == round(count / size)


def expected_rates(schedule: str, total: int) -> Iterator[float]:
    for step in range(len(HALVES)):
        yield 1.0 if schedule == "constant" else (1 + math.cos(math.pi * step / total)) / 2


def check_weights(module: nn.Module, twin: nn.Module, cancelled: str) -> None:
    """Compare all weights but a bias that BatchNorm takes out again: its gradient is rounding, which Adam blows up."""
    expected = weights(twin)
    for name, tensor in weights(module).items():
        if name != cancelled:
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_each_sub_batch_moves_the_calibration_head_towards_its_own_targets(schedule):
    config = settings(schedule=schedule, mini_clusters=BATCH, entropy_weight=0.5, epochs=1)
    refiner, batch = make(config, nn.Identity, features=10), unlike_views()
    refiner.select = trust(0)
    soft = judge(refiner.networks.clustering_head, batch.plain)
    twin = copy.deepcopy(refiner.networks.calibration_head).train()
    optimizer = torch.optim.Adam(twin.parameters())
    for rows, rate in zip(HALVES, expected_rates(schedule, refiner.steps_per_epoch), strict=True):
        logits = twin(batch.plain[rows])
        mean = F.softmax(logits, dim=1).mean(dim=0)
        loss = -(soft[rows] * F.log_softmax(logits, dim=1)).sum(dim=1).mean() + 0.5 * (mean * mean.log()).sum()
        take_step(optimizer, loss, [config.lr_heads * rate])
    refiner.train_batch(batch, seeded())
    assert refiner.steps_per_epoch == 2
    check_weights(refiner.networks.calibration_head, twin, "0.bias")


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_each_sub_batch_moves_backbone_and_clustering_head_towards_its_trusted_labels(schedule):
    config = settings(schedule=schedule, lr_heads=1e-2, lr_backbone=1e-3, epochs=1)
    refiner, batch = make(config, without_batchnorm), unlike_views()
    refiner.select = trust(0.75)
    networks = refiner.networks
    backbone, head = copy.deepcopy(networks.backbone), copy.deepcopy(networks.clustering_head).train()
    with torch.no_grad():
        labels = judge(networks.calibration_head, backbone(batch.weak)).argmax(dim=1)
    optimizer = torch.optim.Adam([{"params": head.parameters()}, {"params": backbone.parameters()}])
    for rows, rate in zip(HALVES, expected_rates(schedule, refiner.steps_per_epoch), strict=True):
        trusted = torch.arange(BATCH)[rows] < 18
        loss = F.cross_entropy(head(backbone(batch.strong[rows]))[trusted], labels[rows][trusted])
        take_step(optimizer, loss, [1e-2 * rate, 1e-3 * rate])
    refiner.train_batch(batch, seeded())
    check_weights(networks.clustering_head, head, "0.bias")
    check_weights(networks.backbone, backbone, "3.bias")


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor, rates: list[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("seed", [0, 7])
def test_every_epoch_of_every_seed_has_a_stream_of_its_own(seed, monkeypatch):
    drawn = []

    def draw(refiner: Refiner, batch: Views, randomness: torch.Generator) -> dict[str, float]:
        drawn.append(torch.rand(3, generator=randomness))
        return {"confidence": 0.0}

    monkeypatch.setattr(Refiner, "train_batch", draw)
    make(settings(seed=seed)).fit(lambda epoch, done: [views()] * 2, lambda stats: None, lambda stats: None)
    expected = []
    for epoch in range(3):
        randomness = generator(seed, TRAINING, epoch)
        expected += [torch.rand(3, generator=randomness) for _ in range(2)]
    assert torch.equal(torch.stack(drawn), torch.stack(expected))


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 0), (0, 2)])
def test_order_and_views_come_from_the_streams_of_seed_and_epoch(seed, epoch):
    def draw(rows: Tensor, randomness: torch.Generator, pixels: None = None) -> Views:
        return Views(rows, torch.rand(3, generator=randomness), rows, rows)

    batches = list(make_batches(draw, 40, 20, seed)(epoch, 0))
    order = torch.randperm(40, generator=generator(seed, ORDER, epoch))
    assert torch.equal(torch.cat([batch.rows for batch in batches]), order)
    for number, batch in enumerate(batches):
        assert torch.equal(batch.weak, torch.rand(3, generator=generator(seed, VIEWS, epoch, number)))
