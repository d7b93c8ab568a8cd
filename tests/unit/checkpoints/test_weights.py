"""Strict loading: nothing is left out in silence."""

import pytest
import torch
from torch import nn

from cdc_plugin.checkpoints.weights import WeightsMismatchError, compare, load_strictly, nearest
from cdc_plugin.errors import UserError


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def test_whole_state_dict_is_copied_and_half_precision_widened():
    source, target = network(), network()
    load_strictly(target, {key: value.half() for key, value in source.state_dict().items()}, "test")
    assert target[0].weight.dtype == torch.float32
    assert torch.equal(target[0].weight, source[0].weight.half().float())


def test_classifier_and_batch_counter_may_differ():
    state = network().state_dict() | {"fc.weight": torch.ones(2), "head.bias": torch.ones(2)}
    del state["1.num_batches_tracked"]
    assert not compare(network(), state)
    load_strictly(network(), state, "test")


def test_every_disagreement_is_counted_and_named_with_its_neighbour_and_nothing_is_copied():
    state, target = network().state_dict(), network()
    before = target[0].bias.clone()
    state["0.weights"] = state.pop("0.weight")
    state["1.bias"] = torch.zeros(5)
    with pytest.raises(UserError) as caught:
        load_strictly(target, state, "a.pth")
    assert torch.equal(target[0].bias, before)
    message = str(caught.value)
    assert "5 of 7 weights match, 1 missing, 1 unexpected, 1 misshapen" in message
    assert "missing 0.weight (near: 0.weights)" in message
    assert "shapes 1.bias (5,) for (4,)" in message
    assert "\n" not in message


def test_message_lists_five_names_of_a_kind_and_the_error_holds_all():
    state = network().state_dict() | {f"extra{number}": torch.ones(1) for number in range(9)}
    state["1.bias"] = torch.zeros(5)
    with pytest.raises(WeightsMismatchError, match=r"9 unexpected.*extra4") as caught:
        load_strictly(network(), state, "test")
    assert "extra5" not in str(caught.value)
    assert len(caught.value.differences.unexpected) == 9
    assert caught.value.shapes == {"1.bias": ((5,), (4,))}


def test_nearest_name_is_none_where_nothing_is_alike():
    assert nearest("conv1.weight", ["queue"]) is None
