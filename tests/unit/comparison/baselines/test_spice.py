import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cdc_plugin.comparison.baselines import spice
from cdc_plugin.comparison.baselines.spice import train_spice
from cdc_plugin.comparison.baselines.task import MakeView
from cdc_plugin.errors import UserError
from cdc_plugin.models.heads import LayeredHead, build_head
from tests.helpers.blob_tasks import CLUSTERS, FEATURES, SIZE, blob_task, linear_backbone, predictions, purity


@pytest.fixture(autouse=True)
def _few_heads(monkeypatch):
    monkeypatch.setattr(spice, "HEADS", 3)


def with_batchnorm() -> nn.Module:
    return nn.Sequential(linear_backbone(), nn.BatchNorm1d(FEATURES), nn.Dropout(0.5)).eval()


def test_three_blobs_are_found_from_random_heads():
    task, truth = blob_task(linear_backbone(), epochs=6, lr_heads=0.005)
    assert purity(predictions(task, train_spice(task)), truth) > 0.97


def test_views_that_are_features_serve_as_well():
    task, truth = blob_task(nn.Identity(), epochs=6, lr_heads=0.005)
    head = train_spice(task)
    assert head.layers[0] == ["linear", SIZE, SIZE]
    assert purity(predictions(task, head), truth) > 0.97


def test_the_backbone_stays_as_it_is_its_batchnorm_statistics_included():
    task, _ = blob_task(with_batchnorm(), epochs=2)
    task.backbone.train()  # as another method could have left it
    before = copy.deepcopy(task.backbone.state_dict())
    train_spice(task)
    after = task.backbone.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not task.backbone.training


def test_the_two_layer_head_comes_back_ready_for_use_and_can_be_built_again():
    task, _ = blob_task(linear_backbone(), epochs=1)
    head = train_spice(task)
    assert isinstance(head, LayeredHead)
    assert head.layers == [["linear", FEATURES, FEATURES], ["relu"], ["linear", FEATURES, CLUSTERS]]
    assert not head.training
    again = build_head(head.spec, FEATURES, "here")
    again.load_state_dict(head.state_dict())
    assert torch.equal(again(task.features), head(task.features))


def test_the_same_seed_gives_the_same_head_and_another_seed_another():
    weights = [train_spice(blob_task(with_batchnorm(), epochs=1, seed=seed)[0])[0].weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_head_with_the_lowest_loss_over_the_whole_set_is_returned(monkeypatch):
    task, _ = blob_task(linear_backbone(), epochs=1)
    seen = []

    def pretend(heads, features):
        seen.extend(heads)
        assert features is task.features
        return torch.tensor([2.0, 3.0, 1.0])

    monkeypatch.setattr(spice, "_losses_of_heads", pretend)
    assert train_spice(task) is seen[2]


def test_losses_are_told_every_epoch_and_fall():
    logs: list[dict[str, float]] = []
    train_spice(blob_task(linear_backbone(), logs, epochs=4, lr_heads=0.005)[0])
    assert [log["epoch"] for log in logs] == [1, 2, 3, 4]
    assert logs[-1]["loss"] < logs[0]["loss"]


def test_every_batch_is_trained_on_eight_times_until_the_rate_is_nearly_zero(monkeypatch):
    kept = []

    class Recorded(spice.Descent):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            kept.append(self)

    monkeypatch.setattr(spice, "Descent", Recorded)
    train_spice(blob_task(linear_backbone(), epochs=3)[0])
    assert kept[0].steps == kept[0].total_steps == 3 * 2 * 8 * 2  # epochs, batches of 60, repeats, parts of 30


def test_weak_views_are_judged_and_strong_ones_trained_on_each_image_once_an_epoch():
    task, _ = blob_task(nn.Identity(), epochs=1)
    asked: dict[str, list[Tensor]] = {"weak": [], "strong": []}

    def recorded(name: str) -> MakeView:
        def view(rows: Tensor, randomness: torch.Generator) -> Tensor:
            asked[name].append(rows)
            return torch.full((len(rows), SIZE), torch.nan if name == "strong" else 1.0)

        return view

    with pytest.raises(UserError, match="not finite in epoch 1"):  # of the strong views; weak ones give no loss
        train_spice(replace(task, weak=recorded("weak"), strong=recorded("strong")))
    for rows in asked.values():
        assert torch.cat(rows).sort().values.tolist() == list(range(task.images))


def test_no_epochs_still_give_a_head():
    task, _ = blob_task(linear_backbone(), epochs=0)
    assert train_spice(task)(task.features).shape == (task.images, CLUSTERS)


def test_batches_that_cannot_hold_all_clusters_are_refused():
    task, _ = blob_task(linear_backbone(), epochs=1)
    small = replace(task, config=replace(task.config, batch_size=2))
    with pytest.raises(UserError, match="a batch of 2 images"):
        train_spice(small)
