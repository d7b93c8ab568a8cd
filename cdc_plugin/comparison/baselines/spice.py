"""SPICE-Self (Niu et al., 2022): heads on a frozen backbone, trained on pseudo-labels by prototypes.

SPICE continues with FixMatch on the images whose neighbours have the same label. This is self-labelling of the
whole network under a fixed threshold, as in `baselines.scan.train_self_label` and the selection ``fixed``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.comparison.baselines import loop
from cdc_plugin.config.resolve import batch_sizes
from cdc_plugin.core.random_streams import send
from cdc_plugin.errors import ConfigError

# From SPICE's code: heads, and how often the samples of a batch are trained on before labels are computed again.
HEADS, REPEATS = 10, 8
CENTRE_SHARE = 0.5  # of the B / C samples a cluster could have: those whose mean is its prototype


def train_spice(task: loop.BaselineTask) -> nn.Module:
    """Train ten two-layer heads and return the best; the backbone and its BatchNorm statistics stay unchanged.

    Best is, as in SPICE, the head with the lowest loss under its own pseudo-labels of the whole set, here after
    the last epoch and not after any. SPICE predicts with the softmax of its logits.
    """
    settings, dim, clusters = task.settings, task.feature_dim, task.settings.clusters
    heads = loop.build_random_heads(task, [[["linear", dim, dim], ["relu"], ["linear", dim, clusters]]] * HEADS)
    task.backbone.eval()
    sizes = batch_sizes(task.image_count, settings.batch_size)
    steps = REPEATS * loop.count_steps([size // clusters * clusters for size in sizes], settings)
    optimizer = loop.BaselineOptimizer(task, settings.epochs * steps, heads)
    for epoch in range(settings.epochs):
        logs = []
        for rows, randomness in loop.shuffle_batches(task, epoch):
            weak, strong = (_compute_batch_features(task, view, rows, randomness) for view in (task.weak, task.strong))
            samples, labels = _label_for_heads(heads, task.features[send(rows, task.device)], weak)
            for _ in range(REPEATS):
                order = send(torch.randperm(samples.shape[1], generator=randomness), task.device)
                for part in loop.split_batch(order, settings):
                    losses = [
                        double_softmax_loss(head(strong[own[part]]), labels[part])
                        for head, own in zip(heads, samples, strict=True)
                    ]
                    loss = torch.stack(losses).mean()
                    optimizer.step(loss)
                    logs.append({"loss": loss.detach()})
        loop.end_epoch(task, epoch, logs)
    heads.eval()
    return heads[int(_compute_head_losses(heads, task.features).argmin())]


@torch.no_grad()
def _compute_batch_features(
    task: loop.BaselineTask, view: loop.MakeView, rows: Tensor, randomness: torch.Generator
) -> Tensor:
    """Return (B, D) of a view of the whole batch, one sub-batch at a time to bound memory."""
    parts = loop.split_batch(rows, task.settings)
    return torch.cat([loop.compute_features(task, view(part, randomness)) for part in parts])


@torch.no_grad()
def _label_for_heads(heads: nn.ModuleList, features: Tensor, weak: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples (heads, n) that every head trains on, and their labels (n,), equal for all heads."""
    labelled = [label_by_prototypes(features, F.softmax(head(weak), dim=1)) for head in heads]
    return torch.stack([samples for samples, _ in labelled]), labelled[0][1]


@torch.no_grad()
def _compute_head_losses(heads: nn.ModuleList, features: Tensor) -> Tensor:
    """Return (heads,) on the features of the plain views of the whole set."""
    samples, labels = _label_for_heads(heads, features, features)
    pairs = zip(heads, samples, strict=True)
    return torch.stack([double_softmax_loss(head(features[own]), labels) for head, own in pairs])


def label_by_prototypes(features: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples of a batch to train on, (C * (B // C),), and their labels; SPICE's E-step.

    The B // C / 2 samples with the highest probability of a cluster are averaged to its prototype; the B // C
    samples nearest to the prototype by cosine get its label. Every cluster has equally many, so a sample between
    clusters can have several labels and an outlying one has none. Features (B, D) are of plain views, probabilities
    (B, C) of weak ones.
    """
    batch, clusters = probs.shape
    if batch < clusters:
        raise ConfigError(
            f"a batch of {batch} images cannot hold one image for each of {clusters} clusters; "
            f"pass batch_size={2 * clusters} or more (and at least as many images), or fewer clusters"
        )
    size = batch // clusters
    unit = F.normalize(features, dim=1)
    # Stable sorts break ties equally on every device.
    confident = probs.sort(dim=0, descending=True, stable=True).indices[: max(1, int(CENTRE_SHARE * size))]
    prototypes = F.normalize(unit[confident].mean(dim=0), dim=1)  # (C, D)
    nearest = (prototypes @ unit.T).sort(dim=1, descending=True, stable=True).indices[:, :size]
    labels = torch.arange(clusters, device=probs.device).repeat_interleave(size)
    return nearest.flatten(), labels


def double_softmax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute SPICE's cross-entropy of the softmax *of the probabilities*: its gradient lasts until they are 0 and 1.

    The smallest value, where every prediction is right and sure, is log(1 + (C - 1) / e).
    """
    return F.cross_entropy(F.softmax(logits, dim=1), labels)
