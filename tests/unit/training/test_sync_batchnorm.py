"""BatchNorm over the images of several processes: as torch's over all of them, and the same bits where it is exact."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cdc_plugin.training.exact import sum_gradients
from torch import Tensor, nn

from cdc_plugin.training import distributed as distributed_module
from cdc_plugin.training.distributed import SINGLE, Distributed, Rows, deal
from cdc_plugin.training.sync_batchnorm import synchronised
from tests.helpers.in_step import Silence, in_step

Results = dict[str, Tensor]


def randomly(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slopes(shape: torch.Size) -> Tensor:
    return randomly(*shape, seed=9)


def with_weights(layer: nn.Module) -> nn.Module:
    """Weights and statistics that are unlike those of a fresh layer."""
    for number, tensor in enumerate([*layer.parameters(), *layer.buffers()]):
        if tensor.is_floating_point():
            tensor.data.copy_(randomly(*tensor.shape, seed=number).abs() / 2 + 0.3)
    return layer


def after(network: nn.Module, output: Tensor, rows: Tensor, whole: Callable[[Tensor], Tensor], total: Any) -> Results:
    """All that a pass forth and back has given, of all processes together."""
    found = {"output": whole(output.detach()), "rows": whole(rows.grad)}
    found |= {f"slope of {name}": total(weight.grad) for name, weight in network.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in network.named_buffers()}


def in_double(network: nn.Module, rows: Tensor) -> Results:
    """torch's results on all rows, in float64."""
    network, rows = copy.deepcopy(network).double(), rows.double().requires_grad_()
    output = network(rows)
    output.backward(slopes(output.shape).double())
    return after(network, output, rows, lambda tensor: tensor, lambda tensor: tensor)


def by_processes(
    network: nn.Module,
    rows: Tensor,
    size: int,
    exact: bool = True,
    images: int | None = None,
    layout: torch.memory_format = torch.contiguous_format,
) -> Results:
    """Results of so many processes; without ``images``, each row is one."""
    count = images or len(rows)
    windows = len(rows) // count

    def work(distributed: Distributed) -> Results:
        own_network = copy.deepcopy(network)
        plan_shards_of = deal(count, 1, distributed).whole(distributed.rank)
        shares = [(share[:, None] * windows + torch.arange(windows)).flatten() for share in plan_shards_of.shares]
        own = rows[shares[distributed.rank]].contiguous(memory_format=layout).requires_grad_()
        with synchronised(distributed, True, plan_shards_of):
            output = own_network(own)
        # All slopes are drawn, so that they do not depend on who has which.
        output.backward(slopes(torch.Size([len(rows), *output.shape[1:]]))[shares[distributed.rank]])
        if exact:
            sum_gradients(distributed, own_network.parameters())
        total = (lambda tensor: tensor) if exact else distributed.total
        return after(own_network, output, own, lambda tensor: distributed.gather(tensor, shares), total)

    return in_step(size, work, exact)[0]


def assert_close(found: Results, expected: Results, tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name].double(),
            tensor.double(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def assert_same_bits(found: Results, expected: Results) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


LAYERS = {
    "images": (lambda: nn.BatchNorm2d(4), (4, 5, 6)),
    "sequences": (lambda: nn.BatchNorm1d(4), (4, 7)),
    "volumes": (lambda: nn.BatchNorm3d(4), (4, 2, 3, 2)),
    "features": (lambda: nn.BatchNorm1d(4), (4,)),
    "without weights": (lambda: nn.BatchNorm2d(4, affine=False), (4, 5, 6)),
    "features without weights": (lambda: nn.BatchNorm1d(4, affine=False), (4,)),
    "without statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 5, 6)),
    "other constants": (lambda: nn.BatchNorm2d(4, eps=0.1, momentum=0.3), (4, 5, 6)),
    "cumulative statistics": (lambda: nn.BatchNorm2d(4, momentum=None), (4, 5, 6)),
}


def layer_and_rows(name: str, count: int) -> tuple[nn.Module, Tensor]:
    make, shape = LAYERS[name]
    return with_weights(make()), 2 * randomly(count, *shape, seed=5) + 3


def test_two_numbers_by_hand():
    layer = nn.BatchNorm1d(1, eps=0.0)
    rows = torch.tensor([[1.0], [3.0]], requires_grad=True)
    with synchronised(Distributed(exact=True), True, deal(2, 1, Distributed(exact=True)).whole(0)):
        output = layer(rows)
    assert output.tolist() == [[-1.0], [1.0]]  # the mean is 2, the variance 1
    assert layer.running_mean.item() == pytest.approx(0.2)
    assert layer.running_var.item() == pytest.approx(0.9 + 0.1 * 2)  # the unbiased variance is 2
    (output * torch.tensor([[3.0], [7.0]])).sum().backward()
    assert layer.weight.grad.tolist() == [4.0]  # -3 + 7
    assert layer.bias.grad.tolist() == [10.0]
    assert rows.grad.tolist() == [[0.0], [0.0]]  # two numbers are always normalised to -1 and 1


@pytest.mark.parametrize("exact", [False, True], ids=["near", "exact"])
@pytest.mark.parametrize("name", LAYERS)
def test_any_layer_gives_what_torch_gives_on_all_rows_in_double_precision(name, exact):
    layer, rows = layer_and_rows(name, 23)
    expected = in_double(layer, rows)
    for size in (1, 2, 3):
        assert_close(by_processes(layer, rows, size, exact), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_any_number_of_processes_gives_the_same_bits(name):
    for count in (23, 75):
        layer, rows = layer_and_rows(name, count)
        alone = by_processes(layer, rows, 1)
        for size in (2, 3):
            assert_same_bits(by_processes(layer, rows, size), alone)


def small_network() -> nn.Module:
    layers = [
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=4),
        nn.BatchNorm2d(8, affine=False),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, 5, bias=False),
    ]
    return with_weights(nn.Sequential(*layers))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_network_of_all_kinds_of_layers_gives_the_same_bits_in_any_number_of_processes(layout):
    network, rows = small_network().to(memory_format=layout), randomly(37, 3, 12, 12)
    alone = by_processes(network, rows, 1, layout=layout)
    assert_close(alone, in_double(network, rows))
    for size in (2, 3, 8):
        assert_same_bits(by_processes(network, rows, size, layout=layout), alone)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("side", [1, 7, 32])
def test_a_process_with_a_single_image_sums_it_as_others_would(side, layout):
    layer, rows = with_weights(nn.BatchNorm2d(16)), randomly(3, 16, side, side) + 3
    alone = by_processes(layer, rows, 1, layout=layout)
    for size in (2, 3):
        assert_same_bits(by_processes(layer, rows, size, layout=layout), alone)


def test_without_exactness_a_network_is_the_same_up_to_rounding():
    network, rows = small_network(), randomly(37, 3, 12, 12)
    expected = in_double(network, rows)
    for size in (1, 2, 3):
        assert_close(by_processes(network, rows, size, exact=False), expected)


@pytest.mark.parametrize("exact", [False, True], ids=["near", "exact"])
def test_windows_of_images_are_normalised_together(exact):
    layer, rows = with_weights(nn.BatchNorm1d(4)), randomly(23 * 6, 4, seed=3)
    expected = in_double(layer, rows)
    for size in (1, 2, 3):
        assert_close(by_processes(layer, rows, size, exact, images=23), expected)


def test_windows_of_images_pass_convolutions_and_batchnorm_with_the_same_bits():
    network = with_weights(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)))
    rows = randomly(23 * 4, 3, 6, 6)
    alone = by_processes(network, rows, 1, images=23)
    assert_close(alone, in_double(network, rows))
    for size in (2, 3):
        assert_same_bits(by_processes(network, rows, size, images=23), alone)


def test_a_process_without_images_takes_part_in_batchnorm():
    layer, rows = with_weights(nn.BatchNorm2d(4)), randomly(2, 4, 5, 6)
    expected = in_double(layer, rows)
    for exact in (False, True):
        assert_close(by_processes(layer, rows, 3, exact), expected)


def test_numbers_far_from_zero_keep_their_digits():
    layer, rows = nn.BatchNorm2d(4), randomly(40, 4, 9, 9) + 500
    assert_close(by_processes(layer, rows, 2), in_double(layer, rows), tolerance=1e-4)


def test_stretching_and_shifting_the_rows_changes_nothing():
    layer, rows = nn.BatchNorm2d(4, eps=0.0), randomly(20, 4, 5, 6)
    usual, other = (by_processes(layer, each, 2)["output"] for each in (rows, 8 * rows - 3))
    torch.testing.assert_close(other, usual, rtol=1e-5, atol=1e-5)


def test_a_single_number_is_its_own_mean():
    layer = with_weights(nn.BatchNorm1d(2))
    statistics = copy.deepcopy(layer.state_dict())
    with synchronised(Distributed(exact=True), True, Rows([torch.arange(1)], [1])):
        output = layer(torch.tensor([[5.0, -3.0]]))
    torch.testing.assert_close(output[0], layer.bias, rtol=0, atol=1e-3)  # rounding, over the root of epsilon
    expected = 0.9 * statistics["running_mean"] + 0.1 * torch.tensor([5.0, -3.0])
    torch.testing.assert_close(layer.running_mean, expected)
    torch.testing.assert_close(layer.running_var, 0.9 * statistics["running_var"])


def test_layers_in_evaluation_mode_are_left_alone(monkeypatch):
    monkeypatch.setattr(distributed_module, "dist", Silence())
    network, rows = small_network().eval(), randomly(20, 3, 12, 12)
    before, expected = copy.deepcopy(network.state_dict()), network(rows)
    with synchronised(Distributed(0, 2), True, deal(20, 1, Distributed(0, 2)).whole(0)):
        output = network(rows)
    assert torch.equal(output, expected)
    assert_same_bits(network.state_dict(), before)


def test_the_function_that_layers_of_others_call_is_caught_however_it_is_called():
    rows, weight = randomly(6, 3, 4, 4), torch.tensor([1.0, 2.0, 3.0])
    expected = F.batch_norm(rows.double(), None, None, weight.double(), None, True).float()
    calls = [
        lambda x: F.batch_norm(x, None, None, weight, None, True, 0.1, 1e-5),
        lambda x: F.batch_norm(x, running_mean=None, running_var=None, weight=weight, training=True),
    ]

    def work(distributed: Distributed) -> list[Tensor]:
        plan_shards_of = deal(6, 1, distributed).whole(distributed.rank)
        with synchronised(distributed, None, plan_shards_of):
            return [
                distributed.gather(call(rows[plan_shards_of.shares[distributed.rank]]), plan_shards_of.shares)
                for call in calls
            ]

    for output in in_step(2, work)[1]:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "asked", "open_"), [(1, None, False), (1, True, True), (2, None, True), (2, True, True), (2, False, False)]
)
def test_statistics_are_shared_where_there_are_several_processes_or_when_asked(size, asked, open_):
    found = synchronised(Distributed(size=size), asked, Rows([torch.arange(2)], [2]))
    assert isinstance(found, contextlib.nullcontext) is not open_


def test_after_it_is_closed_nothing_is_caught_any_more(monkeypatch):
    layer, rows = nn.BatchNorm1d(3), randomly(8, 3)
    expected = copy.deepcopy(layer)(rows)
    with synchronised(SINGLE, True, deal(8, 1, SINGLE).whole(0)):
        layer(rows)
    monkeypatch.setattr("cdc_plugin.training.sync_batchnorm._batch_norm", lambda *_, **__: pytest.fail("still caught"))
    assert torch.equal(copy.deepcopy(layer)(rows), expected)


@pytest.mark.parametrize("exact", [False, True], ids=["near", "exact"])
def test_half_precision_comes_out_as_it_went_in_and_is_computed_in_single(exact):
    layer, rows = with_weights(nn.BatchNorm2d(4)), randomly(16, 4, 5, 6) + 3
    halves = rows.bfloat16().requires_grad_()
    with synchronised(Distributed(exact=exact), True, deal(16, 1, Distributed(exact=exact)).whole(0)):
        output = layer(halves)
    output.sum().backward()
    assert output.dtype == halves.grad.dtype == torch.bfloat16
    assert layer.running_mean.dtype == layer.weight.grad.dtype == torch.float32
    expected = F.batch_norm(halves.detach().double(), None, None, layer.weight.double(), layer.bias.double(), True)
    torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=1e-6)
