"""What all baselines have in common: they find blobs, return a head that can be rebuilt, and keep to their seed."""

import copy

import pytest
import torch
from torch import nn

from cdc_plugin.comparison.baselines import temi, turtle
from cdc_plugin.comparison.baselines.cc import train_cc
from cdc_plugin.comparison.baselines.scan import train_scan
from cdc_plugin.comparison.baselines.secu import train_secu, train_secu_size
from cdc_plugin.comparison.baselines.spice import train_spice
from cdc_plugin.comparison.baselines.temi import train_temi
from cdc_plugin.comparison.baselines.turtle import train_turtle
from cdc_plugin.models.heads import build_head
from tests.helpers.blob_tasks import CLUSTERS, FEATURES, blob_task, linear_backbone, predict, purity

# With settings under which each finds three blobs.
BASELINES = {
    train_cc: {"epochs": 30, "lr_heads": 0.03, "lr_backbone": 0.015},
    train_scan: {"epochs": 8, "lr_heads": 0.02, "lr_backbone": 0.01},
    train_secu: {"epochs": 6, "lr_heads": 0.003, "lr_backbone": 0.001},
    train_secu_size: {"epochs": 6, "lr_heads": 0.003, "lr_backbone": 0.001},
    train_spice: {"epochs": 6, "lr_heads": 0.005},
    train_temi: {"epochs": 20, "lr_heads": 0.02},
    train_turtle: {"epochs": 4},
}
FROZEN = {train_spice, train_temi, train_turtle}
ALL = pytest.mark.parametrize("train", BASELINES, ids=lambda train: train.__name__)


@pytest.fixture(autouse=True)
def _little_to_do(monkeypatch):
    for name, value in {"HEADS": 4, "LONGER": 1, "HIDDEN": 32, "TEACHER_MOMENTUM": 0.9}.items():
        monkeypatch.setattr(temi, name, value)
    for name, value in {"STEPS_PER_EPOCH": 20, "RATE": 0.03}.items():
        monkeypatch.setattr(turtle, name, value)


@ALL
@pytest.mark.parametrize("backbone", [linear_backbone(), nn.Identity()], ids=["trained", "frozen"])
def test_three_blobs_are_found_with_or_without_a_backbone_to_train(train, backbone):
    task, truth = blob_task(backbone, **BASELINES[train])
    assert purity(predict(task, train(task)), truth) > 0.95


@ALL
def test_the_head_is_ready_for_use_even_without_epochs_and_can_be_rebuilt(train):
    task, _ = blob_task(linear_backbone(), epochs=1)
    head = train(task)
    assert not head.training
    assert not task.backbone.training
    rebuilt = build_head(head.spec, FEATURES, "here")
    rebuilt.load_state_dict(head.state_dict())
    torch.testing.assert_close(rebuilt.eval()(task.features), head(task.features))
    task, _ = blob_task(linear_backbone(), epochs=0)
    assert train(task)(task.features).shape == (task.image_count, CLUSTERS)


@ALL
def test_a_seed_gives_the_same_head_and_leaves_other_randomness_alone(train):
    def weights(epochs: int, seed: int) -> torch.Tensor:
        head = train(blob_task(linear_backbone(), epochs=epochs, seed=seed)[0])
        return torch.cat([value.flatten() for value in head.parameters()])

    before = torch.get_rng_state()
    first = weights(2, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)  # what ran before must not matter
    assert torch.equal(weights(2, 1), first)
    assert not torch.equal(weights(2, 2), first)
    assert not torch.equal(weights(0, 1), weights(0, 2))


@ALL
def test_the_loss_is_reported_after_every_epoch(train):
    logs: list[dict[str, float]] = []
    train(blob_task(linear_backbone(), logs, **{**BASELINES[train], "epochs": 4})[0])
    assert [log["epoch"] for log in logs] == [1, 2, 3, 4]
    for log in logs:
        terms = [value for name, value in log.items() if name.endswith("_loss")]
        assert not terms or log["loss"] == pytest.approx(sum(terms), abs=1e-5)
    assert logs[-1]["loss"] < logs[0]["loss"]


@ALL
def test_only_methods_on_frozen_features_leave_the_backbone_as_it_is(train):
    backbone = nn.Sequential(linear_backbone(), nn.BatchNorm1d(FEATURES), nn.Dropout(0.5)).eval()
    task, _ = blob_task(backbone, epochs=2)
    task.backbone.train()  # as another method could have left it
    before = copy.deepcopy(task.backbone.state_dict())
    train(task)
    after = task.backbone.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before) is (train in FROZEN)
    assert torch.equal(before["0.weight"], after["0.weight"]) is (train in FROZEN)
