"""Small refiners, their batches and what they hold."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cdc_plugin.config.resolve import ResolvedConfig
from cdc_plugin.core.selection.base import Selection, SelectionInput, Selector
from cdc_plugin.models.heads import ClusterHead
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.runtime import Runtime
from cdc_plugin.training.steps import Views

CPU = torch.device("cpu")


def settings(**changes) -> ResolvedConfig:
    usual = {"clusters": 3, "mini_clusters": 6, "hidden": 8, "epochs": 3, "batch_size": 24, "sub_batch_size": 12}
    return ResolvedConfig(**{**usual, "lr_heads": 1e-2, "lr_backbone": 1e-2, **changes})


def with_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))


def without_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 5))


def with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 5))


def make(
    config: ResolvedConfig, backbone: Callable[[], nn.Module] = with_batchnorm, features: int = 5, seed: int = 0
) -> Refiner:
    torch.manual_seed(seed)
    network = backbone()
    heads = [ClusterHead(features, config.hidden, config.clusters or 2) for _ in range(2)]
    return Refiner(network, *heads, config, Runtime(CPU, config.precision), image_count=24)


def views(seed: int = 0, count: int = 24, size: int = 10) -> Views:
    randomness = torch.Generator().manual_seed(seed)
    plain = torch.randn(3, size, generator=randomness)[torch.arange(count) % 3] * 2
    noise = [0.1 * torch.randn(count, size, generator=randomness) for _ in range(3)]
    return Views(*(plain + n for n in noise), torch.arange(count))


def batches(epoch: int, done: int = 0) -> list[Views]:
    return [views(10 * epoch), views(10 * epoch + 1)][done:]


def fit(refiner: Refiner) -> list[dict[str, float]]:
    history: list[dict[str, float]] = []
    refiner.fit(batches, lambda stats: None, history.append)
    return history


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


PARTS = ("backbone", "clustering_head", "calibration_head")


def tensors_of(refiner: Refiner) -> dict[str, Tensor]:
    return {f"{m}.{name}": t.clone() for m in PARTS for name, t in getattr(refiner.networks, m).state_dict().items()}


def all_finite(refiner: Refiner) -> bool:
    return all(bool(torch.isfinite(tensor.float()).all()) for tensor in tensors_of(refiner).values())


def train_one_batch(refiner: Refiner) -> tuple[dict[str, float], list[str]]:
    """Train a batch; return its figures and which of backbone, clustering head and calibration head have moved."""
    before = [weights(getattr(refiner.networks, part)) for part in PARTS]
    stats = refiner.train_batch(views(), torch.Generator())
    after = [weights(getattr(refiner.networks, part)) for part in PARTS]
    return stats, [part for part, *both in zip(PARTS, before, after, strict=True) if not same(*both)]


def trust(share: float):
    """A selection that takes the given share of the samples."""

    class Share(Selector):
        def __call__(self, seen: SelectionInput) -> Selection:
            mask = torch.arange(len(seen.probs)) < share * len(seen.probs)
            return Selection(seen.probs.argmax(dim=1), mask, torch.zeros(seen.probs.shape[1], dtype=torch.long))

    return Share(24, 3, 0.95, 0.9, CPU)
