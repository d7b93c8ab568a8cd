import pytest
import torch
from torch import nn

from cdc_plugin.comparison.baselines import cc
from cdc_plugin.comparison.baselines.cc import train_cc
from cdc_plugin.models.heads import LayeredHead, build_head
from tests.helpers.blob_tasks import CLUSTERS, FEATURES, SIZE, blob_task, linear_backbone, predictions, purity


def test_three_blobs_are_found_from_random_heads():
    task, truth = blob_task(linear_backbone(), epochs=0)
    assert purity(predictions(task, train_cc(task)), truth) < 0.9
    task, truth = blob_task(linear_backbone(), epochs=15, lr_heads=0.03, lr_backbone=0.015)
    assert purity(predictions(task, train_cc(task)), truth) > 0.95


def test_the_cluster_head_comes_back_ready_for_use_and_can_be_built_again():
    task, _ = blob_task(linear_backbone(), epochs=1)
    head = train_cc(task)
    assert isinstance(head, LayeredHead)
    assert not head.training
    assert not task.backbone.training
    again = build_head(head.spec, FEATURES, "here")
    again.load_state_dict(head.state_dict())
    torch.testing.assert_close(again.eval()(task.features), head(task.features))
    assert head(task.features).shape == (task.images, CLUSTERS)


def test_the_backbone_is_trained_too():
    backbone = linear_backbone()
    task, _ = blob_task(backbone, epochs=1)
    train_cc(task)
    assert not torch.equal(task.backbone.weight, backbone.weight)


def test_a_frozen_backbone_leaves_its_features_to_the_heads():
    task, truth = blob_task(nn.Identity(), epochs=30, lr_heads=0.03)
    assert task.feature_dim == SIZE
    assert purity(predictions(task, train_cc(task)), truth) > 0.95


def test_a_seed_gives_the_same_head_and_leaves_other_randomness_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    heads = [train_cc(blob_task(linear_backbone(), epochs=2, seed=seed)[0]) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(heads[0][0].weight, heads[1][0].weight)
    untrained = [train_cc(blob_task(linear_backbone(), epochs=0, seed=seed)[0]) for seed in (1, 2)]
    for one, other in ((heads[0], heads[2]), untrained):
        assert not torch.equal(one[0].weight, other[0].weight)


def test_both_losses_are_told_after_every_epoch():
    logs: list[dict[str, float]] = []
    train_cc(blob_task(linear_backbone(), logs, epochs=3)[0])
    assert [log["epoch"] for log in logs] == [1, 2, 3]
    for log in logs:
        assert log["loss"] == pytest.approx(log["instance_loss"] + log["cluster_loss"], abs=1e-5)
    assert logs[-1]["loss"] < logs[0]["loss"]


def test_two_different_strong_views_are_contrasted_at_the_temperatures_of_the_paper(monkeypatch):
    seen = []
    original = cc.pair_contrast

    def watched(first, second, temperature):
        seen.append((first.shape, torch.equal(first, second), temperature))
        return original(first, second, temperature)

    monkeypatch.setattr(cc, "pair_contrast", watched)
    train_cc(blob_task(linear_backbone(), epochs=1)[0])
    assert set(seen) == {(torch.Size([30, 128]), False, 0.5)}
    assert cc.CLUSTER_TEMPERATURE == 1.0
