"""SCAN (Van Gansbeke et al., 2020): clustering by nearest neighbours, then self-labelling by a fixed threshold."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import features_of, train_epochs
from cdc_plugin.comparison.baselines.task import WEIGHTS, Task
from cdc_plugin.core.losses import negative_entropy
from cdc_plugin.core.neighbours import balanced_cross_entropy, consistency_loss, nearest_neighbours, scan_loss
from cdc_plugin.core.random_streams import fork_rng, generator
from cdc_plugin.models.heads import LayeredHead

# SCAN's numbers. Its code trains ten heads on ImageNet and one on smaller sets; they cost next to nothing, so
# there are always ten here.
NEIGHBOURS, ENTROPY_WEIGHT, HEADS, THRESHOLD = 20, 5.0, 10, 0.99
# The third stage starts from a trained network, and at SCAN's own rate: at those that CDC takes for short runs
# 97 % accuracy fell to 58 % within 10 epochs, at this one to 96 % (digits, one seed): under a fixed threshold
# clusters that are less sure than others are trained away.
SELF_LABEL_RATE = 1e-4
# Images a step of the second stage: SCAN's own number, since CDC's 500 gave a higher loss after as many epochs
# (Fashion-MNIST); but at least so many a cluster, of fewer the entropy of the mean says little.
STEP_SIZE, LEAST_A_CLUSTER = 128, 5


def train_scan(task: Task) -> nn.Module:
    """SCAN's second stage: linear heads and backbone learn to give neighbours in ``task.features`` one cluster.

    Of ten heads the one with the lowest loss in the last epoch is returned, both terms counted alike: SCAN's
    own choice, which needs no labels.
    """
    clusters, config = task.config.clusters, task.config
    assert clusters is not None
    assert config.sub_batch_size is not None
    neighbours = nearest_neighbours(task.features, NEIGHBOURS).cpu()
    with fork_rng(generator(config.seed, WEIGHTS), task.device):
        made = [LayeredHead([["linear", task.feature_dim, clusters]]) for _ in range(HEADS)]
    heads = nn.ModuleList(made).to(task.device)

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        drawn = torch.randint(neighbours.shape[1], (len(rows),), generator=randomness)
        views = [task.weak(rows, randomness), task.weak(neighbours[rows, drawn], randomness)]
        own, near = features_of(task, torch.cat(views)).chunk(2)
        losses, scores = [], []
        for head in heads:
            logits, near_logits = head(own), head(near)
            losses.append(scan_loss(logits, near_logits, ENTROPY_WEIGHT))
            scores.append((consistency_loss(logits, near_logits) + negative_entropy(logits)).detach())
        return {"loss": torch.stack(losses).mean(), "scores": torch.stack(scores)}

    size = max(min(config.sub_batch_size, STEP_SIZE), LEAST_A_CLUSTER * clusters)
    last = train_epochs(replace(task, config=replace(config, sub_batch_size=size)), heads, step)
    return heads[int(last["scores"].argmin())] if last else heads[0]


def train_self_label(task: Task, head: nn.Module) -> nn.Module:
    """SCAN's third stage, for backbone and head of the second: confident images teach their strong views.

    As in SCAN's code confidence is that of the plain image, and a step takes a whole batch, so that few clusters
    are missing among the selected. A step without a confident image is left out; where there is never one, the
    weights stay as they were.
    """
    config = task.config
    assert config.lr_heads is not None
    assert config.lr_backbone is not None
    gentle = replace(
        config,
        sub_batch_size=config.batch_size,
        lr_heads=min(config.lr_heads, SELF_LABEL_RATE),
        lr_backbone=min(config.lr_backbone, SELF_LABEL_RATE),
    )

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        with torch.no_grad():
            probs = F.softmax(head(features_of(task, task.plain(rows, randomness))), dim=1)
        confidence, labels = probs.max(dim=1)
        mask = confidence > THRESHOLD
        selected = mask.float().mean()
        if not mask.any():
            return {"loss": torch.zeros_like(selected), "selected": selected}
        logits = head(features_of(task, task.strong(rows, randomness)))
        return {"loss": balanced_cross_entropy(logits, labels, mask), "selected": selected}

    train_epochs(replace(task, config=gentle), head, step)
    return head
