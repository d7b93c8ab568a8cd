"""The training loop: Algorithm 1 of the paper, and nothing that could see a label.

Per batch of B images and without gradient: the calibration head judges the weak views, which selects
pseudo-labels; plain features are cut into mini-clusters, which gives soft targets. Per sub-batch: one step of
backbone and clustering head on the strong views, one step of the calibration head on the plain features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cdc_plugin.config import RefineConfig, sub_batches
from cdc_plugin.core.calibration import calibrations, hard_targets
from cdc_plugin.core.losses import calibration_loss, pseudo_label_loss
from cdc_plugin.core.moderate import make_selector
from cdc_plugin.core.selection import Seen, Selection
from cdc_plugin.core.targets import mini_cluster_count, mini_cluster_targets, mini_clusters_of
from cdc_plugin.errors import UserError
from cdc_plugin.runtime import autocast, generator, own_randomness, rate_factor


@dataclass(frozen=True)
class Views:
    """One batch: three views of the same B images, or of their features where the backbone is frozen.

    Args:
        rows: (B,) numbers of the images in the whole set.
    """

    plain: Tensor
    weak: Tensor
    strong: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Judgement:
    """What a batch is trained towards: pseudo-labels, soft targets (B, C) and the features they belong to."""

    selection: Selection
    targets: Tensor
    features: Tensor
    confidence: float
    mini_clusters: int


class Refiner:
    """Backbone, both heads, their optimisers and the number of finished epochs: all that a run changes.

    Where the config asks for a single head (Tab. 3, III and IV), the calibration head is a copy of the
    clustering head, renewed after every epoch.

    Args:
        images: N, how many there are.
        total_steps: steps of the whole run, for the schedule of the rates.
    """

    def __init__(
        self,
        backbone: nn.Module,
        clustering_head: nn.Module,
        calibration_head: nn.Module,
        config: RefineConfig,
        device: torch.device,
        images: int,
        total_steps: int,
    ) -> None:
        self.backbone = backbone.to(device)
        self.clustering_head = clustering_head.to(device)
        self.calibration_head = calibration_head.to(device)
        assert config.lr_heads is not None
        assert config.lr_backbone is not None
        self.config, self.device, self.total_steps = config, device, max(1, total_steps)
        groups: list[dict[str, Any]] = [{"params": list(clustering_head.parameters()), "lr": config.lr_heads}]
        if any(True for _ in backbone.parameters()):
            groups.append({"params": list(backbone.parameters()), "lr": config.lr_backbone})
        # Two optimisers: the calibration head never moves the backbone (Sec. 3.1, "stop gradient").
        self.clustering_optimizer = torch.optim.Adam(groups)
        self.calibration_optimizer = torch.optim.Adam(calibration_head.parameters(), lr=config.lr_heads)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")
        assert config.clusters is not None
        self.select = make_selector(
            config.selection, images, config.clusters, config.threshold, config.selection_momentum, device
        )
        self.calibration = calibrations.get(config.calibration)
        strength = config.calibration_strength
        self.strength = self.calibration.strength if strength is None else strength
        self.judging_head = self.calibration_head if config.heads == "dual" else self.clustering_head
        self.epoch = 0
        self.steps = 0

    def fit(
        self,
        batches: Callable[[int], Iterable[Views]],
        after_batch: Callable[[dict[str, float]], None],
        after_epoch: Callable[[dict[str, float]], None],
    ) -> None:
        """Train the epochs that are still to do; ``batches(epoch)`` must depend on the epoch only."""
        assert self.config.epochs is not None
        while self.epoch < self.config.epochs:
            randomness = generator(self.config.seed, 2, self.epoch)
            logs = []
            for views in batches(self.epoch):
                logs.append(self.train_batch(views, randomness))
                after_batch(logs[-1])
            self.epoch += 1
            if self.judging_head is self.clustering_head:
                self.calibration_head.load_state_dict(self.clustering_head.state_dict())
            mean = {key: sum(log[key] for log in logs) / len(logs) for key in logs[0]}
            after_epoch({"epoch": self.epoch, **mean, "lr_factor": self._rate()})

    def train_batch(self, views: Views, randomness: torch.Generator) -> dict[str, float]:
        """One pass of the outer loop of Algorithm 1; returns means over the batch for the log."""
        assert self.config.sub_batch_size is not None
        parts = sub_batches(len(views.plain), self.config.sub_batch_size)
        judged = self.judge(views, randomness)
        labels, mask = judged.selection.labels, judged.selection.mask

        clustering_losses, calibration_losses = [], []
        with own_randomness(randomness, self.device):  # dropout and stochastic depth
            for part in torch.arange(len(labels)).tensor_split(parts):
                rows = slice(int(part[0]), int(part[-1]) + 1)
                self._set_rates()
                clustering, calibration = self._step(views, judged, rows)
                clustering_losses.append(clustering)
                calibration_losses.append(calibration)
                self.steps += 1
        clustering_loss = torch.stack(clustering_losses).mean().item()
        calibrating_loss = torch.stack(calibration_losses).mean().item()
        if not math.isfinite(clustering_loss + calibrating_loss):
            raise UserError(
                f"the loss is not finite in epoch {self.epoch + 1}: the rates are too high for this backbone; "
                f"try lr_backbone={self.config.lr_backbone / 10:g} lr_heads={self.config.lr_heads / 10:g}"  # type: ignore[operator]
            )
        return {
            "clustering_loss": clustering_loss,
            "calibration_loss": calibrating_loss,
            "selected": mask.float().mean().item(),
            "confidence": judged.confidence,
            "mini_clusters": judged.mini_clusters,
        }

    @torch.no_grad()
    def judge(self, views: Views, randomness: torch.Generator) -> Judgement:
        """Selection from the weak views, soft targets and features from the plain ones.

        Features are taken once a batch, as in the released code; Algorithm 1 computes them again in every
        sub-batch, at the cost of one more forward pass; the two were not compared here.
        """
        for module in (self.backbone, self.clustering_head, self.calibration_head):
            _judge_by_batch_statistics(module)
        features = self._features(views.plain)
        probs = F.softmax(self.clustering_head(features), dim=1)
        weak_features = self._features(views.weak)
        hidden = self.judging_head.hidden(weak_features)  # type: ignore[operator]
        weak_probs = F.softmax(self.judging_head.logits(hidden), dim=1)  # type: ignore[operator]
        confidence = weak_probs.max(dim=1).values.mean().item()
        targets, count = self._targets(probs, features, confidence, randomness)
        selection = self.select(Seen(weak_probs, views.rows.to(self.device), weak_features, hidden))
        return Judgement(selection, targets, features, confidence, count)

    def _targets(
        self, probs: Tensor, features: Tensor, confidence: float, randomness: torch.Generator
    ) -> tuple[Tensor, int]:
        """Soft targets (B, C), and by how many mini-clusters; 0 where the calibration does without."""
        if not self.calibration.regional:
            return hard_targets(probs), 0
        largest = _LARGEST_FROZEN if self.config.freeze_backbone else _LARGEST
        count = self.config.mini_clusters or mini_cluster_count(confidence, len(probs), probs.shape[1], largest)
        assignment = mini_clusters_of(features, count, randomness)
        return mini_cluster_targets(probs, assignment, count), count

    def _features(self, images: Tensor) -> Tensor:
        parts = -(-images.numel() // _JUDGED_AT_ONCE)
        with autocast(self.device, self.config.precision):
            features = torch.cat([self.backbone(part) for part in images.tensor_split(parts)])
        return features.float()

    def _step(self, views: Views, judged: Judgement, rows: slice) -> tuple[Tensor, Tensor]:
        """One step on a sub-batch; returns both losses.

        By default each head has a step of its own. A single head, and a calibration head whose gradient reaches
        the backbone (Tab. 3, V), are trained by the sum of both losses.
        """
        labels, mask = judged.selection.labels[rows], judged.selection.mask[rows]
        config = self.config
        if config.heads == "clu":
            loss = self._clustering_loss(views.strong[rows], labels, mask)
            self._descend(loss, self.clustering_optimizer)
            return loss.detach(), torch.zeros_like(loss)
        if config.heads == "dual" and config.stop_gradient:
            loss = self._clustering_loss(views.strong[rows], labels, mask)
            self._descend(loss, self.clustering_optimizer)
            calibration = self._calibration_loss(judged.features[rows], judged.targets[rows])
            self.calibration_optimizer.zero_grad(set_to_none=True)
            calibration.backward()
            self.calibration_optimizer.step()
            return loss.detach(), calibration.detach()
        loss = self._clustering_loss(views.strong[rows], labels, mask)
        features = judged.features[rows] if config.stop_gradient else self._features(views.plain[rows])
        calibration = self._calibration_loss(features, judged.targets[rows])
        moved = [self.clustering_optimizer, *([self.calibration_optimizer] if config.heads == "dual" else [])]
        self._descend(loss + calibration, *moved)
        return loss.detach(), calibration.detach()

    def _clustering_loss(self, strong: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        self.backbone.train()
        self.clustering_head.train()
        with autocast(self.device, self.config.precision):
            logits = self.clustering_head(self.backbone(strong))
        return pseudo_label_loss(logits.float(), labels, mask)

    def _calibration_loss(self, features: Tensor, targets: Tensor) -> Tensor:
        self.judging_head.train()
        logits, weight = self.judging_head(features), self.config.entropy_weight
        return calibration_loss(logits, targets, weight, lambda x, goal: self.calibration.loss(x, goal, self.strength))

    def _descend(self, loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def _rate(self) -> float:
        return rate_factor(self.config.schedule, self.steps, self.total_steps)

    def _set_rates(self) -> None:
        factor = self._rate()
        rates = [self.config.lr_heads, self.config.lr_backbone]
        for optimizer in (self.clustering_optimizer, self.calibration_optimizer):
            for group, rate in zip(optimizer.param_groups, rates, strict=False):
                group["lr"] = rate * factor  # type: ignore[operator]

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs to go on as if nothing had happened."""
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "scaler": self.scaler.state_dict(),
            "selector": dict(self.select.state),
            **{name: getattr(self, name).state_dict() for name in _STATEFUL},
        }

    def restore(self, state: dict[str, Any]) -> None:
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        self.scaler.load_state_dict(state["scaler"])
        # Runs that an earlier release began remember nothing here.
        self.select.state.update({name: value.to(self.device) for name, value in state.get("selector", {}).items()})
        self.epoch, self.steps = state["epoch"], state["steps"]


# Numbers in one forward pass without gradient: every batch of the paper fits whole (500 images at 224 px are
# 75 million), larger ones are cut to bound memory.
_JUDGED_AT_ONCE = 100_000_000

# Largest mean size of a mini-cluster. Small sets at large rates grow over-confident sooner than the paper's,
# whose largest is 25. Frozen features cannot bend towards pseudo-labels and need less penalty: with 12 samples
# the confidence stayed 12 points below an accuracy of 93 % (ten ImageNet classes, 128 px); with 4 it was 79 % at
# an accuracy of 78 % (96 px). Single runs; 8 itself was not measured.
_LARGEST, _LARGEST_FROZEN = 50.0, 8.0

_STATEFUL = (
    "backbone",
    "clustering_head",
    "calibration_head",
    "clustering_optimizer",
    "calibration_optimizer",
)


def _judge_by_batch_statistics(module: nn.Module) -> None:
    """No dropout, but BatchNorm in train mode, as in the released code.

    With running statistics in its place, which lag behind and mix the views, one seed ended at 98.9 % accuracy
    and another at 89.8 % (digits, 20 and 16 epochs), and Fashion-MNIST lost 5 points in 4 epochs.
    """
    module.eval()
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.train()
