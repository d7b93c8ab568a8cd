"""The max-pool after a stem, guessed from BatchNorm statistics alone."""

import math

import pytest
import torch

from cdc_plugin.checkpoints.infer.batchnorm import NORMALISATIONS
from cdc_plugin.checkpoints.infer.from_weights import expected_activation, pool_by_weights
from cdc_plugin.models.architectures import build
from tests.helpers.trained_networks import network_that_saw, small_spec


def test_expected_activation_of_one_draw_is_the_rectified_gaussian_mean():
    shift, scale = torch.tensor([0.0, 1.0]), torch.tensor([1.0, -2.0])
    normal = torch.distributions.Normal(0.0, 1.0)
    ratio = shift / scale.abs()
    closed = shift * normal.cdf(ratio) + scale.abs() * normal.log_prob(ratio).exp()
    assert expected_activation(shift, scale, 1).tolist() == pytest.approx(closed.tolist(), abs=1e-5)
    assert expected_activation(shift, scale, 1)[0].item() == pytest.approx(1 / math.sqrt(2 * math.pi), abs=1e-5)


def test_expected_activation_of_two_draws_agrees_with_sampling():
    draws = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0)).amax(dim=1)
    sampled = torch.relu(0.3 + 0.5 * draws).mean().item()
    exact = expected_activation(torch.tensor([0.3]), torch.tensor([0.5]), 2).item()
    assert exact == pytest.approx(sampled, abs=3e-3)


@pytest.mark.parametrize("pool", [True, False])
def test_pool_is_guessed_without_images(images, pool):
    network = network_that_saw(images, small_spec(pool=pool), NORMALISATIONS["cifar10"])
    assert pool_by_weights(network.state_dict()).kept is pool


def test_untrained_statistics_give_no_clear_guess_and_no_pool():
    guess = pool_by_weights(build(small_spec(pool=True))[0].state_dict())
    assert not guess.kept
    assert not guess.clear
