"""SeCu ("Stable Cluster Discrimination for Deep Clustering", Qian, ICCV 2023), with entropy or size constraint.

SeCu trains from scratch; here it starts from a pretrained backbone, as all others do. Hence:

* The centres begin as those of k-means on the projected features, not at random, and no epoch is spent on them alone.
* One head of C centres, where SeCu has ten, of C to 10 C, that shape the features of a network without pretraining.
* Centres are moved by Adam at the rate of the heads. With SeCu's SGD at a rate of 1.2, made for 150,000 steps, a
  cluster was lost and 80 % of the digits were right after six epochs, against 94 %.
* A weak and a strong view; SeCu's two crops with colour jitter lie between. Two strong ones gave 94 % as well, and a
  mean confidence of 32 against 48 % (a run each).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from cdc_plugin.comparison.baselines.loop import features_of, train_epochs
from cdc_plugin.comparison.baselines.secu_losses import (
    assign_by_entropy,
    assign_by_size,
    representation_loss,
    stable_center_loss,
    updated_duals,
)
from cdc_plugin.comparison.baselines.task import WEIGHTS, Task
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.prototypes import STARTS
from cdc_plugin.core.random_streams import fork_rng, generator
from cdc_plugin.models.heads import CosineHead

PROJECTION_DIM = 128
TEMPERATURE = 0.05  # of features and of centres
LABEL_WEIGHT = 0.2  # tau: share of the label in the target, beside the other view
ENTROPY_WEIGHT = 0.12  # alpha / N: 6,000 for the 50,000 images of CIFAR-10
LEAST_RATIO, DUAL_RATE = 0.9, 0.1  # least size of a cluster in parts of the mean size; step of its dual variable

# (b, C) cosines, (b,) rows of the set, (N,) clusters so far -> (b,) new clusters
Assign = Callable[[Tensor, Tensor, Tensor], Tensor]


def train_secu(task: Task) -> nn.Module:
    """SeCu with the entropy of cluster sizes in the assignment: the paper's proposal."""
    return _train(task, keep_entropy)


def train_secu_size(task: Task) -> nn.Module:
    """SeCu-Size: a least size of every cluster in its place."""
    assert task.config.clusters is not None
    return _train(task, KeepSize(task.config.clusters, task.device))


def keep_entropy(cosines: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """Assignments that keep the entropy of all cluster sizes high."""
    sizes = torch.bincount(labels, minlength=cosines.shape[1])
    return assign_by_entropy(cosines, labels[rows], sizes, ENTROPY_WEIGHT)


def _train(task: Task, assign: Assign) -> CosineHead:
    head, labels = _start(task)
    previous, seen = _unit_centers(head).detach(), 0

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        nonlocal previous, seen
        if seen % task.images == 0:
            previous = _unit_centers(head).detach()  # features follow the centres and labels of the epoch before
        seen += len(rows)
        rows_there = rows.to(task.device)
        views = [
            F.normalize(head.projection(features_of(task, make(rows, randomness))), dim=1)
            for make in (task.weak, task.strong)
        ]
        cosines = [view.detach() @ _unit_centers(head).T for view in views]
        old = labels[rows_there]
        new = assign(torch.stack(cosines).detach().mean(dim=0), rows_there, labels)
        labels[rows_there] = new
        center = torch.stack([stable_center_loss(view, new, TEMPERATURE) for view in cosines]).mean()
        first, second = (view @ previous.T for view in views)
        representation = representation_loss(first, second, old, TEMPERATURE, LABEL_WEIGHT)
        moved = (new != old).float().mean()
        loss = center + representation
        return {"loss": loss, "center_loss": center, "representation_loss": representation, "moved": moved}

    train_epochs(task, head, step)
    return head


@torch.no_grad()
def _start(task: Task) -> tuple[CosineHead, Tensor]:
    """SeCu's projection with random weights, centres by k-means on what it gives, and the clusters (N,)."""
    clusters, size, randomness = task.config.clusters, task.feature_dim, generator(task.config.seed, WEIGHTS)
    assert clusters is not None
    layers: list[list[Any]] = [["linear", size, size], ["batchnorm", size], ["relu"], ["linear", size, PROJECTION_DIM]]
    with fork_rng(randomness, task.device):
        head = CosineHead(layers, PROJECTION_DIM, clusters, TEMPERATURE).to(task.device)
    update_bn([task.features], head.projection)
    points = F.normalize(head.eval().projection(task.features), dim=1)
    partition = kmeans(points, clusters, randomness, starts=STARTS)
    head.centers.copy_(F.normalize(partition.centers, dim=1))
    return head, partition.assignment


def _unit_centers(head: CosineHead) -> Tensor:
    return F.normalize(head.centers, dim=1)


class KeepSize:
    """Assignments that keep every cluster above a least size, by dual variables that follow the batches."""

    def __init__(self, clusters: int, device: torch.device) -> None:
        self.duals = torch.zeros(clusters, device=device)

    def __call__(self, cosines: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        new = assign_by_size(cosines, self.duals)
        self.duals = updated_duals(self.duals, new, LEAST_RATIO / len(self.duals), DUAL_RATE)
        return new
