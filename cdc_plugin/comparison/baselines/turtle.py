"""TURTLE (Gadetsky et al., ICML 2024): search the labels that linear classifiers on frozen features learn best.

Labels are the mean of softmax(θ_k φ_k(x)) over spaces φ_k of features; a comparison has one backbone, so one space.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from cdc_plugin.comparison.baselines.loop import WEIGHTS, BaselineTask, end_epoch, scale_features, take_raw_features
from cdc_plugin.core.random_streams import fork_rng, generator, send
from cdc_plugin.models.heads import LayeredHead

# TURTLE's numbers; its 6,000 steps are those of 30 epochs of CDC. A quarter of them cost 16 points on the digits.
ENTROPY_WEIGHT, INNER_STEPS, RATE, MOST_IMAGES, STEPS_PER_EPOCH = 10.0, 10, 1e-3, 10_000, 200


def train_turtle(task: BaselineTask) -> nn.Module:
    """Train the labels θ and return them as a head; every step of theirs starts from new random classifiers."""
    features, randomness = scale_features(task), generator(task.settings.seed, WEIGHTS)
    with fork_rng(randomness, task.device):
        encoder = LayeredHead([["linear", task.feature_dim, task.settings.clusters]]).to(task.device)
        parametrizations.weight_norm(encoder[0])
        optimizer = torch.optim.Adam(encoder.parameters(), lr=RATE)
        for epoch in range(task.settings.epochs):
            logs = []
            for _ in range(STEPS_PER_EPOCH):
                chosen = torch.randperm(len(features), generator=randomness)[:MOST_IMAGES]
                space = features[send(chosen, task.device)]
                labels = [F.softmax(encoder(space), dim=1)]
                classified = fit_classifiers([space], torch.stack(labels).mean(dim=0).detach())
                loss = label_loss(labels, classified)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                logs.append({"loss": loss.detach()})
            end_epoch(task, epoch, logs)
    task.backbone.eval()
    parametrize.remove_parametrizations(encoder[0], "weight")
    return take_raw_features(task, encoder)


def fit_classifiers(spaces: Sequence[Tensor], labels: Tensor) -> list[Tensor]:
    """Return the logits (n, C) of a linear classifier on every space (n, D) after a few steps from random weights."""
    classifiers = [nn.Linear(space.shape[1], labels.shape[1]).to(space.device) for space in spaces]
    optimizer = torch.optim.Adam([weight for each in classifiers for weight in each.parameters()], lr=RATE)
    for _ in range(INNER_STEPS):
        optimizer.zero_grad()
        losses = [F.cross_entropy(each(space), labels) for each, space in zip(classifiers, spaces, strict=True)]
        torch.stack(losses).sum().backward()
        optimizer.step()
    return [each(space).detach() for each, space in zip(classifiers, spaces, strict=True)]


def label_loss(labels: Sequence[Tensor], classified: Sequence[Tensor]) -> Tensor:
    """Compute Σ_k cross-entropy of the classifier's logits on space k to the labels, minus γ times Σ_k entropy.

    The labels are the mean over spaces of probabilities (n, C), the entropies those of each one's mean over images.
    Classifiers are constants: the gradient is that of the labels themselves, as in the paper's approximation.
    """
    mean = torch.stack(list(labels)).mean(dim=0)
    errors = torch.stack([F.cross_entropy(logits, mean) for logits in classified])
    shares = [each.mean(dim=0) for each in labels]
    # By products: torch 2.6 has no ``entr`` on MPS.
    entropies = torch.stack([-(share * share.clamp(min=torch.finfo(share.dtype).tiny).log()).sum() for share in shares])
    return errors.sum() - ENTROPY_WEIGHT * entropies.sum()
