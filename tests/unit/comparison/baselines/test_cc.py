import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cdc_plugin.comparison.baselines import cc
from cdc_plugin.comparison.baselines.cc import cluster_contrast, pair_contrast, train_cc
from tests.helpers.blob_tasks import blob_task, linear_backbone


def random_pair(rows: int = 5, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    randomness = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, rows, size, generator=randomness, dtype=torch.float64)
    return first, second


def contrast_by_loops(first: np.ndarray, second: np.ndarray, temperature: float) -> float:
    views = [[row / np.linalg.norm(row) for row in view] for view in (first, second)]
    losses = []
    for view in (0, 1):
        for i, row in enumerate(views[view]):
            positive = math.exp(row @ views[1 - view][i] / temperature)
            others = [math.exp(row @ other / temperature) for other in views[1 - view]]
            others += [math.exp(row @ other / temperature) for j, other in enumerate(views[view]) if j != i]
            losses.append(-math.log(positive / sum(others)))
    return sum(losses) / len(losses)


def test_two_different_strong_views_are_contrasted_at_the_temperatures_of_the_paper(monkeypatch):
    seen = []

    def record(first, second, temperature):
        seen.append((first.shape[1], torch.equal(first, second), temperature))
        return pair_contrast(first, second, temperature)

    monkeypatch.setattr(cc, "pair_contrast", record)
    train_cc(blob_task(linear_backbone(), epochs=1)[0])
    # Instances: 128 outputs; clusters: a column of 30 images each.
    assert set(seen) == {(128, False, 0.5), (30, False, 1.0)}


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0])
def test_contrast_agrees_with_loops_and_with_two_orthogonal_pairs_by_hand(temperature):
    # Every row has its partner at cosine 1 and the two rows of the other pair at cosine 0.
    rows, partner = torch.eye(2), math.exp(1 / temperature)
    assert pair_contrast(rows, rows, temperature).item() == pytest.approx(math.log((partner + 2) / partner), abs=1e-6)
    first, second = random_pair()
    expected = contrast_by_loops(first.numpy(), second.numpy(), temperature)
    assert pair_contrast(first, second, temperature).item() == pytest.approx(expected)


def test_cluster_contrast_agrees_with_loops():
    first, second = random_pair(12, 3)
    probs = [F.softmax(logits, dim=1).numpy() for logits in (first, second)]
    expected = contrast_by_loops(probs[0].T, probs[1].T, 0.7)
    for view in probs:
        shares = view.sum(axis=0) / view.sum()
        expected += sum(share * math.log(share) for share in shares)
    assert cluster_contrast(first, second, 0.7).item() == pytest.approx(expected)


def test_order_of_views_and_rows_and_their_norm_do_not_matter():
    first, second = random_pair()
    order = torch.tensor([3, 0, 4, 2, 1])
    norm = torch.arange(1.0, 6.0, dtype=torch.float64).unsqueeze(1)
    expected = pair_contrast(first, second, 0.5)
    torch.testing.assert_close(pair_contrast(second, first, 0.5), expected)
    torch.testing.assert_close(pair_contrast((first * norm)[order], (second / norm)[order], 0.5), expected)
    clusters = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(
        cluster_contrast(first[order][:, clusters], second[order][:, clusters], 1.0),
        cluster_contrast(first, second, 1.0),
    )


@pytest.mark.parametrize("size", [1e2, 1e30])
def test_clusters_without_any_probability_and_a_single_pair_leave_loss_and_gradient_finite(size):
    logits = torch.full((6, 4), -size)
    logits[:, 0] = size
    logits.requires_grad_()
    loss = cluster_contrast(logits, logits.detach(), 1.0) + pair_contrast(torch.zeros(2, 3), torch.zeros(2, 3), 0.5)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()
    alone = torch.randn(1, 3).requires_grad_()  # a single pair has nothing to be contrasted with
    loss = pair_contrast(alone, torch.randn(1, 3), 0.5)
    loss.backward()
    assert loss.item() == 0
    assert torch.isfinite(alone.grad).all()
