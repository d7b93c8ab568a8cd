"""What every baseline is given: the same backbone, images, views, rates and epochs as CDC, and no label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cdc_plugin.config.resolve import batch_sizes, count_sub_batches
from cdc_plugin.core.random_streams import generator

MakeView = Callable[[Tensor, torch.Generator], Tensor]

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
    """One training.

    Args:
        backbone: trained in place; ``nn.Identity`` if it is frozen, and the views are features then.
        feature_dim: D.
        image_count: N.
        plain, weak, strong: map image indices (b,) to the input of the backbone (b, ...), on the device.
        features: (N, D) of the plain views before training, on the device.
        after_epoch: called with the mean losses of every epoch.
    """

    backbone: nn.Module
    feature_dim: int
    image_count: int
    plain: MakeView
    weak: MakeView
    strong: MakeView
    features: Tensor
    settings: BaselineSettings
    device: torch.device
    after_epoch: Callable[[dict[str, float]], None]


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
