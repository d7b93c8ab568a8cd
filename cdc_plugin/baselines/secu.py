"""SeCu ("Stable Cluster Discrimination for Deep Clustering", Qian, ICCV 2023), with entropy or size constraint.

SeCu trains from scratch, with ten heads of C to 10 C centres on a projection, and random centres. Here it starts from a
pretrained backbone as all others do, so that centres are those of k-means on its features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.baselines.loop import features_of, own_randomness, train_epochs
from cdc_plugin.baselines.task import WEIGHTS, Task
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.secu import (
    assign_by_entropy,
    assign_by_size,
    representation_loss,
    stable_center_loss,
    updated_duals,
)
from cdc_plugin.heads import CosineHead
from cdc_plugin.runtime import generator

TEMPERATURE = 0.05
LABEL_WEIGHT = 0.2
ENTROPY_WEIGHT = 0.12
LEAST_RATIO, DUAL_RATE = 0.9, 0.1
STARTS = 10


class Assignment:
    def __init__(self, labels: Tensor, clusters: int) -> None:
        self.labels, self.clusters = labels, clusters

    def __call__(self, cosines: Tensor, rows: Tensor) -> Tensor:
        raise NotImplementedError


class EntropyAssignment(Assignment):
    def __call__(self, cosines: Tensor, rows: Tensor) -> Tensor:
        sizes = torch.bincount(self.labels, minlength=self.clusters)
        return assign_by_entropy(cosines, self.labels[rows], sizes, ENTROPY_WEIGHT)


class SizeAssignment(Assignment):
    def __init__(self, labels: Tensor, clusters: int) -> None:
        super().__init__(labels, clusters)
        self.duals = torch.zeros(clusters, device=labels.device)

    def __call__(self, cosines: Tensor, rows: Tensor) -> Tensor:
        labels = assign_by_size(cosines, self.duals)
        self.duals = updated_duals(self.duals, labels, LEAST_RATIO / self.clusters, DUAL_RATE)
        return labels


def train_secu(task: Task) -> nn.Module:
    return _train(task, EntropyAssignment)


def train_secu_size(task: Task) -> nn.Module:
    return _train(task, SizeAssignment)

import os
MLP = os.environ.get("MLP"); VIEWS2 = os.environ.get("V", "ws"); SGD = float(os.environ.get("SGD", 0))

def _train(task: Task, kind: type[Assignment]) -> nn.Module:
    config = task.config
    assert config.clusters is not None
    D = task.feature_dim
    with own_randomness(generator(config.seed, WEIGHTS), task.device):
        layers = [["linear", D, D], ["batchnorm", D], ["relu"], ["linear", D, 128]] if MLP == "1" else [["linear", D, D]] if MLP == "lin" else []
        head = CosineHead(layers, 128 if MLP == "1" else D, config.clusters, TEMPERATURE).to(task.device)
    if MLP == "1":
        head.projection[1].momentum = None
        with torch.no_grad(): head.projection(task.features)
        head.projection[1].momentum = 0.1
    elif MLP == "lin":
        with torch.no_grad(): head.projection[0].weight.copy_(torch.eye(D)); head.projection[0].bias.zero_()
    head.eval()
    with torch.no_grad():
        partition = kmeans(F.normalize(head.projection(task.features), dim=1), config.clusters, generator(config.seed, WEIGHTS, 1), starts=STARTS)
        head.centers.copy_(F.normalize(partition.centers, dim=1))
    assignment = kind(partition.assignment, config.clusters)
    previous = head.centers.detach().clone()
    seen = 0
    opt = torch.optim.SGD([head.centers], lr=SGD, momentum=0.9) if SGD else None

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        nonlocal previous, seen
        if seen % task.images == 0:
            previous = F.normalize(head.centers.detach(), dim=1)
        seen += len(rows)
        chosen = rows.to(task.device)
        makers = {"w": task.weak, "s": task.strong}
        first, second = (F.normalize(head.projection(features_of(task, makers[m](rows, randomness))), dim=1) for m in VIEWS2)
        centers = F.normalize(head.centers, dim=1)
        cosines = [view.detach() @ centers.T for view in (first, second)]
        old = assignment.labels[chosen]
        with torch.no_grad():
            new = assignment((cosines[0] + cosines[1]) / 2, chosen)
        assignment.labels[chosen] = new
        center = (stable_center_loss(cosines[0], new, TEMPERATURE) + stable_center_loss(cosines[1], new, TEMPERATURE)) / 2
        if opt:
            opt.zero_grad(); center.backward(); opt.step(); head.centers.grad = None; center = center.detach()
        representation = representation_loss(first @ previous.T, second @ previous.T, old, TEMPERATURE, LABEL_WEIGHT)
        return {"loss": center + representation, "center_loss": center, "representation_loss": representation, "moved": (old != new).float().mean(), "norm": head.centers.norm(dim=1).mean()}

    train_epochs(task, head, step)
    return head
