"""SPICE-Self (Niu et al., 2022): heads on a frozen backbone, trained on pseudo-labels by prototypes.

SPICE goes on with FixMatch on the images whose neighbours have the same label. That is self-labelling of the
whole network under a fixed threshold, for which `baselines.scan.train_self_label` and the selection ``fixed``
stand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import Descent, end_epoch, features_of
from cdc_plugin.comparison.baselines.spice_losses import double_softmax_loss, prototype_labels
from cdc_plugin.comparison.baselines.task import WEIGHTS, MakeView, Task, order_of
from cdc_plugin.config.schema import batch_sizes, sub_batches
from cdc_plugin.core.random_streams import fork_rng, generator
from cdc_plugin.models.heads import LayeredHead

# Of SPICE's code: heads, and how often the samples of a batch are trained on before labels are made again.
HEADS, REPEATS = 10, 8


def train_spice(task: Task) -> nn.Module:
    """The best of ten two-layer heads; the backbone stays as it is, statistics of its BatchNorm included.

    Best is, as in SPICE, the head with the lowest loss under its own pseudo-labels of the whole set, here after
    the last epoch and not after any. The softmax of its logits is what SPICE predicts with.
    """
    config, dim = task.config, task.feature_dim
    assert config.clusters is not None
    assert config.epochs is not None
    assert config.batch_size is not None
    assert config.sub_batch_size is not None
    layers: list[list[Any]] = [["linear", dim, dim], ["relu"], ["linear", dim, config.clusters]]
    with fork_rng(generator(config.seed, WEIGHTS), task.device):
        heads = nn.ModuleList([LayeredHead(layers) for _ in range(HEADS)]).to(task.device)
    task.backbone.eval()

    selected = [size // config.clusters * config.clusters for size in batch_sizes(task.images, config.batch_size)]
    steps = REPEATS * sum(sub_batches(size, config.sub_batch_size) for size in selected)
    descent = Descent(config, task.device, config.epochs * steps, heads)
    for epoch in range(config.epochs):
        logs = []
        for rows, randomness in order_of(task, epoch, config.batch_size):
            weak = _frozen_features(task, task.weak, rows, randomness)
            strong = _frozen_features(task, task.strong, rows, randomness)
            chosen, labels = _labels_of_heads(heads, task.features[rows.to(task.device)], weak)
            for _ in range(REPEATS):
                order = torch.randperm(chosen.shape[1], generator=randomness).to(task.device)
                for part in order.tensor_split(sub_batches(len(order), config.sub_batch_size)):
                    losses = [
                        double_softmax_loss(head(strong[own[part]]), labels[part])
                        for head, own in zip(heads, chosen, strict=True)
                    ]
                    loss = torch.stack(losses).mean()
                    descent.step(loss)
                    logs.append({"loss": loss.detach()})
        end_epoch(task, epoch, logs)
    heads.eval()
    return heads[int(_losses_of_heads(heads, task.features).argmin())]


@torch.no_grad()
def _frozen_features(task: Task, view: MakeView, rows: Tensor, randomness: torch.Generator) -> Tensor:
    """(B, D) of a view of the whole batch, a sub-batch at a time: that much memory is there."""
    assert task.config.sub_batch_size is not None
    parts = rows.tensor_split(sub_batches(len(rows), task.config.sub_batch_size))
    return torch.cat([features_of(task, view(part, randomness)) for part in parts])


@torch.no_grad()
def _labels_of_heads(heads: nn.ModuleList, features: Tensor, weak: Tensor) -> tuple[Tensor, Tensor]:
    """The samples (heads, n) that every head trains on, and their labels (n,), which are alike for all heads."""
    made = [prototype_labels(features, F.softmax(head(weak), dim=1)) for head in heads]
    return torch.stack([chosen for chosen, _ in made]), made[0][1]


@torch.no_grad()
def _losses_of_heads(heads: nn.ModuleList, features: Tensor) -> Tensor:
    """(heads,) on the features of the plain views of the whole set."""
    chosen, labels = _labels_of_heads(heads, features, features)
    logits = [head(features[own]) for head, own in zip(heads, chosen, strict=True)]
    return torch.stack([double_softmax_loss(answer, labels) for answer in logits])
