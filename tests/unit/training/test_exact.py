"""Convolutions and linear layers of an exact distributed: as torch's, and the same bits for any number of processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.training import distributed as distributed_module
from cdc_plugin.training.device import autocast
from cdc_plugin.training.distributed import Distributed, deal
from cdc_plugin.training.exact import PIECEWISE, piecewise, sum_gradients
from cdc_plugin.training.sync_batchnorm import synchronised
from tests.helpers.in_step import Silence, in_step

Gradients = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A layer: its function, the shapes of a row and of its weight, and whatever else it takes."""

    function: Callable[..., Tensor]
    row: tuple[int, ...]
    weight: tuple[int, ...]
    bias: bool = True
    more: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)

    def tensors(self, count: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Rows, weight, bias, and the slope of a loss at each output."""
        randomness = torch.Generator().manual_seed(count)
        rows, weight = (torch.randn(*shape, generator=randomness) for shape in ((count, *self.row), self.weight))
        bias = torch.randn(self.weight[0], generator=randomness) if self.bias else None
        output = self.function(rows, weight, bias, *self.more, **self.named)
        return rows, weight, bias, torch.randn(output.shape, generator=randomness)


CASES = {
    "linear": Case(F.linear, (7,), (5, 7)),
    "linear without bias": Case(F.linear, (7,), (5, 7), bias=False),
    "linear on tokens": Case(F.linear, (4, 7), (5, 7)),
    "conv1d": Case(F.conv1d, (3, 11), (6, 3, 4)),
    "conv2d": Case(F.conv2d, (3, 9, 8), (6, 3, 3, 3)),
    "conv2d without bias": Case(F.conv2d, (3, 9, 8), (6, 3, 3, 3), bias=False),
    "stride and padding": Case(F.conv2d, (3, 9, 8), (6, 3, 3, 3), more=(2, 1)),
    "groups": Case(F.conv2d, (4, 9, 8), (6, 2, 3, 3), more=(1, 0, 1, 2)),
    "every channel on its own, dilated, by names": Case(
        F.conv2d, (4, 9, 8), (4, 1, 3, 3), bias=False, named={"groups": 4, "dilation": 2, "padding": "same"}
    ),
    "conv3d": Case(F.conv3d, (2, 4, 5, 4), (3, 2, 2, 2, 2), more=((1, 2, 1),)),
}


def in_double(case: Case, count: int) -> tuple[Tensor, Gradients]:
    """Output and gradients of all rows by torch, in float64."""
    *given, slope = case.tensors(count)
    leaves = [each.double().requires_grad_() for each in given if each is not None]
    output = case.function(*leaves, *([] if case.bias else [None]), *case.more, **case.named)
    return output.detach(), torch.autograd.grad(output, leaves, slope.double())


def by_processes(case: Case, count: int, size: int) -> tuple[Tensor, Gradients]:
    """The same from so many processes: the gradients of rows in order, those of weights summed."""

    def work(distributed: Distributed) -> tuple[Tensor, Gradients]:
        rows, weight, bias, slope = case.tensors(count)
        plan_shards_of = deal(count, 1, distributed).whole(distributed.rank)
        own = plan_shards_of.shares[distributed.rank]
        leaves = [each.clone().requires_grad_() for each in (rows[own], weight, bias) if each is not None]
        arguments = (*leaves, *([] if case.bias else [None]), *case.more)
        output = piecewise(distributed, plan_shards_of.pieces, case.function, arguments, case.named)
        output.backward(slope[own])
        sum_gradients(distributed, leaves[1:])
        whole = [leaf.grad for leaf in leaves[1:]]
        return distributed.gather(output.detach(), plan_shards_of.shares), (
            distributed.gather(leaves[0].grad, plan_shards_of.shares),
            *whole,
        )

    return in_step(size, work, exact=True)[0]


def test_a_linear_layer_by_hand():
    rows, weight, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, -1.0]]), torch.tensor([5.0])
    leaves = [each.requires_grad_() for each in (rows, weight, bias)]
    output = piecewise(Distributed(exact=True), [1, 1], F.linear, tuple(leaves), {})
    assert output.tolist() == [[4.0], [4.0]]
    output.backward(torch.tensor([[1.0], [10.0]]))
    sum_gradients(Distributed(exact=True), leaves[1:])
    assert [leaf.grad.tolist() for leaf in leaves] == [[[1.0, -1.0], [10.0, -10.0]], [[31.0, 42.0]], [11.0]]


@pytest.mark.parametrize("name", CASES)
def test_any_layer_gives_what_torch_gives_in_double_precision(name):
    (output, gradients), (expected, known) = by_processes(CASES[name], 21, 1), in_double(CASES[name], 21)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert len(gradients) == len(known)
    for found, right in zip(gradients, known, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes_gives_the_same_bits(name):
    for count in (21, 75):  # shares are unequal, and the last piece of 75 is smaller than the others
        alone = by_processes(CASES[name], count, 1)
        for size in (2, 3):
            several = by_processes(CASES[name], count, size)
            assert torch.equal(several[0], alone[0])
            assert all(torch.equal(*pair) for pair in zip(several[1], alone[1], strict=True))


def test_the_gradient_of_a_weight_is_summed_once_for_all_processes():
    def work(distributed: Distributed) -> list[Any]:
        leaf, unused, fixed = torch.ones(1, 2, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(1, 2)
        rows = torch.full((2, 2), float(distributed.rank + 1))
        for _ in range(2):  # what is summed is not summed again
            leaf.grad = None
            (piecewise(distributed, [2], F.linear, (rows, leaf), {}).sum() + leaf.sum()).backward()
            sum_gradients(distributed, [leaf, unused, fixed])
        return [leaf.grad.tolist(), unused.grad.tolist(), fixed.grad]

    assert in_step(3, work, exact=True) == [[[[15.0, 15.0]], [0.0, 0.0, 0.0], None]] * 3


def test_a_weight_that_is_computed_from_others_passes_its_gradient_on():
    def work(distributed: Distributed) -> list[float]:
        leaf = torch.ones(1, 2, requires_grad=True)
        rows = torch.full((2 * distributed.rank, 2), float(distributed.rank + 1))  # the first process has none
        piecewise(distributed, [2 * distributed.rank], F.linear, (rows, 3 * leaf), {}).sum().backward()
        sum_gradients(distributed, [leaf])
        return leaf.grad.tolist()

    assert in_step(3, work, exact=True) == [[[48.0, 48.0]]] * 3  # 3 * (2 * 2 + 4 * 3)


def test_rows_that_need_no_gradient_get_none_and_weights_that_stay_fixed_neither():
    rows, weight = torch.randn(6, 3), torch.randn(2, 3)
    learnt = weight.clone().requires_grad_()
    piecewise(Distributed(exact=True), [3, 3], F.linear, (rows, learnt), {}).sum().backward()
    sum_gradients(Distributed(exact=True), [learnt])
    torch.testing.assert_close(learnt.grad, rows.sum(dim=0).expand(2, 3))
    leaf = rows.clone().requires_grad_()
    piecewise(Distributed(exact=True), [3, 3], F.linear, (leaf, weight), {}).sum().backward()
    torch.testing.assert_close(leaf.grad, weight.sum(dim=0).expand(6, 3))
    assert weight.grad is None
    assert not weight.__dict__


def test_windows_of_an_image_are_rows_that_stay_together():
    seen: list[int] = []

    def work(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(len(rows))
        return F.linear(rows, weight, bias)

    rows = torch.randn(20, 3)  # four windows of each of five images, which are in pieces of two, two and one
    output = piecewise(Distributed(exact=True), [2, 2, 1], work, (rows, torch.eye(3)), {})
    assert torch.equal(output, rows)
    assert seen == [8, 8, 4]


@pytest.mark.parametrize("count", [1, 13])
def test_rows_that_are_no_images_are_left_to_torch(monkeypatch, count):
    monkeypatch.setattr(distributed_module, "dist", Silence())
    rows, weight = torch.randn(count, 3), torch.randn(2, 3, requires_grad=True)
    output = piecewise(Distributed(0, 2, exact=True), [2, 2, 1], F.linear, (rows, weight), {})
    assert torch.equal(output, F.linear(rows, weight))
    output.sum().backward()
    torch.testing.assert_close(weight.grad, rows.sum(dim=0).expand(2, 3))


def test_what_torch_refuses_is_refused():
    with pytest.raises(RuntimeError, match="channels"):
        piecewise(Distributed(exact=True), [2, 2], F.conv2d, (torch.zeros(4, 2, 5, 5), torch.zeros(1, 3, 3, 3)), {})


def test_the_layers_that_are_cut_in_pieces_are_those_that_the_cases_try():
    assert {case.function for case in CASES.values()} == set(PIECEWISE)


def slope_of_weight(layer: nn.Module, rows: Tensor, distributed: Distributed, precision: str = "float32") -> Tensor:
    """What all processes together know of the slope of the first weight, at the sum of all outputs."""
    plan_shards_of = deal(len(rows), 1, distributed).whole(distributed.rank)
    with autocast(torch.device("cpu"), precision), synchronised(distributed, True, plan_shards_of):
        output = layer(rows[plan_shards_of.shares[distributed.rank]])
    output.float().sum().backward()
    sum_gradients(distributed, layer.parameters())
    return next(layer.parameters()).grad


class WithTable(nn.Module):
    """A linear layer on a table that all images share, as relative positions of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.of_table, self.of_images, self.table = nn.Linear(2, 4), nn.Linear(3, 4), torch.arange(26.0).view(13, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.of_images(rows) + self.of_table(self.table).mean(dim=0)


def test_a_table_that_has_by_chance_as_many_rows_as_a_process_has_images_keeps_all_in_step():
    rows = torch.randn(27, 3)  # the first process has 14 images, the second 13
    found = in_step(2, lambda distributed: slope_of_weight(WithTable(), rows, distributed), exact=True)
    for slope in found:
        torch.testing.assert_close(slope, 27 * WithTable().table.mean(dim=0).expand(4, 2))


def test_a_process_without_images_takes_part_in_the_sums_of_the_others():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = in_step(3, lambda distributed: slope_of_weight(nn.Linear(2, 1), rows, distributed), exact=True)
    assert [slope.tolist() for slope in found] == [[[4.0, 6.0]]] * 3


def test_a_network_learns_in_half_precision():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3), nn.Tanh(), nn.Flatten())
    rows = torch.randn(20, 3, 8, 8)
    full, half = (
        slope_of_weight(copy.deepcopy(network), rows, Distributed(exact=True), precision)
        for precision in ("float32", "bfloat16")
    )
    assert half.dtype == torch.float32
    assert not torch.equal(half, full)
    torch.testing.assert_close(half, full, rtol=0.1, atol=0.1 * full.abs().max().item())
