"""BatchNorm over the images of all processes is torch's BatchNorm over the whole batch."""

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from cdc_plugin.training.runtime import SINGLE, Distributed
from cdc_plugin.training.sync_batchnorm import convert_on_cuda, share_statistics
from tests.helpers.in_step import Silence, in_step

CPU = torch.device("cpu")
LAYERS = {
    "1d": (lambda: nn.BatchNorm1d(3), (11, 3)),
    "2d": (lambda: nn.BatchNorm2d(3), (11, 3, 4, 5)),
    "without weights": (lambda: nn.BatchNorm2d(3, affine=False), (11, 3, 2, 2)),
    "without memory": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (11, 3)),
    "with activation": (lambda: BatchNormAct2d(3), (11, 3, 4, 4)),
    "momentum": (lambda: nn.BatchNorm2d(3, momentum=0.4, eps=0.1), (11, 3, 2, 2)),
}


def run(layer: nn.Module, rows: Tensor, slope: Tensor, distributed: Distributed) -> dict[str, Tensor]:
    """Output and gradients of the rows, and what is summed over processes: gradients of weights; running statistics."""
    rows = rows.clone().requires_grad_()
    with share_statistics(distributed, CPU):
        output = layer(rows)
    (output * slope).sum().backward()
    weights = {f"grad {name}": distributed.all_reduce(p.grad.clone()) for name, p in layer.named_parameters()}
    return {"output": output.detach(), "rows": rows.grad, **weights, **dict(layer.named_buffers())}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shared_statistics_are_those_of_the_whole_batch(kind, size):
    build, shape = LAYERS[kind]
    stream = torch.Generator().manual_seed(0)
    rows, slope = (torch.randn(shape, generator=stream, dtype=torch.float64) * 3 + 5 for _ in range(2))
    expected = run(build().double().train(), rows, slope, SINGLE)

    def work(distributed: Distributed) -> dict[str, Tensor]:
        own = distributed.own_shard(len(rows))
        with torch.random.fork_rng():
            found = run(build().double().train(), rows[own], slope[own], distributed)
        shards = distributed.shards_of(len(rows))
        return {
            name: distributed.gather(value, shards) if name in ("output", "rows") else value
            for name, value in found.items()
        }

    for found in in_step(size, work):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if name != "num_batches_tracked":
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=f"{kind}: {name}")


def test_half_precision_goes_in_and_comes_out_but_sums_are_in_full():
    rows = (torch.randn(64, 3, generator=torch.Generator().manual_seed(1)) + 300).bfloat16()
    expected = nn.BatchNorm1d(3).train()(rows.float())

    def work(distributed: Distributed) -> Tensor:
        with share_statistics(distributed, CPU):
            return nn.BatchNorm1d(3).train()(rows[distributed.own_shard(64)])

    found = in_step(2, work)
    assert {part.dtype for part in found} == {torch.bfloat16}
    torch.testing.assert_close(torch.cat(found).float(), expected, rtol=0.02, atol=0.02)


def test_layers_in_evaluation_mode_and_single_processes_exchange_nothing(monkeypatch):
    monkeypatch.setattr("cdc_plugin.training.runtime.dist", Silence())
    rows = torch.randn(6, 3)
    with share_statistics(Distributed(0, 2), CPU):
        nn.BatchNorm1d(3).eval()(rows)
    with share_statistics(SINGLE, CPU):
        nn.BatchNorm1d(3).train()(rows)


def test_layers_are_replaced_on_cuda_only():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), BatchNormAct2d(4))
    assert convert_on_cuda(network, CPU) is network
    assert type(network[1]) is nn.BatchNorm2d
    converted = convert_on_cuda(network, torch.device("cuda"))
    assert isinstance(converted[1], nn.SyncBatchNorm)
    assert isinstance(converted[2], nn.SyncBatchNorm)
    assert converted[2].act is network[2].act  # timm's variant keeps its activation
