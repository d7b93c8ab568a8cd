"""Train the pretext stage: two views of every batch, one step, and nothing that could see a label."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.core.random_streams import fork_rng, generator
from cdc_plugin.errors import UserError
from cdc_plugin.training.pretext.config import ResolvedPretrainConfig
from cdc_plugin.training.pretext.lars import LARS
from cdc_plugin.training.pretext.methods import Pretext
from cdc_plugin.training.runtime import Runtime

# Purposes of random numbers: generator(seed, PURPOSE, ...) gives each its own stream.
WEIGHTS, ORDER, VIEWS, LAYERS = 21, 22, 23, 24
STATEFUL = ("task", "optimizer", "scaler")  # attributes of a `Pretrainer`


def spread(embedding: Tensor) -> float:
    """Return how far the embedding (B, D) is from collapse: 1 where directions fill the space, 0 where all are one.

    The standard deviation of every coordinate of the L2-normalised rows, averaged, over the 1 / sqrt(D) that evenly
    spread directions have (SimSiam, Sec. 4.1).
    """
    directions = F.normalize(embedding.float(), dim=1)
    return float(directions.std(dim=0, correction=0).mean() * math.sqrt(embedding.shape[1]))


class Pretrainer:
    """A pretext task, its optimiser and the number of finished epochs: all that a run changes."""

    def __init__(
        self, task: Pretext, config: ResolvedPretrainConfig, device: torch.device, steps_per_epoch: int
    ) -> None:
        self.task = task.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.config, self.device = config, device
        self.total_steps = config.epochs * steps_per_epoch
        self.warmup_steps = config.warmup_epochs * steps_per_epoch
        self.base_lr = config.lr * config.batch_size / 256
        self.optimizer = _optimizer(task, config, self.base_lr)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")
        self.epoch = self.steps = 0

    def fit(
        self,
        batches: Callable[[int], Iterable[tuple[Tensor, Tensor]]],
        after_batch: Callable[[dict[str, float]], None],
        after_epoch: Callable[[dict[str, float]], None],
    ) -> None:
        """Train the epochs that are still to do; ``batches(epoch)`` must depend on the epoch only."""
        if self.steps == 0:
            self.task.train()
            with fork_rng(generator(self.config.seed, LAYERS, -1), self.device):
                self.task.prepare(batches(-1))
        while self.epoch < self.config.epochs:
            randomness = generator(self.config.seed, LAYERS, self.epoch)
            logs = []
            for first, second in batches(self.epoch):
                with fork_rng(randomness, self.device):
                    logs.append(self.step(first, second))
                after_batch(logs[-1])
            self.epoch += 1
            mean = {key: sum(log[key] for log in logs) / len(logs) for key in ("loss", "spread")}
            after_epoch({"epoch": self.epoch, **mean, "lr": logs[-1]["lr"]})

    def step(self, first: Tensor, second: Tensor) -> dict[str, float]:
        """Take one step on two views of a batch."""
        from lightly.utils.scheduler import cosine_schedule, cosine_warmup_schedule

        config = self.config
        lr = cosine_warmup_schedule(self.steps, self.total_steps, self.base_lr, 0.0, self.warmup_steps, 0.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.task.train()
        if config.ema is not None and config.ema_end is not None:
            self.task.follow(cosine_schedule(self.steps, self.total_steps, config.ema, config.ema_end))
        with Runtime(self.device, config.precision).autocast():
            loss, embedding = self.task(first, second)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1
        value = loss.item()
        if not math.isfinite(value):
            raise UserError(
                f"the loss is not finite in epoch {self.epoch + 1}: the rate is too high; try lr={config.lr / 10:g}"
            )
        return {"loss": value, "spread": spread(embedding), "lr": lr}

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs to continue without a difference."""
        parts = {name: getattr(self, name).state_dict() for name in STATEFUL}
        return {"epoch": self.epoch, "steps": self.steps, **parts}

    def restore(self, state: dict[str, Any]) -> None:
        for name in STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        self.epoch, self.steps = state["epoch"], state["steps"]


def _optimizer(task: nn.Module, config: ResolvedPretrainConfig, lr: float) -> torch.optim.Optimizer:
    rates: dict[str, Any] = {"lr": lr, "momentum": 0.9}
    trained = [weight for weight in task.parameters() if weight.requires_grad]
    if config.optimizer == "sgd":
        return torch.optim.SGD(trained, fused=trained[0].is_cuda, weight_decay=config.weight_decay, **rates)
    # As in BYOL, biases and the layers that normalise are neither decayed nor scaled.
    decayed = [weight for weight in trained if weight.ndim > 1]
    others = [weight for weight in trained if weight.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "decay": config.weight_decay}, {"params": others}]
    return LARS(groups, **rates)
