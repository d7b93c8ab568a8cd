import math

import numpy as np
import pytest
import torch

from cdc_plugin.comparison.baselines.turtle import fit_classifiers, label_loss


def test_the_loss_agrees_with_loops_over_two_spaces(randomness):
    labels, logits = (
        [torch.randn(5, 3, generator=randomness).double() for _ in range(2)],
        [torch.randn(5, 3, generator=randomness).double() for _ in range(2)],
    )
    labels = [each.softmax(dim=1) for each in labels]
    expected = 0.0
    for each in logits:
        for row in range(5):
            total = sum(math.exp(value) for value in each[row])
            for c in range(3):
                mean = (labels[0][row, c] + labels[1][row, c]) / 2
                expected -= float(mean) * math.log(math.exp(each[row, c]) / total) / 5
    for each in labels:
        for c in range(3):
            share = sum(float(each[row, c]) for row in range(5)) / 5
            expected += 10 * share * math.log(share)
    assert label_loss(labels, logits).item() == pytest.approx(expected)


def test_classifiers_take_ten_steps_of_adam_on_soft_labels_from_random_weights(randomness):
    space = torch.randn(6, 4, generator=randomness)
    labels = torch.randn(6, 3, generator=randomness).softmax(dim=1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        (found,) = fit_classifiers([space], labels)
        torch.manual_seed(3)
        layer = torch.nn.Linear(4, 3)
    rows = np.hstack([space.numpy(), np.ones((6, 1))]).astype(np.float64)
    weights = np.hstack([layer.weight.detach().numpy(), layer.bias.detach().numpy()[:, None]]).astype(np.float64)
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for step in range(1, 11):
        probs = np.exp(rows @ weights.T)
        probs /= probs.sum(axis=1, keepdims=True)
        gradient = (probs - labels.numpy()).T @ rows / 6
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        weights -= 1e-3 * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
    np.testing.assert_allclose(found.numpy(), rows @ weights.T, atol=1e-5)
    assert not found.requires_grad  # the labels see them as constants
