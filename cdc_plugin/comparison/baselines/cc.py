"""Contrastive Clustering (CC; Li et al., AAAI 2021): contrast instances and clusters across two strong views.

As in its paper two heads with random weights and one hidden layer stand on the backbone, an instance head of 128
outputs and a cluster head of C probabilities. The backbone is fine-tuned, as in CDC's comparison.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import BaselineTask, build_random_heads, compute_features, train_epochs
from cdc_plugin.core.losses import negative_entropy

INSTANCE_DIM = 128
INSTANCE_TEMPERATURE, CLUSTER_TEMPERATURE = 0.5, 1.0


def train_cc(task: BaselineTask) -> nn.Module:
    """Train by L = L_ins + L_clu (Eq. 7) and return the cluster head, whose softmax CC predicts with."""
    size = task.feature_dim
    outputs = (INSTANCE_DIM, task.settings.clusters)
    heads = build_random_heads(task, [[["linear", size, size], ["relu"], ["linear", size, each]] for each in outputs])
    instance_head, cluster_head = heads

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        first, second = (compute_features(task, task.strong(rows, randomness)) for _ in range(2))
        instance = pair_contrast(instance_head(first), instance_head(second), INSTANCE_TEMPERATURE)
        cluster = cluster_contrast(cluster_head(first), cluster_head(second), CLUSTER_TEMPERATURE)
        return {"loss": instance + cluster, "instance_loss": instance, "cluster_loss": cluster}

    train_epochs(task, heads, step)
    return cluster_head


def pair_contrast(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Compute NT-Xent: row i of one view should be closest to row i of the other among all other rows of both views.

    This is L_ins of CC (Eqs. 2-3) where rows (n, d) are projections of images, and the first term of L_clu where they
    are clusters. The sum in the paper's denominator includes the row itself; as in the released code it is left out,
    since the similarity of a row to itself is constant.
    """
    count = len(first)
    rows = F.normalize(torch.cat([first, second]), dim=1)
    similarity = rows @ rows.T / temperature  # (2n, 2n)
    itself = torch.eye(2 * count, dtype=torch.bool, device=rows.device)
    partner = torch.arange(2 * count, device=rows.device).roll(count)
    return F.cross_entropy(similarity.masked_fill(itself, -torch.inf), partner)


def cluster_contrast(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Compute L_clu of CC (Eqs. 5-6): contrast the columns of the probabilities, minus the entropy of cluster sizes.

    A column says how much every image of the batch belongs to one cluster. Without the entropies, one per view,
    most images could end up in a single cluster.
    """
    contrast = pair_contrast(F.softmax(first, dim=1).T, F.softmax(second, dim=1).T, temperature)
    return contrast + negative_entropy(first) + negative_entropy(second)
