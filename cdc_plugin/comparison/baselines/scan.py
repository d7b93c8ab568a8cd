"""SCAN (Van Gansbeke et al., 2020): clustering by nearest neighbours, then self-labelling by a fixed threshold."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import BaselineTask, build_random_heads, compute_features, train_epochs
from cdc_plugin.core.agreement import nearest_neighbours
from cdc_plugin.core.losses import negative_entropy

# SCAN's numbers. Its code trains ten heads on ImageNet and one on smaller sets; they cost next to nothing, so
# there are always ten here.
NEIGHBOURS, ENTROPY_WEIGHT, HEADS, THRESHOLD = 20, 5.0, 10, 0.99
# The third stage starts from a trained network, and at SCAN's own rate: at those that CDC takes for short runs
# 97 % accuracy fell to 58 % within 10 epochs, at this one to 96 % (digits, one seed): under a fixed threshold
# clusters that are less sure than others are trained away.
SELF_LABEL_RATE = 1e-4
# Images per step of the second stage: SCAN's own number, since CDC's 500 gave a higher loss after as many epochs
# (Fashion-MNIST); but at least so many per cluster, of fewer the entropy of the mean says little.
STEP_SIZE, LEAST_PER_CLUSTER = 128, 5


def train_scan(task: BaselineTask) -> nn.Module:
    """Run SCAN's second stage: train linear heads and backbone to give neighbours in ``task.features`` one cluster.

    Of ten heads the one with the lowest loss in the last epoch is returned, both terms weighted equally: SCAN's
    own choice, which needs no labels.
    """
    settings = task.settings
    neighbours = nearest_neighbours(task.features, NEIGHBOURS).cpu()
    heads = build_random_heads(task, [[["linear", task.feature_dim, settings.clusters]]] * HEADS)

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        drawn = torch.randint(neighbours.shape[1], (len(rows),), generator=randomness)
        views = [task.weak(rows, randomness), task.weak(neighbours[rows, drawn], randomness)]
        own, near = compute_features(task, torch.cat(views)).chunk(2)
        losses, scores = [], []
        for head in heads:
            logits, near_logits = head(own), head(near)
            losses.append(scan_loss(logits, near_logits, ENTROPY_WEIGHT))
            scores.append(scan_loss(logits, near_logits, 1.0).detach())
        return {"loss": torch.stack(losses).mean(), "scores": torch.stack(scores)}

    size = max(min(settings.sub_batch_size, STEP_SIZE), LEAST_PER_CLUSTER * settings.clusters)
    means = train_epochs(replace(task, settings=replace(settings, sub_batch_size=size)), heads, step)
    return heads[int(means["scores"].argmin())] if means else heads[0]


def train_self_label(task: BaselineTask, head: nn.Module) -> nn.Module:
    """Run SCAN's third stage on backbone and head of the second: confident images teach their strong views.

    As in SCAN's code confidence is that of the plain image, and a step takes a whole batch, so that few clusters
    are missing among the selected. A step without a confident image is skipped; if there never is one, the weights
    stay unchanged.
    """
    settings = task.settings
    rates = {name: min(getattr(settings, name), SELF_LABEL_RATE) for name in ("lr_heads", "lr_backbone")}
    gentle = replace(settings, sub_batch_size=settings.batch_size, **rates)

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        with torch.no_grad():
            probs = F.softmax(head(compute_features(task, task.plain(rows, randomness))), dim=1)
        confidence, labels = probs.max(dim=1)
        mask = confidence > THRESHOLD
        selected = mask.float().mean()
        if not mask.any():
            return {"loss": torch.zeros_like(selected), "selected": selected}
        logits = head(compute_features(task, task.strong(rows, randomness)))
        return {"loss": balanced_cross_entropy(logits, labels, mask), "selected": selected}

    train_epochs(replace(task, settings=gentle), head, step)
    return head


def scan_loss(logits: Tensor, neighbour_logits: Tensor, entropy_weight: float) -> Tensor:
    """Compute SCAN's Eq. 2: minus the mean log of <p(x), p(neighbour)>, plus lambda times the negative entropy."""
    # By logsumexp: finite, with a gradient, where the product underflows to 0 (SCAN's code cuts at -100).
    log_products = F.log_softmax(logits, dim=1) + F.log_softmax(neighbour_logits, dim=1)
    return -log_products.logsumexp(dim=1).mean() + entropy_weight * negative_entropy(logits)


def balanced_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Compute the loss of SCAN's third stage: trusted samples, each weighted by 1 / (share of its label in them).

    Weights are normalised to the sum of 1, so this is the mean over the labels that occur of their mean losses.
    It is 0, with a zero gradient, where no sample is trusted.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    trusted = mask.to(losses.dtype)
    counts = torch.zeros_like(logits[0]).index_add_(0, labels, trusted)  # (C,)
    weights = trusted / counts.clamp(min=1)[labels]
    return (weights * losses).sum() / weights.sum().clamp(min=1)
