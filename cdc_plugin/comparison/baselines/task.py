"""What every opponent is given: the same backbone, images, views, rates and number of epochs as CDC, and no label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cdc_plugin.config.schema import RefineConfig, batch_sizes
from cdc_plugin.core.random_streams import generator

MakeView = Callable[[Tensor, torch.Generator], Tensor]

# Purposes of random numbers, beside those of a CDC run (below 10): order of images, their views, weights.
ORDER, VIEWS, WEIGHTS = 11, 12, 13


@dataclass(frozen=True)
class Task:
    """One training, resolved: every None of ``config`` that a training needs is a number.

    Args:
        backbone: trained in place; ``nn.Identity`` where it is frozen, the views are features then.
        feature_dim: D.
        images: N.
        plain, weak, strong: rows (b,) of the set to the input of the backbone (b, ...), on the device.
        features: (N, D) of the plain views as training begins, on the device.
        after_epoch: called with the mean losses of every epoch.
    """

    backbone: nn.Module
    feature_dim: int
    images: int
    plain: MakeView
    weak: MakeView
    strong: MakeView
    features: Tensor
    config: RefineConfig
    device: torch.device
    after_epoch: Callable[[dict[str, float]], None]


def order_of(task: Task, epoch: int, batch: int) -> Iterator[tuple[Tensor, torch.Generator]]:
    """The batches (b,) of an epoch in random order, with a generator for the views of each."""
    seed = task.config.seed
    order = torch.randperm(task.images, generator=generator(seed, ORDER, epoch))
    for number, rows in enumerate(order.split(batch_sizes(task.images, batch))):
        yield rows, generator(seed, VIEWS, epoch, number)
