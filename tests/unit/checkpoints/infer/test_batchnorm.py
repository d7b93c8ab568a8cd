"""The mismatch between images and what BatchNorm layers remember."""

import math

import pytest
import torch
from torch import nn

from cdc_plugin.checkpoints.infer.batchnorm import NORMALISATIONS, batchnorm_mismatch
from cdc_plugin.errors import CheckpointError
from tests.helpers.trained_networks import network_that_saw, small_spec


def test_mismatch_of_one_layer_agrees_with_the_sum_by_hand():
    layer = nn.BatchNorm2d(1, eps=0.0).eval()
    layer.running_mean.fill_(1.0)
    layer.running_var.fill_(4.0)
    values = torch.tensor([2.0, 4.0]).view(2, 1, 1, 1)  # mean 3, variance 1
    assert batchnorm_mismatch(layer, values) == pytest.approx(2 / 2 + math.log(4))


def test_mismatch_is_zero_for_what_was_seen_in_any_order_and_leaves_the_network_as_it_was(images):
    network = network_that_saw(images, small_spec(), NORMALISATIONS["none"]).train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    seen = images.float() / 255
    mismatch = batchnorm_mismatch(network, seen)
    assert mismatch < 0.02
    assert batchnorm_mismatch(network, seen.flip(0)) == pytest.approx(mismatch, abs=1e-4)
    assert batchnorm_mismatch(network, seen * 2) > 10 * mismatch
    assert network.training
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_network_without_batchnorm_cannot_be_compared():
    with pytest.raises(CheckpointError, match="no BatchNorm"):
        batchnorm_mismatch(nn.Conv2d(3, 2, 3), torch.zeros(1, 3, 8, 8))
