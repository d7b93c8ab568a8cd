"""DCBoost (Li et al., NeurIPS 2025): images whose neighbours in the batch agree with them shape the features.

It continues a clustering, here k-means on the features, and predicts by k-means, so it states no confidence. On a
frozen backbone it trains a linear layer that begins as the identity. The paper's momentum of the target network was not
at hand: it is BYOL's here, and both sums over clusters are means, so that no term grows with C.
"""

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import (
    WEIGHTS,
    BaselineTask,
    build_random_heads,
    compute_features,
    split_batch,
    train_epochs,
)
from cdc_plugin.core.agreement import nearest_neighbours
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.prototypes import STARTS, standardize_rows
from cdc_plugin.core.random_streams import generator, send

MOST_NEIGHBOURS, NOISE, MOMENTUM = 50, 0.001, 0.996


def train_dcboost(task: BaselineTask) -> Tensor:
    """Train the features and return their clusters (N,)."""
    size = task.feature_dim
    predictor, layer = build_random_heads(
        task,
        [[["linear", size, size], ["batchnorm", size], ["relu"], ["linear", size, size]], [["linear", size, size]]],
    )
    nn.init.eye_(layer[0].weight)  # type: ignore[index]
    nn.init.zeros_(layer[0].bias)  # type: ignore[index]
    adapter = nn.Identity() if any(True for _ in task.backbone.parameters()) else layer
    online = nn.ModuleList([task.backbone, adapter])
    target = copy.deepcopy(online).requires_grad_(False)
    labels, seen = _cluster(task, task.features), 0

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        nonlocal labels, seen
        if seen and seen % task.image_count == 0:
            labels = _cluster(task, _extract(task, target))
        seen += len(rows)
        own = adapter(compute_features(task, task.weak(rows, randomness)))
        with torch.no_grad():
            for old, new in zip(target.parameters(), online.parameters(), strict=True):
                old.lerp_(new, 1 - MOMENTUM)
            seen_by = replace(task, backbone=target[0].train())
            other = F.normalize(target[1](compute_features(seen_by, task.weak(rows, randomness))), dim=1)
        unit = F.normalize(own, dim=1)
        predicted = F.normalize(predictor(unit + NOISE * torch.randn_like(unit)), dim=1)
        instance = (predicted - other).square().sum(dim=1).mean()
        mine = labels[send(rows, task.device)]
        trusted = select_consistent(other, mine)
        positive, negative = discriminative_losses(unit[trusted], other[trusted], mine[trusted])
        loss = instance + positive + negative
        parts = {"instance_loss": instance, "positive_loss": positive, "negative_loss": negative}
        return {"loss": loss, **parts, "selected": trusted.float().mean()}

    whole = replace(task.settings, sub_batch_size=task.settings.batch_size)
    train_epochs(replace(task, settings=whole), nn.ModuleList([adapter, predictor]), step)
    return _cluster(task, _extract(task, target)) if seen else labels


def select_consistent(features: Tensor, labels: Tensor) -> Tensor:
    """Return which (B,) images of a batch have the label (B,) of all their k nearest neighbours, for the best k.

    Best is the k up to 50 with the largest k times share of selected images.
    """
    nearest = nearest_neighbours(features, MOST_NEIGHBOURS)
    agree = (labels[nearest] == labels.unsqueeze(1)).cumprod(dim=1)  # (B, k): 1 while all nearer ones agree too
    scores = agree.float().mean(dim=0) * torch.arange(1, agree.shape[1] + 1, device=agree.device)
    return agree[:, int(scores.argmax())].bool()


def discriminative_losses(online: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute L_pos and L_neg of rows (n, D) of unit length: pull clusters together, push their centres apart.

    L_pos is the mean over clusters of half the sum of squared distances of all pairs (online, target), divided by
    the lengths of both sums of rows; L_neg minus the mean squared distance of normalised sums of different clusters.
    Both are 0 where nothing is selected.
    """
    _, places, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = [rows.new_zeros(len(counts), rows.shape[1]).index_add(0, places, rows) for rows in (online, target)]
    first, second = (F.normalize(each, dim=1) for each in sums)
    lengths = sums[0].norm(dim=1) * sums[1].norm(dim=1)
    cosines = first @ second.T
    positive = (counts.square() / lengths.clamp(min=1e-6) - cosines.diagonal()).sum() / max(len(counts), 1)
    apart = (2 - 2 * cosines).sum() - (2 - 2 * cosines.diagonal()).sum()
    return positive, -apart / max(len(counts) * (len(counts) - 1), 1)


def _cluster(task: BaselineTask, features: Tensor) -> Tensor:
    randomness = generator(task.settings.seed, WEIGHTS, 1)
    return kmeans(standardize_rows(features), task.settings.clusters, randomness, starts=STARTS).assignment


@torch.no_grad()
def _extract(task: BaselineTask, network: nn.ModuleList) -> Tensor:
    """Return the features (N, D) of the plain views."""
    seen_by, nothing = replace(task, backbone=network[0].eval()), torch.Generator()
    parts = split_batch(torch.arange(task.image_count), task.settings)
    return torch.cat([network[1](compute_features(seen_by, task.plain(rows, nothing))) for rows in parts])
