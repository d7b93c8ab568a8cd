"""What the BatchNorm statistics in a ResNet's weights tell: the max-pool after its stem, and the size of its images."""

import math

import pytest
import torch

from cdc_plugin.checkpoints.infer.batchnorm import NORMALISATIONS
from cdc_plugin.checkpoints.infer.from_weights import expected_activation, inner_share, last_side, pool_by_weights
from cdc_plugin.models.architectures import build
from tests.helpers.checkpoint_builders.networks import CIFAR_STEM, LARGE_STEM, STL_STEM, resnet
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


@pytest.mark.parametrize(
    ("stem", "size", "side"),
    [
        (CIFAR_STEM, 32, 4),
        (CIFAR_STEM | {"padding": 2}, 32, 5),
        (STL_STEM, 96, 7),
        (STL_STEM, 32, 3),
        (LARGE_STEM, 64, 2),
        (LARGE_STEM, 96, 3),
        (LARGE_STEM, 224, 7),
    ],
)
def test_side_of_the_last_maps_is_that_of_the_network(stem, size, side):
    maps = []
    network = resnet(stem, 32)
    network.layer4.register_forward_hook(lambda _module, _given, found: maps.append(found.shape[-1]))
    with torch.no_grad():
        network(torch.zeros(1, 3, size, size))
    assert last_side(stem, size) == side == maps[0]


@pytest.mark.parametrize(("stem", "size"), [(CIFAR_STEM, 32), (STL_STEM, 96), (LARGE_STEM, 64), (LARGE_STEM, 96)])
def test_size_of_the_images_is_told_by_the_weights_alone(stem, size):
    found = inner_share(resnet(stem, size).state_dict())
    side = last_side(stem, size)
    assert found == pytest.approx(1 - 1 / side, abs=0.05)


def test_statistics_as_initialised_and_missing_ones_say_nothing():
    state = resnet(CIFAR_STEM, 32).state_dict()
    fresh = {key: torch.zeros_like(v) if key.endswith("running_mean") else v for key, v in state.items()}
    assert inner_share(fresh) is None
    assert inner_share({key: value for key, value in state.items() if "bn1.bias" not in key}) is None
    assert inner_share({key: value.flatten() for key, value in state.items()}) is None
