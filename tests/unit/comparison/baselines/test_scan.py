import copy
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.comparison.baselines import scan
from cdc_plugin.comparison.baselines.loop import BaselineTask
from cdc_plugin.comparison.baselines.scan import (
    balanced_cross_entropy,
    scan_loss,
    train_scan,
    train_self_label,
)
from cdc_plugin.core.agreement import nearest_neighbours
from cdc_plugin.models.heads import LayeredHead
from tests.helpers.blob_tasks import CLUSTERS, SIZE, blob_task, linear_backbone, predict, purity


def logits_of(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def head_with(weights: Tensor) -> LayeredHead:
    head = LayeredHead([["linear", weights.shape[1], len(weights)]])
    with torch.no_grad():
        head[0].weight.copy_(weights)
        head[0].bias.zero_()
    return head


def record_rows(task: BaselineTask, view: str, train: Callable[[BaselineTask], nn.Module]) -> list[Tensor]:
    """Return the rows of every call of a view during training."""
    asked: list[Tensor] = []

    def make(rows: Tensor, randomness: torch.Generator) -> Tensor:
        asked.append(rows)
        return getattr(task, view)(rows, randomness)

    train(replace(task, **{view: make}))
    return asked


def test_each_image_meets_one_of_its_own_neighbours():
    task, _ = blob_task(nn.Identity(), epochs=1)
    asked = record_rows(task, "weak", train_scan)
    neighbours = nearest_neighbours(task.features, scan.NEIGHBOURS)
    for images, partners in zip(asked[::2], asked[1::2], strict=True):
        assert (neighbours[images] == partners[:, None]).any(dim=1).all()
    assert len(torch.cat(asked[::2]).unique()) == task.image_count


def test_of_several_heads_the_one_with_the_lowest_loss_is_returned(monkeypatch):
    task, _ = blob_task(nn.Identity(), epochs=1)
    scores = torch.tensor([3.0, 1.0, -2.0, 4.0])
    monkeypatch.setattr(scan, "HEADS", 4)
    kept = []

    def train_epochs(task, heads, step):
        kept.extend(heads)
        return {"loss": torch.tensor(0.0), "scores": scores}

    monkeypatch.setattr(scan, "train_epochs", train_epochs)
    assert train_scan(task) is kept[2]


@pytest.mark.parametrize(("asked", "largest", "taken"), [(2, 128, 15), (30, 128, 30), (30, 20, 20)])
def test_steps_are_as_large_as_asked_for_between_five_per_cluster_and_the_number_of_scan(
    monkeypatch, asked, largest, taken
):
    monkeypatch.setattr(scan, "STEP_SIZE", largest)
    task, _ = blob_task(nn.Identity(), epochs=1, sub_batch_size=asked)
    assert {len(rows) for rows in record_rows(task, "weak", train_scan)} == {taken}  # near-equal parts of a batch of 60


def test_self_labelling_corrects_a_head_that_is_sure_of_most(monkeypatch):
    monkeypatch.setattr(scan, "SELF_LABEL_RATE", 0.02)
    task, truth = blob_task(nn.Identity(), epochs=20, lr_heads=0.02)
    wrong = 6 * torch.eye(CLUSTERS, SIZE)
    wrong[0, 1] = 5.5  # takes about half of the second blob for the first, and is unsure of it
    head = head_with(wrong)
    before = purity(predict(task, head), truth)
    trained = train_self_label(task, head)
    assert trained is head
    assert before < 0.97 < purity(predict(task, trained), truth)


def test_self_labelling_takes_whole_batches_of_strong_views_at_a_rate_of_its_own():
    task, _ = blob_task(nn.Identity(), epochs=1, lr_heads=0.5)
    weights = 6 * torch.eye(CLUSTERS, SIZE)
    head = head_with(weights)
    asked = record_rows(task, "plain", lambda task: train_self_label(task, head))
    assert [len(rows) for rows in asked] == [60, 60]
    moved = (head[0].weight - weights).abs().max().item()
    assert 0 < moved < 2.5 * scan.SELF_LABEL_RATE  # two steps of Adam, each of about the rate at most
    blank = replace(task, strong=lambda rows, randomness: torch.zeros(len(rows), SIZE))
    assert torch.equal(train_self_label(blank, head_with(weights))[0].weight, weights)  # these give it no gradient


def test_self_labelling_trains_the_backbone_and_reports_the_selected_share():
    logs: list[dict[str, float]] = []
    task, _ = blob_task(nn.Linear(SIZE, SIZE), logs, epochs=2)
    with torch.no_grad():
        task.backbone.weight.copy_(torch.eye(SIZE))
        task.backbone.bias.zero_()
    head = train_self_label(task, head_with(9 * torch.eye(CLUSTERS, SIZE)))
    assert not torch.equal(task.backbone.weight, torch.eye(SIZE))
    assert 0.9 < logs[0]["selected"] <= 1  # 9 * 2 against 0: sure of nearly all
    assert not head.training


@pytest.mark.parametrize(("threshold", "weights"), [(0.99, 0.1 * torch.ones(3, 8)), (1.0, 1000 * torch.randn(3, 8))])
def test_where_nothing_exceeds_the_threshold_the_weights_stay_and_nothing_is_nan(monkeypatch, threshold, weights):
    monkeypatch.setattr(scan, "THRESHOLD", threshold)
    logs: list[dict[str, float]] = []
    task, _ = blob_task(linear_backbone(), logs, epochs=2)
    head = head_with(weights)
    before = copy.deepcopy(head.state_dict()), copy.deepcopy(task.backbone.state_dict())
    train_self_label(task, head)
    after = head.state_dict(), task.backbone.state_dict()
    assert all(torch.equal(old[name], new[name]) for old, new in zip(before, after, strict=True) for name in old)
    assert [(log["loss"], log["selected"]) for log in logs] == [(0, 0)] * 2


def test_consistency_agrees_with_binary_cross_entropy_of_the_products(randomness):
    one, other = torch.randn(2, 30, 7, generator=randomness)
    products = (F.softmax(one, dim=1) * F.softmax(other, dim=1)).sum(dim=1)
    expected = F.binary_cross_entropy(products, torch.ones(30))
    assert scan_loss(one, other, 0.0).item() == pytest.approx(expected.item(), abs=1e-5)


def test_opposite_certainty_has_a_finite_loss_and_gradient():
    one = torch.tensor([[500.0, 0.0]], requires_grad=True)
    loss = scan_loss(one, torch.tensor([[0.0, 500.0]]), 0.0)
    loss.backward()
    # log products are 0 - 500 in both clusters: log(2 e^-500)
    assert loss.item() == pytest.approx(500 - math.log(2), abs=1e-3)
    assert torch.isfinite(one.grad).all()


def test_scan_loss_subtracts_the_weighted_entropy_of_the_mean_prediction():
    images = logits_of([0.9, 0.1], [0.3, 0.7])  # mean .6 and .4
    neighbours = logits_of([0.5, 0.5], [0.5, 0.5])  # every product is .5
    entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    assert scan_loss(images, neighbours, 5.0).item() == pytest.approx(math.log(2) - 5 * entropy, abs=1e-6)


def test_a_rare_label_weighs_as_much_as_a_frequent_one():
    logits = logits_of([0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.5, 0.5], [0.1, 0.9])
    labels = torch.tensor([0, 0, 0, 1, 1])
    mask = torch.tensor([True, True, True, True, False])
    # mean of label 0: -log .8; of label 1: -log .5 (the last sample is not trusted)
    expected = -(math.log(0.8) + math.log(0.5)) / 2
    assert balanced_cross_entropy(logits, labels, mask).item() == pytest.approx(expected, abs=1e-6)


def test_balanced_cross_entropy_agrees_with_class_weights_of_torch(randomness):
    logits = torch.randn(50, 6, generator=randomness)
    labels = torch.randint(4, (50,), generator=randomness)  # two clusters never occur
    mask = torch.rand(50, generator=randomness) < 0.6
    counts = np.bincount(labels[mask], minlength=6)
    weights = torch.tensor([mask.sum().item() / count if count else 1.0 for count in counts])
    expected = F.cross_entropy(logits[mask], labels[mask], weight=weights.float())
    assert balanced_cross_entropy(logits, labels, mask).item() == pytest.approx(expected.item(), abs=1e-5)


def test_nothing_trusted_gives_zero_and_a_zero_gradient():
    logits = torch.randn(4, 3, requires_grad=True)
    loss = balanced_cross_entropy(logits, torch.tensor([0, 1, 2, 0]), torch.zeros(4, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(4, 3))
