"""One, two and three processes train the same network: the same images are selected, and weights agree to rounding."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from cdc_plugin.config.resolve import ResolvedConfig, batch_sizes
from cdc_plugin.models.heads import ClusterHead
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.runtime import SINGLE, Distributed, Runtime, plan_shards
from cdc_plugin.training.steps import Views

COUNT, FEATURES, CLUSTERS = 151, 6, 4  # an odd number of images
VARIANTS = {
    "cdc": {},
    "fast": {"passes": "fast", "batch_size": 151, "sub_batch_size": 76},
    "adaptive": {"mini_clusters": 0},
    "single head": {"heads": "clu+cal"},
    "no stop-gradient": {"stop_gradient": False},
    "estimated sizes": {"sizes": "estimated"},
}


def settings(**changes) -> ResolvedConfig:
    usual = {"clusters": CLUSTERS, "hidden": 8, "mini_clusters": 12, "epochs": 2, "passes": "full", "seed": 3}
    usual |= {"batch_size": 76, "sub_batch_size": 25, "lr_heads": 3e-3, "lr_backbone": 2e-3, "sync_batchnorm": True}
    return ResolvedConfig(**{**usual, **changes})


class Network(nn.Module):
    """Convolutions with BatchNorm, and a weight without use, as some published networks have one.

    No bias stands in front of a BatchNorm layer: its gradient is rounding, which Adam would blow up to steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()),
            *(nn.Conv2d(5, FEATURES, 3, bias=False), nn.BatchNorm2d(FEATURES), nn.ReLU()),
        )
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layers(pixels).mean(dim=(2, 3))


def train(distributed: Distributed, changes: dict) -> dict:
    """Train in float64; return what was selected in every batch, and all weights."""
    config, runtime = settings(**changes), Runtime(torch.device("cpu"), distributed=distributed)
    torch.manual_seed(1)
    network, heads = Network().double(), [ClusterHead(FEATURES, 8, CLUSTERS).double() for _ in range(2)]
    refiner = Refiner(network, *heads, config, runtime, COUNT)
    kinds = torch.randn(CLUSTERS, 3, 8, 8, dtype=torch.float64)[torch.arange(COUNT) % CLUSTERS]
    masks, compute = [], refiner.compute_targets

    def batches(epoch: int, done: int) -> list[Views]:
        made, stream = [], torch.Generator().manual_seed(epoch)
        order = torch.randperm(COUNT, generator=stream)
        for rows in order.split(batch_sizes(COUNT, config.batch_size)):
            views = [kinds[rows] + torch.randn(kinds[rows].shape, generator=stream).double() for _ in range(3)]
            plan = plan_shards(len(rows), config.sub_batch_size, distributed.size)
            own = plan.owned[distributed.rank]
            made.append(Views(*(view[own] for view in views), rows))
        return made[done:]

    def computing(*arguments):
        targets = compute(*arguments)
        masks.append(targets.selection.mask.clone())
        return targets

    refiner.compute_targets = computing
    refiner.fit(batches, lambda stats: None, lambda stats: None)
    modules = zip(("backbone", "clustering", "calibration"), refiner.networks.modules(), strict=True)
    weights = {f"{part}.{name}": value for part, module in modules for name, value in module.state_dict().items()}
    return {"masks": masks, "weights": weights}


def work(rank: int, size: int, folder: str, variants: dict[str, dict]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for name, changes in variants.items():
        torch.save(train(Distributed(rank, size, rank), changes), Path(folder) / f"{name}.{rank}.pt")
    gc.collect()  # networks that a cycle keeps would keep the group and its threads until the interpreter ends
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict]]:
    """For each process what it selected and ended with, by variant."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(work, args=(request.param, str(folder), VARIANTS), nprocs=request.param)
    ranks = range(request.param)
    return [{name: torch.load(folder / f"{name}.{rank}.pt") for name in VARIANTS} for rank in ranks]


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_number_of_processes_selects_the_same_images_and_ends_alike(several, variant):
    alone = train(SINGLE, VARIANTS[variant])
    assert 0 < torch.cat(alone["masks"]).float().mean() < 1
    for process in several:
        found = process[variant]
        assert len(found["masks"]) == len(alone["masks"]) > 0
        assert all(torch.equal(*pair) for pair in zip(found["masks"], alone["masks"], strict=True))
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-9, msg=f"{variant}: {name}")


def test_statistics_of_each_process_alone_give_another_network_on_which_the_processes_agree(tmp_path):
    """The agreement above is the work of shared statistics, not of data too easy to tell the difference."""
    mp.spawn(work, args=(2, str(tmp_path), {"apart": {"sync_batchnorm": False}}), nprocs=2)
    first, second = (torch.load(tmp_path / f"apart.{rank}.pt") for rank in range(2))
    assert all(torch.equal(*pair) for pair in zip(first["masks"], second["masks"], strict=True))
    apart, alone = (run["weights"]["backbone.layers.0.weight"] for run in (first, train(SINGLE, {})))
    assert apart.isfinite().all()
    assert not torch.allclose(apart, alone, atol=1e-6)
