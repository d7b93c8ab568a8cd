"""Contrastive Clustering (CC; Li et al., AAAI 2021): instances and clusters are told apart across two strong views.

As in its paper two heads with random weights and one hidden layer stand on the backbone, an instance head of 128
numbers and a cluster head of C probabilities. The backbone is fine-tuned, as in CDC's comparison.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.cc_losses import cluster_contrast, pair_contrast
from cdc_plugin.comparison.baselines.loop import features_of, train_epochs
from cdc_plugin.comparison.baselines.task import WEIGHTS, Task
from cdc_plugin.core.random_streams import fork_rng, generator
from cdc_plugin.models.heads import LayeredHead

INSTANCE_DIM = 128
INSTANCE_TEMPERATURE, CLUSTER_TEMPERATURE = 0.5, 1.0


def train_cc(task: Task) -> nn.Module:
    """Train by L = L_ins + L_clu (Eq. 7) and return the cluster head, whose softmax CC predicts with."""
    config, size = task.config, task.feature_dim
    assert config.clusters is not None
    with fork_rng(generator(config.seed, WEIGHTS), task.device):
        instance_head, cluster_head = (
            LayeredHead([["linear", size, size], ["relu"], ["linear", size, outputs]]).to(task.device)
            for outputs in (INSTANCE_DIM, config.clusters)
        )

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        first, second = (features_of(task, task.strong(rows, randomness)) for _ in range(2))
        instance = pair_contrast(instance_head(first), instance_head(second), INSTANCE_TEMPERATURE)
        cluster = cluster_contrast(cluster_head(first), cluster_head(second), CLUSTER_TEMPERATURE)
        return {"loss": instance + cluster, "instance_loss": instance, "cluster_loss": cluster}

    train_epochs(task, nn.ModuleList([instance_head, cluster_head]), step)
    return cluster_head
