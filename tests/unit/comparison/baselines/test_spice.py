import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.comparison.baselines import spice
from cdc_plugin.comparison.baselines.loop import MakeView
from cdc_plugin.comparison.baselines.spice import double_softmax_loss, label_by_prototypes, train_spice
from cdc_plugin.errors import ConfigError
from tests.helpers.blob_tasks import SIZE, blob_task, linear_backbone


@pytest.fixture(autouse=True)
def _few_heads(monkeypatch):
    monkeypatch.setattr(spice, "HEADS", 3)


def test_the_head_with_the_lowest_loss_over_the_whole_set_is_returned(monkeypatch):
    task, _ = blob_task(linear_backbone(), epochs=1)
    seen = []

    def pretend(heads, features):
        seen.extend(heads)
        assert features is task.features
        return torch.tensor([2.0, 3.0, 1.0])

    monkeypatch.setattr(spice, "_compute_head_losses", pretend)
    assert train_spice(task) is seen[2]


def test_every_batch_is_trained_on_eight_times_until_the_rate_is_nearly_zero(monkeypatch):
    kept = []

    class Recorded(spice.loop.BaselineOptimizer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            kept.append(self)

    monkeypatch.setattr(spice.loop, "BaselineOptimizer", Recorded)
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

    with pytest.raises(ConfigError, match="not finite in epoch 1"):  # of the strong views; weak ones give no loss
        train_spice(replace(task, weak=recorded("weak"), strong=recorded("strong")))
    for rows in asked.values():
        assert torch.cat(rows).sort().values.tolist() == list(range(task.image_count))


def labels_by_loops(features: np.ndarray, probs: np.ndarray) -> list[tuple[int, int]]:
    """(sample, label) pairs, one cluster after another, from the words of the paper."""
    batch, clusters = probs.shape
    size = batch // clusters
    unit = [row / np.linalg.norm(row) for row in features]
    pairs = []
    for cluster in range(clusters):
        best = sorted(range(batch), key=lambda i: -probs[i, cluster])[: size // 2]
        prototype = sum(unit[i] for i in best) / len(best)
        nearest = sorted(range(batch), key=lambda i: -float(prototype @ unit[i]))[:size]
        pairs += [(i, cluster) for i in nearest]
    return pairs


def test_two_clusters_of_eight_samples_by_hand():
    # B // C = 4 samples a cluster, 2 of them make the prototype.
    angles = torch.tensor([0.0, 10, 20, 30, 90, 80, 70, 40]).deg2rad()
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    first = [0.9, 0.8, 0.1, 0.2, 0.0, 0.1, 0.3, 0.4]
    probs = torch.tensor([[p, 1 - p] for p in first])
    chosen, labels = label_by_prototypes(features, probs)
    # Cluster 0: samples 0 and 1, prototype at 5 degrees, nearest are 0, 10, 20 and 30 degrees.
    # Cluster 1: sample 4 (1.0), then 2 and 5 (.9 each; the earlier wins): 90 and 20 degrees, so 55 degrees,
    # nearest are 40 and 70 (15 away), then 30 and 80 (25 away).
    assert labels.tolist() == [0] * 4 + [1] * 4
    assert [sorted(part.tolist()) for part in chosen.split(4)] == [[0, 1, 2, 3], [3, 5, 6, 7]]  # 4 has no label


def test_labels_agree_with_loops(randomness):
    features = torch.randn(60, 5, generator=randomness)
    probs = F.softmax(torch.randn(60, 4, generator=randomness), dim=1)
    chosen, labels = label_by_prototypes(features, probs)
    expected = labels_by_loops(features.double().numpy(), probs.numpy())
    assert list(zip(chosen.tolist(), labels.tolist(), strict=True)) == expected


def test_as_many_clusters_as_samples_leaves_one_sample_for_each_and_more_are_refused():
    probs = 0.6 * torch.eye(3) + 0.4 / 3
    chosen, labels = label_by_prototypes(torch.eye(3), probs)
    assert chosen.tolist() == labels.tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"a batch of 3 images cannot hold .* 4 clusters; pass batch_size=8"):
        label_by_prototypes(torch.ones(3, 2), torch.full((3, 4), 0.25))


def test_double_softmax_loss_by_hand_and_at_its_minimum():
    logits = torch.tensor([[0.75, 0.25]]).log()  # whose softmax is .75 and .25
    # softmax of (.75, .25) for label 0: 1 / (1 + e^-.5); for label 1: 1 / (1 + e^.5)
    assert double_softmax_loss(logits, torch.tensor([0])).item() == pytest.approx(math.log(1 + math.exp(-0.5)))
    assert double_softmax_loss(logits, torch.tensor([1])).item() == pytest.approx(math.log(1 + math.exp(0.5)))
    # The smallest value, where a prediction is right and sure.
    logits = torch.tensor([[1000.0, 0.0, 0.0, 0.0]], requires_grad=True)
    loss = double_softmax_loss(logits, torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(1 + 3 / math.e))
    assert torch.isfinite(logits.grad).all()
