import numpy as np
import pytest
import torch

from cdc_plugin.core.estimate import FROZEN, TRAINED, estimate_accuracy, fit_temperature


@pytest.mark.parametrize("constants", [TRAINED, FROZEN])
def test_the_estimate_rises_with_both_signals_and_lies_in_its_interval(constants):
    grid = np.linspace(0.05, 1.0, 12)
    found = np.array(
        [[estimate_accuracy(c, p, clusters=7, images=5000, constants=constants).accuracy for p in grid] for c in grid]
    )
    assert (np.diff(found, axis=0) >= 0).all()
    assert (np.diff(found, axis=1) >= 0).all()
    for confidence in (0.0, 0.3, 1.0):
        estimate = estimate_accuracy(confidence, 0.8, clusters=4, images=5000, constants=constants)
        assert 0.25 < estimate.low < estimate.accuracy < estimate.high <= 1


def test_few_images_give_a_wide_interval():
    many, few = (estimate_accuracy(0.99, 0.99, clusters=5, images=count) for count in (900, 60))
    assert few.accuracy == many.accuracy
    assert few.low < many.low - 0.05


@pytest.mark.parametrize("level", [0.4, 0.6, 0.9, 0.97])
def test_a_temperature_moves_the_mean_confidence_to_the_level_and_no_image_to_another_cluster(level):
    logits = torch.randn(500, 5, generator=torch.Generator().manual_seed(0)) * 3
    probs = torch.softmax(logits / fit_temperature(logits, level), dim=1)
    assert probs.max(dim=1).values.mean().item() == pytest.approx(level, abs=1e-4)
    assert torch.equal(probs.argmax(dim=1), logits.argmax(dim=1))


def test_a_level_that_no_temperature_reaches_gives_the_nearest_one():
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert fit_temperature(logits, 0.5) == pytest.approx(20.0, rel=1e-3)
