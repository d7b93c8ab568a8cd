"""Where a backbone computes."""

import pytest
import torch
from torch import nn

from cdc_plugin import Backbone
from cdc_plugin.errors import UserError

CPU = torch.device("cpu")


def around(*layers: nn.Module) -> Backbone:
    return Backbone(nn.Sequential(*layers), 4, [0.5] * 3, [0.5] * 3, 32)


@pytest.mark.parametrize(
    ("layer", "trained", "left"),
    [
        (nn.Conv2d(8, 16, 1, stride=2), True, 1),
        (nn.Conv2d(8, 16, 1, stride=2), False, 2),
        (nn.Conv2d(16, 16, 1, stride=2), True, 2),
        (nn.Conv2d(8, 16, 3, stride=2), True, 2),
        (nn.Conv2d(8, 16, 1), True, 2),
    ],
    ids=str,
)
def test_layers_that_would_crash_are_trained_by_one_thread(two_threads, caplog, layer, trained, left):
    around(nn.Conv2d(3, 8, 3), layer).place(CPU, False, trained)
    assert torch.get_num_threads() == left
    assert ("one thread" in caplog.text) == (left == 1)


def test_convolutions_are_kept_channels_last():
    backbone = around(nn.Conv2d(3, 8, 3))
    backbone.place(CPU, False, True)
    assert backbone.module[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("mean", "std", "size"),
    [([float("nan")] * 3, [1.0] * 3, 32), ([0.0] * 3, [float("inf")] * 3, 32), ([0.0] * 3, [1.0] * 3, 99_999)],
)
def test_a_convention_that_no_network_has_is_refused(mean, std, size):
    with pytest.raises(UserError, match=r"mean and std|input_size"):
        Backbone(nn.Identity(), 4, mean, std, size)
