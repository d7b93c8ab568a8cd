"""What all opponents share: the optimiser, its schedule and the loop over epochs, with as many steps as CDC takes.

How a baseline uses it::

    with fork_rng(generator(config.seed, WEIGHTS), task.device):
        head = LayeredHead([...]).to(task.device)          # the same weights for the same seed

    def step(rows, randomness):                            # one sub-batch: (b,) rows of the set, on the CPU
        features = features_of(task, task.weak(rows, randomness))
        return {"loss": some_loss(head(features)), "selected": share}

    last = train_epochs(task, head, step)                  # means of the last epoch; modules are in eval mode
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.task import Task, order_of
from cdc_plugin.config.schema import RefineConfig, steps_per_epoch, sub_batches
from cdc_plugin.core.random_streams import fork_rng
from cdc_plugin.errors import UserError
from cdc_plugin.training.device import autocast, rate_factor

Step = Callable[[Tensor, torch.Generator], dict[str, Tensor]]


def train_epochs(task: Task, heads: nn.Module, step: Step) -> dict[str, Tensor]:
    """Train backbone and heads for ``config.epochs``; returns the means of the last epoch ({} for none).

    ``step(rows, randomness)`` is called in train mode once a sub-batch and gives the tensor ``loss``, which is
    descended here, and whatever else is to be averaged over the epoch: numbers go to ``task.after_epoch``,
    vectors (one number a head, say) are only returned. A ``loss`` without gradient takes no step: that is how
    a sub-batch is skipped.
    """
    epochs, batch, part = task.config.epochs, task.config.batch_size, task.config.sub_batch_size
    assert epochs is not None
    assert batch is not None
    assert part is not None
    descent = Descent(
        task.config, task.device, epochs * steps_per_epoch(task.images, task.config), heads, task.backbone
    )
    means: dict[str, Tensor] = {}
    for epoch in range(epochs):
        logs = []
        for batch_rows, randomness in order_of(task, epoch, batch):
            with fork_rng(randomness, task.device):
                for rows in batch_rows.tensor_split(sub_batches(len(batch_rows), part)):
                    task.backbone.train()
                    heads.train()
                    log = step(rows, randomness)
                    descent.step(log["loss"])
                    logs.append({name: value.detach() for name, value in log.items()})
        means = end_epoch(task, epoch, logs)
    task.backbone.eval()
    heads.eval()
    return means


def end_epoch(task: Task, epoch: int, logs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Means of what the steps of an epoch (from 0) logged; numbers are passed on to ``task.after_epoch``."""
    means = {name: torch.stack([log[name].float() for log in logs]).mean(dim=0) for name in logs[0]}
    if not math.isfinite(means["loss"].item()):
        rates = f"lr_backbone={task.config.lr_backbone:g} lr_heads={task.config.lr_heads:g}"
        raise UserError(f"the loss is not finite in epoch {epoch + 1}: the rates are too high, {rates}; try a tenth")
    numbers = {name: value.item() for name, value in means.items() if value.ndim == 0}
    task.after_epoch({"epoch": epoch + 1, **numbers})
    return means


def features_of(task: Task, images: Tensor) -> Tensor:
    """(b, D) of the backbone as it is now, in the precision of the run; float32 comes out."""
    with autocast(task.device, task.config.precision):
        features: Tensor = task.backbone(images)
    return features.float()


class Descent:
    """Adam over the heads and, where one is given, the backbone, at the rates and on the schedule of CDC.

    Args:
        total_steps: when the cosine of the schedule ends.
        backbone: left out where it is not to be trained.
    """

    def __init__(
        self,
        config: RefineConfig,
        device: torch.device,
        total_steps: int,
        heads: nn.Module,
        backbone: nn.Module | None = None,
    ) -> None:
        self.schedule, self.total_steps, self.steps = config.schedule, max(1, total_steps), 0
        groups: list[dict[str, Any]] = [{"params": list(heads.parameters()), "full_rate": config.lr_heads}]
        if backbone is not None and any(True for _ in backbone.parameters()):
            groups.append({"params": list(backbone.parameters()), "full_rate": config.lr_backbone})
        self.optimizer = torch.optim.Adam(groups)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")

    def step(self, loss: Tensor) -> None:
        """One step down; none where the loss has no gradient, though the schedule goes on."""
        factor = rate_factor(self.schedule, self.steps, self.total_steps)
        self.steps += 1
        if not loss.requires_grad:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_rate"] * factor
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
