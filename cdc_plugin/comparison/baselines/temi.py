"""TEMI (Adaloglou et al., BMVC 2023): heads on frozen features give an image and its nearest neighbours one cluster.

Student heads agree with teacher heads, which follow them slowly, by a mutual information of pairs in which pairs that
all heads together put into different clusters weigh less. No image is augmented, so an epoch costs next to nothing.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import (
    BaselineTask,
    build_random_heads,
    scale_features,
    take_raw_features,
    train_epochs,
)
from cdc_plugin.core.agreement import nearest_neighbours
from cdc_plugin.core.random_streams import send

# TEMI's numbers, but 16 heads of its published command where the paper has 50, and a quarter of its layers' sizes.
NEIGHBOURS, HEADS, BETA, TEMPERATURE, SIZE_MOMENTUM = 50, 16, 0.6, 0.1, 0.9
HIDDEN, BOTTLENECK = 128, 64
# A few hundred steps, with whole batches, and a teacher that gets as far in them as at 0.996 in TEMI's 10,000 and more.
LONGER, TEACHER_MOMENTUM = 4, 0.98


def train_temi(task: BaselineTask) -> nn.Module:
    """Train the heads on ``task.features`` and return the teacher with the lowest loss in the last epoch."""
    size, clusters = task.feature_dim, task.settings.clusters
    count = max(1, min(NEIGHBOURS, task.image_count // (2 * clusters)))  # half of a cluster at most
    neighbours = nearest_neighbours(task.features, count).cpu()
    features = scale_features(task)
    body: list[list[Any]] = [["linear", size, HIDDEN], ["relu"], ["linear", HIDDEN, BOTTLENECK], ["normalize"]]
    heads = build_random_heads(task, [[*body, ["linear", BOTTLENECK, clusters, False]]] * HEADS)
    teachers = copy.deepcopy(heads).requires_grad_(False)
    sizes = task.features.new_full((HEADS, 1, clusters), 1 / clusters)

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        nonlocal sizes
        for own, trained in zip(teachers.parameters(), heads.parameters(), strict=True):
            own.lerp_(trained.detach(), 1 - TEACHER_MOMENTUM)
        drawn = torch.randint(neighbours.shape[1], (len(rows),), generator=randomness)
        pairs = features[send(torch.cat([rows, neighbours[rows, drawn]]), task.device)]
        student, teacher = (
            torch.stack([F.log_softmax(head(pairs) / TEMPERATURE, dim=1) for head in members])
            for members in (heads, teachers)
        )
        sizes = SIZE_MOMENTUM * sizes + (1 - SIZE_MOMENTUM) * teacher.exp().mean(dim=1, keepdim=True)
        losses = pair_losses(student, teacher, sizes)
        return {"loss": losses.mean(), "scores": losses}

    shared = task.settings
    settings = replace(shared, epochs=LONGER * shared.epochs, sub_batch_size=shared.batch_size)
    means = train_epochs(replace(task, backbone=nn.Identity(), settings=settings), heads, step)
    task.backbone.eval()
    best = teachers[int(means["scores"].argmin())] if means else teachers[0]
    head = take_raw_features(task, best)  # type: ignore[arg-type]
    head.divide_logits(TEMPERATURE)
    return head


def pair_losses(student: Tensor, teacher: Tensor, sizes: Tensor) -> Tensor:
    """Compute the loss (heads,) of log-probabilities (heads, 2n, C): rows i and n + i are an image and its neighbour.

    It is minus the mean of w log Σ_c (q_student(c) q_teacher(c))^β / q(c), once with the student's image and the
    teacher's neighbour and once the other way round. ``sizes`` (heads, 1, C) are the running means q(c) of the
    teacher; w, the teacher's probability that both are in one cluster, is averaged over the heads.
    """
    own, near = teacher.chunk(2, dim=1)
    weights = (own + near).exp().sum(dim=2).mean(dim=0)  # (n,)
    information = (BETA * (student + torch.cat([near, own], dim=1)) - sizes.log()).logsumexp(dim=2)  # (heads, 2n)
    return -(weights.repeat(2) * information).mean(dim=1)
