import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cdc_plugin.comparison.baselines import scan
from cdc_plugin.comparison.baselines.scan import train_scan, train_self_label
from cdc_plugin.core.neighbours import nearest_neighbours
from cdc_plugin.models.heads import LayeredHead, build_head
from tests.helpers.blob_tasks import CLUSTERS, FEATURES, SIZE, blob_task, linear_backbone, predictions, purity


def head_with(weights: Tensor) -> LayeredHead:
    head = LayeredHead([["linear", weights.shape[1], len(weights)]])
    with torch.no_grad():
        head[0].weight.copy_(weights)
        head[0].bias.zero_()
    return head


def test_three_blobs_are_found_from_random_heads():
    task, truth = blob_task(linear_backbone(), epochs=8, lr_heads=0.02, lr_backbone=0.01)
    assert purity(predictions(task, train_scan(task)), truth) > 0.97


def test_a_frozen_backbone_leaves_its_features_to_the_heads():
    task, truth = blob_task(nn.Identity(), epochs=8, lr_heads=0.02)
    assert purity(predictions(task, train_scan(task)), truth) > 0.97


def test_the_head_comes_back_linear_ready_for_use_and_can_be_built_again():
    task, _ = blob_task(linear_backbone(), epochs=1)
    head = train_scan(task)
    assert isinstance(head, LayeredHead)
    assert head.layers == [["linear", FEATURES, CLUSTERS]]
    assert not head.training
    assert not task.backbone.training
    again = build_head(head.spec, FEATURES, "here")
    again.load_state_dict(head.state_dict())
    assert torch.equal(again(task.features), head(task.features))


def test_backbone_and_head_are_trained_alike_for_the_same_seed_and_otherwise_for_another():
    found = []
    for seed in (0, 0, 1):
        task, _ = blob_task(linear_backbone(), epochs=1, seed=seed)
        found.append((train_scan(task)[0].weight, task.backbone.weight))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[2][0])
    assert not torch.equal(found[0][1], linear_backbone().weight)


def test_each_image_meets_one_of_its_own_neighbours():
    task, _ = blob_task(nn.Identity(), epochs=1)
    asked: list[Tensor] = []

    def weak(rows: Tensor, randomness: torch.Generator) -> Tensor:
        asked.append(rows)
        return task.weak(rows, randomness)

    train_scan(replace(task, weak=weak))
    neighbours = nearest_neighbours(task.features, scan.NEIGHBOURS)
    for images, partners in zip(asked[::2], asked[1::2], strict=True):
        assert (neighbours[images] == partners[:, None]).any(dim=1).all()
    assert len(torch.cat(asked[::2]).unique()) == task.images


def test_of_several_heads_the_one_with_the_lowest_loss_is_returned(monkeypatch):
    task, _ = blob_task(nn.Identity(), epochs=1)
    scores = torch.tensor([3.0, 1.0, -2.0, 4.0])
    monkeypatch.setattr(scan, "HEADS", 4)
    kept = []

    def pretend(task, heads, step):
        kept.extend(heads)
        return {"loss": torch.tensor(0.0), "scores": scores}

    monkeypatch.setattr(scan, "train_epochs", pretend)
    assert train_scan(task) is kept[2]


@pytest.mark.parametrize(("asked", "largest", "taken"), [(2, 128, 15), (30, 128, 30), (30, 20, 20)])
def test_steps_are_as_large_as_asked_for_between_five_a_cluster_and_the_number_of_scan(
    monkeypatch, asked, largest, taken
):
    monkeypatch.setattr(scan, "STEP_SIZE", largest)
    task, _ = blob_task(nn.Identity(), epochs=1, sub_batch_size=asked)
    sizes: list[int] = []

    def weak(rows: Tensor, randomness: torch.Generator) -> Tensor:
        sizes.append(len(rows))
        return task.weak(rows, randomness)

    train_scan(replace(task, weak=weak))
    assert set(sizes) == {taken}  # near-equal parts of a batch of 60


def test_no_epochs_still_give_a_head():
    task, _ = blob_task(linear_backbone(), epochs=0)
    assert train_scan(task)(task.features).shape == (task.images, CLUSTERS)


def test_self_labelling_corrects_a_head_that_is_sure_of_most(monkeypatch):
    monkeypatch.setattr(scan, "SELF_LABEL_RATE", 0.02)
    task, truth = blob_task(nn.Identity(), epochs=20, lr_heads=0.02)
    wrong = 6 * torch.eye(CLUSTERS, SIZE)
    wrong[0, 1] = 5.5  # takes about half of the second blob for the first, and is unsure of it
    head = head_with(wrong)
    before = purity(predictions(task, head), truth)
    trained = train_self_label(task, head)
    assert trained is head
    assert before < 0.97 < purity(predictions(task, trained), truth)


def test_self_labelling_takes_whole_batches_at_a_rate_of_its_own():
    task, _ = blob_task(nn.Identity(), epochs=1, lr_heads=0.5)
    weights = 6 * torch.eye(CLUSTERS, SIZE)
    sizes: list[int] = []

    def plain(rows: Tensor, randomness: torch.Generator) -> Tensor:
        sizes.append(len(rows))
        return task.plain(rows, randomness)

    head = train_self_label(replace(task, plain=plain), head_with(weights))
    assert sizes == [60, 60]
    moved = (head[0].weight - weights).abs().max().item()
    assert 0 < moved < 2.5 * scan.SELF_LABEL_RATE  # two steps of Adam, each of about the rate at most


def test_self_labelling_trains_the_backbone_and_tells_the_selected_share():
    logs: list[dict[str, float]] = []
    task, _ = blob_task(nn.Linear(SIZE, SIZE), logs, epochs=2)
    with torch.no_grad():
        task.backbone.weight.copy_(torch.eye(SIZE))
        task.backbone.bias.zero_()
    head = train_self_label(task, head_with(9 * torch.eye(CLUSTERS, SIZE)))
    assert not torch.equal(task.backbone.weight, torch.eye(SIZE))
    assert 0.9 < logs[0]["selected"] <= 1  # 9 * 2 against 0: sure of nearly all
    assert not head.training


def test_strong_views_are_what_self_labelling_trains_on():
    task, _ = blob_task(nn.Identity(), epochs=1)
    blank = replace(task, strong=lambda rows, randomness: torch.zeros(len(rows), SIZE))
    weights = 9 * torch.eye(CLUSTERS, SIZE)
    head = train_self_label(blank, head_with(weights))
    assert torch.equal(head[0].weight, weights)  # blank views give its weights no gradient


def test_where_nothing_is_confident_the_weights_stay_and_nothing_is_nan():
    logs: list[dict[str, float]] = []
    task, _ = blob_task(linear_backbone(), logs, epochs=2)
    head = head_with(0.1 * torch.ones(CLUSTERS, FEATURES))
    before = copy.deepcopy(head.state_dict()), copy.deepcopy(task.backbone.state_dict())
    train_self_label(task, head)
    after = head.state_dict(), task.backbone.state_dict()
    assert all(torch.equal(old[name], new[name]) for old, new in zip(before, after, strict=True) for name in old)
    assert [(log["loss"], log["selected"]) for log in logs] == [(0, 0)] * 2


def test_a_confidence_of_just_the_threshold_is_not_enough(monkeypatch):
    logs: list[dict[str, float]] = []
    task, _ = blob_task(linear_backbone(), logs, epochs=1)
    monkeypatch.setattr(scan, "THRESHOLD", 1.0)
    train_self_label(task, head_with(1000 * torch.randn(CLUSTERS, FEATURES)))
    assert logs[0]["selected"] == pytest.approx(0)
