"""After a round: three blobs, and heads that see them, have merged two of them, or are still moving."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cdc_plugin import refine
from cdc_plugin.checkpoints.load import load_checkpoint
from cdc_plugin.core.agreement import agreement
from cdc_plugin.training import review
from cdc_plugin.training.features import Features
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.run_folder import Run
from cdc_plugin.training.runtime import Runtime
from tests.helpers.refiners import CPU, make, settings, views

COUNT, CLUSTERS = 240, 3
TRUTH = torch.arange(COUNT) % CLUSTERS
MERGED = TRUTH.clamp(max=1)  # 1 and 2 are one cluster,
MERGED[:120:3] = 2  # 0 is cut in two


@pytest.fixture
def blobs() -> torch.Tensor:
    noise = torch.randn(COUNT, 10, generator=torch.Generator().manual_seed(0))
    return 6 * torch.eye(CLUSTERS, 10)[TRUTH] + noise


def reviewed(
    features: torch.Tensor,
    assignment: torch.Tensor,
    before: torch.Tensor | None,
    monkeypatch,
    epoch: int = 2,
    start: torch.Tensor | None = None,
    earlier: Sequence[dict[str, Any]] = (),
    sizes: str = "equal",
) -> tuple[Run, Refiner]:
    refiner = make(settings(epochs=6, rounds=3, clusters=CLUSTERS, sizes=sizes), nn.Identity, features=10)
    refiner.train_batch(views(), torch.Generator().manual_seed(0))  # so that optimisers remember something
    refiner.epoch = epoch
    probs = np.eye(CLUSTERS, dtype=np.float32)[assignment.numpy()]
    monkeypatch.setattr(review, "shared_features", lambda *args, **kwargs: Features(features, COUNT))
    monkeypatch.setattr(review, "head_probabilities", lambda *args: probs)
    nothing: Any = None
    model: Any = SimpleNamespace(backbone=None, calibration_head=refiner.networks.calibration_head)
    images: Any = SimpleNamespace(noun="image", count=COUNT)
    rows = torch.arange(COUNT)
    run = Run(
        refiner.settings, Path(), Runtime(CPU), images, model, {}, nothing, features if start is None else start, rows
    )
    run.assignment, run.reviews, run.start_probe = before, list(earlier), 1.0
    review.review_round(run, refiner)
    return run, refiner


def test_heads_that_see_the_blobs_train_on_until_nothing_moves(blobs, monkeypatch):
    run, refiner = reviewed(blobs, TRUTH, TRUTH.roll(1), monkeypatch)
    assert not refiner.done
    assert run.reviews[-1]["moved"] > 0.5
    run, refiner = reviewed(blobs, TRUTH, TRUTH, monkeypatch)
    assert refiner.done
    assert run.reviews[-1]["inertia_ratio"] == pytest.approx(1, abs=1e-3)
    assert not run.reviews[-1]["restarted"]


def test_stuck_heads_begin_again_from_the_better_partition_without_the_memory_of_the_optimisers(blobs, monkeypatch):
    run, refiner = reviewed(blobs, MERGED, MERGED, monkeypatch)
    assert run.reviews[-1]["restarted"]
    assert not refiner.done
    networks = refiner.networks
    for head in (networks.clustering_head, networks.calibration_head):
        found = head.eval()(blobs).argmax(dim=1)
        assert agreement(found, TRUTH, CLUSTERS) > 0.95
    remembered = [
        optimizer.state[p]
        for optimizer in (networks.clustering_optimizer, networks.calibration_optimizer)
        for group in optimizer.param_groups
        for p in group["params"]
        if p in optimizer.state
    ]
    assert not [state for state in remembered if state]


def test_clusters_of_estimated_sizes_are_regrouped_by_links(blobs, monkeypatch):
    run, refiner = reviewed(blobs, MERGED, MERGED, monkeypatch, sizes="estimated")
    assert run.reviews[-1]["bond_ratio"] > review.MISGROUPED
    assert run.reviews[-1]["restarted"]
    assert refiner.shares is None  # those of the old heads
    assert agreement(refiner.networks.clustering_head.eval()(blobs).argmax(dim=1), TRUTH, CLUSTERS) > 0.95
    run, _ = reviewed(blobs, TRUTH, TRUTH.roll(1), monkeypatch, sizes="estimated")
    assert run.reviews[-1]["bond_ratio"] < review.MISGROUPED
    assert not run.reviews[-1]["restarted"]
    run, _ = reviewed(blobs, MERGED, MERGED, monkeypatch, sizes="equal")
    assert run.reviews[-1]["bond_ratio"] == 0


def test_k_means_does_not_overrule_clusters_of_estimated_sizes(blobs, monkeypatch):
    monkeypatch.setattr(review, "compare_basins", lambda *args: 2 * review.STUCK)
    for sizes, restarted in (("estimated", False), ("equal", True)):
        run, _ = reviewed(blobs, TRUTH, TRUTH.roll(1), monkeypatch, sizes=sizes)
        assert run.reviews[-1]["restarted"] == restarted


def test_after_the_last_round_nothing_is_changed_any_more(blobs, monkeypatch):
    run, refiner = reviewed(blobs, MERGED, MERGED, monkeypatch, epoch=6)
    assert refiner.done
    assert not run.reviews[-1]["restarted"]
    assert not run.reviews[-1]["settled"]


def test_training_ends_where_the_estimate_no_longer_rises(blobs, monkeypatch):
    falling = [{"expected": 1.0, "restarted": False}] * review.PATIENCE
    run, refiner = reviewed(blobs, TRUTH, TRUTH.roll(1), monkeypatch, earlier=falling)
    assert run.reviews[-1]["moved"] > 0.5
    assert refiner.done
    for earlier in (falling[1:], [*falling[1:], falling[0] | {"restarted": True}]):  # the last: of other heads
        _, refiner = reviewed(blobs, TRUTH, TRUTH.roll(1), monkeypatch, earlier=earlier)
        assert not refiner.done


def test_clusters_that_the_first_features_know_nothing_of_have_not_helped(blobs, monkeypatch):
    monkeypatch.setattr(review, "round_epochs", lambda count: 1)
    noise = torch.randn(COUNT, 10, generator=torch.Generator().manual_seed(1))
    run, _ = reviewed(blobs, TRUTH, TRUTH, monkeypatch)
    assert review.has_helped(run)
    run, _ = reviewed(blobs, TRUTH, TRUTH, monkeypatch, start=noise)
    assert review.has_helped(run)  # nothing can be told from so few images
    monkeypatch.setattr(review, "LEAST_IMAGES", COUNT)
    assert not review.has_helped(run)
    run.settings = dataclasses.replace(run.settings, level="learned")  # the paper's plain method
    assert review.has_helped(run)


def test_a_run_that_has_not_helped_ends_with_the_features_it_began_with(
    tmp_path, tiny_checkpoint, archive, monkeypatch
):
    monkeypatch.setattr(review, "LEAST_IMAGES", 0)
    monkeypatch.setattr(review, "UNREADABLE", 2.0)
    monkeypatch.setattr(review, "round_epochs", lambda count: 1)
    report = refine(tiny_checkpoint, archive, 4, out=tmp_path / "run", epochs=2, rounds=2, hidden=16, device="cpu")
    assert report.metrics["returned_to_start"]
    assert len(report.metrics["rounds"]) == 2
    assert "returned" in {warning["kind"] for warning in report.metrics["label_free"]["warnings"]}
    before, after = load_checkpoint(tiny_checkpoint).backbone, load_checkpoint(tmp_path / "run").backbone
    weights = after.module.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in before.module.state_dict().items())


def test_the_rates_fall_to_nothing_in_every_round():
    refiner = make(settings(epochs=4, rounds=2, batch_size=24), nn.Identity, features=10)
    factors = []
    for epoch in range(4):
        refiner.epoch = epoch
        for step in range(refiner.steps_per_epoch):
            refiner.steps = epoch * refiner.steps_per_epoch + step
            factors.append(refiner._lr_factor())
    half = len(factors) // 2
    assert factors[:half] == pytest.approx(factors[half:])
    assert factors[0] == 1
    assert factors[:half] == sorted(factors[:half], reverse=True)
