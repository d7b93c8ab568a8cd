"""What every baseline is given and shares: the backbone, images, views, rates and steps of CDC, and no label."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.config.resolve import batch_sizes, count_sub_batches
from cdc_plugin.core.random_streams import fork_rng, generator
from cdc_plugin.errors import ConfigError
from cdc_plugin.models.heads import LayeredHead
from cdc_plugin.training.runtime import Runtime, lr_multiplier

MakeView = Callable[[Tensor, torch.Generator], Tensor]  # image indices (b,) -> input of the backbone (b, ...)
Step = Callable[[Tensor, torch.Generator], dict[str, Tensor]]

# Purposes of random numbers, beside those of a CDC run (below 10): order of images, their views, weights.
ORDER, VIEWS, WEIGHTS = 11, 12, 13


@dataclass(frozen=True)
class BaselineSettings:
    """The settings of a CDC run that a baseline shares, under the same names."""

    clusters: int
    epochs: int
    batch_size: int
    sub_batch_size: int
    lr_heads: float
    lr_backbone: float
    schedule: str = "cosine"
    precision: str = "float32"
    seed: int = 0


@dataclass(frozen=True)
class BaselineTask:
    """One training of a baseline."""

    backbone: nn.Module  # trained in place; ``nn.Identity`` if it is frozen, and the views are features then
    feature_dim: int  # D
    image_count: int  # N
    plain: MakeView
    weak: MakeView
    strong: MakeView
    features: Tensor  # (N, D) of the plain views before training, on the device
    settings: BaselineSettings
    device: torch.device
    after_epoch: Callable[[dict[str, float]], None]  # called with the mean losses


def build_random_heads(task: BaselineTask, layers: list[list[list[Any]]]) -> nn.ModuleList:
    """Return a head for each list of layers, with the same weights for the same seed."""
    with fork_rng(generator(task.settings.seed, WEIGHTS), task.device):
        return nn.ModuleList([LayeredHead(each) for each in layers]).to(task.device)


def scale_features(task: BaselineTask) -> Tensor:
    """Return the features (N, D) before training, all of one length, with a mean square of 1."""
    return task.feature_dim**0.5 * F.normalize(task.features, dim=1)


@torch.no_grad()
def take_raw_features(task: BaselineTask, trained: LayeredHead) -> LayeredHead:
    """Return a head for raw features that computes what this one, which begins linearly, does of scaled ones."""
    with fork_rng(generator(task.settings.seed, WEIGHTS), task.device):
        head = LayeredHead([["normalize"], *trained.layers]).to(task.device)
    weights = dict(trained.named_parameters())
    for name, own in head.named_parameters():
        place, kind = name.split(".")
        own.copy_(weights[f"{int(place) - 1}.{kind}"])
    head[1].weight.mul_(task.feature_dim**0.5)  # type: ignore[operator]
    return head.eval()


def shuffle_batches(task: BaselineTask, epoch: int) -> Iterator[tuple[Tensor, torch.Generator]]:
    """Yield the batches (b,) of an epoch in random order, each with a generator for its views."""
    seed = task.settings.seed
    order = torch.randperm(task.image_count, generator=generator(seed, ORDER, epoch))
    for number, rows in enumerate(order.split(batch_sizes(task.image_count, task.settings.batch_size))):
        yield rows, generator(seed, VIEWS, epoch, number)


def split_batch(rows: Tensor, settings: BaselineSettings) -> tuple[Tensor, ...]:
    """Split a batch into near-equal sub-batches."""
    return rows.tensor_split(count_sub_batches(len(rows), settings.sub_batch_size))


def count_steps(sizes: list[int], settings: BaselineSettings) -> int:
    """Return the number of sub-batches in batches of the given sizes."""
    return sum(count_sub_batches(size, settings.sub_batch_size) for size in sizes)


def train_epochs(task: BaselineTask, heads: nn.Module, step: Step) -> dict[str, Tensor]:
    """Train backbone and heads; return the means of the last epoch ({} without epochs).

    ``step(rows, randomness)`` runs in train mode once per sub-batch and returns the tensor ``loss``, which is
    minimised here, and whatever else to average over the epoch: numbers go to ``task.after_epoch``, vectors (such
    as one number per head) are only returned. A ``loss`` without gradient takes no step: this skips a sub-batch.
    """
    settings = task.settings
    steps = settings.epochs * count_steps(batch_sizes(task.image_count, settings.batch_size), settings)
    optimizer = BaselineOptimizer(task, steps, heads, task.backbone)
    means: dict[str, Tensor] = {}
    for epoch in range(settings.epochs):
        logs = []
        for batch, randomness in shuffle_batches(task, epoch):
            with fork_rng(randomness, task.device):
                for rows in split_batch(batch, settings):
                    task.backbone.train()
                    heads.train()
                    log = step(rows, randomness)
                    optimizer.step(log["loss"])
                    logs.append({name: value.detach() for name, value in log.items()})
        means = end_epoch(task, epoch, logs)
    task.backbone.eval()
    heads.eval()
    return means


def end_epoch(task: BaselineTask, epoch: int, logs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the means of what the steps of an epoch (from 0) logged; pass numbers on to ``task.after_epoch``."""
    means = {name: torch.stack([log[name].float() for log in logs]).mean(dim=0) for name in logs[0]}
    if not math.isfinite(means["loss"].item()):
        rates = f"lr_backbone={task.settings.lr_backbone:g} lr_heads={task.settings.lr_heads:g}"
        raise ConfigError(f"the loss is not finite in epoch {epoch + 1}: the rates are too high, {rates}; try a tenth")
    numbers = {name: value.item() for name, value in means.items() if value.ndim == 0}
    task.after_epoch({"epoch": epoch + 1, **numbers})
    return means


def compute_features(task: BaselineTask, views: Tensor) -> Tensor:
    """Return (b, D) of the backbone in its present mode, computed in the precision of the run, as float32."""
    with Runtime(task.device, task.settings.precision).autocast():
        features: Tensor = task.backbone(views)
    return features.float()


class BaselineOptimizer:
    """Adam over the heads and, if given, the backbone, at the rates and on the schedule of CDC."""

    def __init__(self, task: BaselineTask, steps: int, heads: nn.Module, backbone: nn.Module | None = None) -> None:
        settings = task.settings
        self.schedule, self.total_steps, self.steps = settings.schedule, max(1, steps), 0
        groups: list[dict[str, Any]] = [{"params": list(heads.parameters()), "full_rate": settings.lr_heads}]
        if backbone is not None and (trained := list(backbone.parameters())):
            groups.append({"params": trained, "full_rate": settings.lr_backbone})
        self.optimizer = torch.optim.Adam(groups, fused=task.device.type == "cuda")
        self.scaler = torch.amp.GradScaler(task.device.type, enabled=settings.precision == "float16")

    def step(self, loss: Tensor) -> None:
        """Minimise the loss by one step; without a gradient only the schedule advances."""
        factor = lr_multiplier(self.schedule, self.steps, self.total_steps)
        self.steps += 1
        if not loss.requires_grad:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_rate"] * factor
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
