"""Run the training loop: Algorithm 1 of the paper, and nothing that could see a label.

Per batch of B images and without gradient: the calibration head judges the weak views, which selects pseudo-labels;
plain features are cut into mini-clusters, which gives soft targets. Per sub-batch: one step of backbone and clustering
head on the strong views, one step of the calibration head on the plain features (`steps.step_dual_heads`).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.config.resolve import ResolvedConfig, batch_sizes, find_round, steps_per_epoch
from cdc_plugin.core.random_streams import TRAINING, fork_rng, generator, send
from cdc_plugin.core.selection import make_selector
from cdc_plugin.core.selection.base import SelectionInput
from cdc_plugin.core.sizes import follow_shares
from cdc_plugin.core.targets import find_mini_clusters, hard_targets, mini_cluster_count, mini_cluster_targets
from cdc_plugin.training.runtime import Runtime, lr_multiplier, plan_shards
from cdc_plugin.training.steps import BatchTargets, Networks, Views, choose_step, split_batch

Stats = dict[str, float]

# Largest mean size of a mini-cluster. Small sets at large rates grow over-confident sooner than the paper's,
# whose largest is 25. Frozen features cannot bend towards pseudo-labels and need less penalty: with 12 samples
# the confidence stayed 12 points below an accuracy of 93 % (ten ImageNet classes, 128 px); with 4 it was 79 % at
# an accuracy of 78 % (96 px). Single runs; 8 itself was not measured.
LARGEST_MINI_CLUSTER, LARGEST_FROZEN = 50.0, 8.0


class NotFiniteError(Exception):
    """A loss or a weight is infinite or NaN: the epoch is lost."""


class Refiner:
    """Networks, selection and progress of a run on ``image_count`` images: all that training changes."""

    def __init__(
        self,
        backbone: nn.Module,
        clustering_head: nn.Module,
        calibration_head: nn.Module,
        settings: ResolvedConfig,
        runtime: Runtime,
        image_count: int,
    ) -> None:
        self.settings, self.runtime = settings, runtime
        self.networks = Networks(backbone, clustering_head, calibration_head, settings, runtime)
        threshold, momentum, device = settings.threshold, settings.selection_momentum, runtime.device
        self.select = make_selector(settings.selection, image_count, settings.clusters, threshold, momentum, device)
        self.step = choose_step(settings)
        self.batches_per_epoch = len(batch_sizes(image_count, settings.batch_size))
        self.steps_per_epoch = steps_per_epoch(image_count, settings.batch_size, settings.sub_batch_size)
        self.shares: Tensor | None = None  # (C,) of the images that the clusters have, while they are estimated
        self.settled = False  # after a round: nothing moves any more, and no epoch is left to train
        self.epoch = 0
        self.steps = 0
        self.slow_down = 1.0  # factor on all learning rates, below 1 after a loss that was not finite
        self.progress = EpochProgress(settings.clusters)

    def fit(
        self,
        batches: Callable[[int, int], Iterable[Views]],
        after_batch: Callable[[Stats], None],
        after_epoch: Callable[[Stats], None],
    ) -> None:
        """Train the epochs that are left; ``after_batch`` may raise to stop, and the batch is then part of `state`.

        ``batches(epoch, done)`` returns the batches of an epoch that are left, and must depend on nothing else.
        """
        while not self.done:
            progress = self.progress
            if not progress.logs:
                progress.randomness = generator(self.settings.seed, TRAINING, self.epoch)
            for views in batches(self.epoch, len(progress.logs)):
                progress.logs.append(self.train_batch(views, progress.randomness))
                after_batch(progress.logs[-1])
            if not self.networks.are_finite():  # the last step may ruin weights after the last loss
                raise NotFiniteError
            self.networks.align()
            record = {"epoch": self.epoch + 1, **progress.summarise(), "lr_factor": self._lr_factor()}
            self.epoch += 1
            self.progress = EpochProgress(self.settings.clusters)
            after_epoch(record)

    @property
    def done(self) -> bool:
        return self.settled or self.epoch >= self.settings.epochs

    def train_batch(self, views: Views, randomness: torch.Generator) -> Stats:
        """Run the outer loop of Algorithm 1 once; return means over the batch for the log."""
        networks, runtime, distributed = self.networks, self.runtime, self.runtime.distributed
        targets = self.compute_targets(views, randomness)
        rank = distributed.rank
        labels, mask = torch.stack([targets.selection.labels, targets.selection.mask]).cpu()
        self.progress.sizes += torch.bincount(labels, minlength=self.settings.clusters)
        plan = plan_shards(len(views.rows), self.settings.sub_batch_size, distributed.size)
        fast = self.settings.passes == "fast"
        losses = []
        with fork_rng(randomness, runtime.device, rank):  # for dropout and stochastic depth
            for sub_batch in split_batch(mask.bool(), plan, rank, fast, runtime.device):
                networks.set_learning_rates(self._lr_factor())
                losses.append(torch.stack(self.step(networks, views, targets, sub_batch)))
                self.steps += 1
        clustering_loss, calibration_loss = torch.stack(losses).mean(dim=0).tolist()
        if not math.isfinite(clustering_loss + calibration_loss):
            raise NotFiniteError
        return {
            "clustering_loss": clustering_loss,
            "calibration_loss": calibration_loss,
            "selected": mask.float().mean().item(),
            "confidence": targets.confidence,
            "mini_clusters": targets.mini_clusters,
        }

    @torch.no_grad()
    def compute_targets(self, views: Views, randomness: torch.Generator) -> BatchTargets:
        """Select pseudo-labels by the weak views; compute soft targets and features of the plain ones.

        Features are taken once per batch, as in the released code; Algorithm 1 computes them again in every
        sub-batch, at the cost of one more forward pass; the two were not compared here.
        """
        networks, distributed, count = self.networks, self.runtime.distributed, len(views.rows)
        networks.use_batch_statistics()
        features = distributed.gather(*networks.extract(views.plain, count))
        probs = F.softmax(networks.clustering_head(features), dim=1)
        weak_features = features
        if views.weak is not views.plain:
            weak_features = distributed.gather(*networks.extract(views.weak, count))
        hidden = networks.target_head.hidden(weak_features)  # type: ignore[operator]
        weak_probs = F.softmax(networks.target_head.logits(hidden), dim=1)  # type: ignore[operator]
        confidence = weak_probs.max(dim=1).values.mean().item()
        soft, mini_clusters = self._compute_soft_targets(probs, features, confidence, randomness)
        rows = send(views.rows, self.runtime.device)
        if self.settings.sizes == "estimated":
            self.shares = follow_shares(self.shares, weak_probs, self.settings.selection_momentum)
            distributed.broadcast_(self.shares)
        networks.shares = self.shares
        selection = self.select(SelectionInput(weak_probs, rows, weak_features, hidden, self.shares))
        for decision in (soft, selection.labels, selection.mask):
            distributed.broadcast_(decision)
        return BatchTargets(selection, soft, features, confidence, mini_clusters)

    def _compute_soft_targets(
        self, probs: Tensor, features: Tensor, confidence: float, randomness: torch.Generator
    ) -> tuple[Tensor, int]:
        """Return soft targets (B, C) and how many mini-clusters gave them; 0 where the calibration uses none."""
        if not self.networks.calibration.regional:
            return hard_targets(probs), 0
        largest = LARGEST_FROZEN if self.settings.freeze_backbone else LARGEST_MINI_CLUSTER
        count = self.settings.mini_clusters or mini_cluster_count(confidence, len(probs), probs.shape[1], largest)
        assignment = find_mini_clusters(features, count, randomness)
        return mini_cluster_targets(probs, assignment, count), count

    def _lr_factor(self) -> float:
        """Return the factor on all learning rates, which fall to 0 in every round."""
        first, following = find_round(self.epoch, self.settings.epochs, self.settings.rounds)
        steps, total = self.steps - first * self.steps_per_epoch, (following - first) * self.steps_per_epoch
        return lr_multiplier(self.settings.schedule, steps, total) * self.slow_down

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs to continue as if nothing had happened."""
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "slow_down": self.slow_down,
            "settled": self.settled,
            "shares": self.shares,
            "progress": self.progress.state(),
            "selector": dict(self.select.state),
            "networks": self.networks.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.networks.restore(state["networks"])
        self.select.state.update({name: value.to(self.runtime.device) for name, value in state["selector"].items()})
        self.epoch, self.steps, self.slow_down = state["epoch"], state["steps"], state["slow_down"]
        self.settled = state["settled"]
        self.shares = None if state["shares"] is None else state["shares"].to(self.runtime.device)
        self.progress = EpochProgress(self.settings.clusters, state["progress"])


class EpochProgress:
    """Keep what is known of an epoch before it ends, so that a run can stop and resume between two batches."""

    def __init__(self, clusters: int, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self.logs: list[Stats] = list(state.get("logs", []))
        # Of the clusters, by the pseudo-labels of all batches.
        self.sizes: Tensor = state.get("sizes", torch.zeros(clusters, dtype=torch.long)).clone()
        self.randomness = torch.Generator()
        if "randomness" in state:
            self.randomness.set_state(state["randomness"])

    def summarise(self) -> Stats:
        """Return means over the batches, and what the clusters look like on the weak views."""
        mean = {key: sum(log[key] for log in self.logs) / len(self.logs) for key in self.logs[0]}
        share = self.sizes / self.sizes.sum()
        return {**mean, "largest_cluster": share.max().item(), "used_clusters": int((self.sizes > 0).sum())}

    def state(self) -> dict[str, Any]:
        return {"logs": list(self.logs), "sizes": self.sizes.clone(), "randomness": self.randomness.get_state()}
