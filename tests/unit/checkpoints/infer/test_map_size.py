"""What BatchNorm statistics tell about the images of a ResNet."""

import pytest
import torch

from cdc_plugin.checkpoints.infer.from_weights import inner_share, last_side
from tests.helpers.checkpoint_builders.networks import CIFAR_STEM, LARGE_STEM, STL_STEM, resnet


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
