"""The only training that sees labels: reference rows of a comparison, marked "uses labels", never an opponent.

What a linear classifier, a fine-tuned network and temperature scaling reach with the labels of half of the images
says how far label-free figures are from the ceiling. Figures are reported on the other half. Nothing but the
comparison imports this module.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import features_of, train_epochs
from cdc_plugin.comparison.baselines.task import WEIGHTS, Task
from cdc_plugin.comparison.temperature import fit_temperature, scaled
from cdc_plugin.core.random_streams import fork_rng, generator
from cdc_plugin.errors import UserError
from cdc_plugin.metrics.clustering import true_columns
from cdc_plugin.metrics.validation import probability_table
from cdc_plugin.models.heads import LayeredHead

SPLIT = 19  # purpose of random numbers, beside those of `baselines.task`


def split(images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows that are labelled, half of them, and rows that are reported on, drawn at random; both in rising order."""
    if images < 2:
        raise UserError(f"half of the images are labelled and the others reported on; found {images}, give at least 2")
    order = torch.randperm(images, generator=generator(seed, SPLIT))
    labelled, reported = order[: images // 2], order[images // 2 :]
    return labelled.sort().values, reported.sort().values


def train_linear(task: Task, labels: Tensor, rows: Tensor) -> nn.Module:
    """A linear classifier on the frozen plain features: logistic regression with the penalty |W|² / 2, converged.

    Args:
        labels: (N,) classes, any whole numbers; only those of ``rows`` are looked at.
        rows: (n,) of the labelled images.

    Returns:
        a `LayeredHead` with one logit for each class among ``rows``, in rising order of their numbers. It takes
        features as they are: that they were standardised is folded into its weights.
    """
    classes, targets = _classes(labels, rows)
    # In 64 bits, which not every device has.
    features = task.features[rows.to(task.features.device)].detach().cpu().double()
    mean, spread = features.mean(dim=0), features.std(dim=0, correction=0)
    # A feature that hardly moves, as of a dead unit, must not be blown up to the size of the others.
    spread = spread.where(spread > 1e-6 * spread.max(), 1.0)
    weights, bias = _logistic_regression((features - mean) / spread, targets, len(classes))
    head = LayeredHead([["linear", task.feature_dim, len(classes)]])
    folded = weights / spread
    with torch.no_grad():
        head[0].weight.copy_(folded)  # type: ignore[operator]
        head[0].bias.copy_(bias - folded @ mean)  # type: ignore[operator]
    return head.to(task.device).eval()


def train_supervised(task: Task, labels: Tensor, rows: Tensor) -> nn.Module:
    """Fine-tune backbone and linear head by cross-entropy on strong views of the labelled images (appendix B.1).

    Rates and number of steps are those of the task: an epoch shows as many views as there are images, two of
    every labelled one. The head starts at random, as usual: started as `train_linear` leaves it, it was worse on
    one of two sets (75.9 against 78.4 % accuracy on 5,000 Fashion-MNIST images, one seed each) and equal on digits.
    """
    classes, targets = _classes(labels, rows)
    targets = targets.to(task.device)
    with fork_rng(generator(task.config.seed, WEIGHTS), task.device):
        head = LayeredHead([["linear", task.feature_dim, len(classes)]]).to(task.device)

    def step(chosen: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        places = chosen % len(rows)
        features = features_of(task, task.strong(rows[places], randomness))
        return {"loss": F.cross_entropy(head(features), targets[places.to(task.device)])}

    train_epochs(task, head, step)
    return head


def calibrate_by_temperature(probs: NDArray[np.float32], labels: ArrayLike, rows: ArrayLike) -> NDArray[np.float64]:
    """(N, C) probabilities of any clustering, rescaled by the temperature that suits the labelled rows.

    Clusters are matched with classes on the labelled rows, which tells the right column of each; an image
    whose class has no cluster counts as one with an even target. No image changes its cluster.

    Args:
        labels: (N,) classes; only those of ``rows`` are looked at.
        rows: (n,) of the labelled images.
    """
    table, chosen = probability_table(probs), np.asarray(rows)
    columns = true_columns(table[chosen], np.asarray(labels)[chosen])
    # A probability of 0 is one that was rounded: its logarithm is that of the smallest number of a network's output.
    logits = torch.from_numpy(np.log(np.maximum(table, np.finfo(np.float32).tiny)).astype(np.float64))
    return scaled(logits, fit_temperature(logits[chosen], torch.from_numpy(columns))).numpy()


def _classes(labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the classes among the labelled rows, (K,), and the place among them of each row's class, (n,)."""
    if len(rows) == 0:
        raise UserError("a supervised reference learns from labelled images; found none")
    classes, targets = labels.cpu().long()[rows.cpu()].unique(return_inverse=True)
    return classes, targets


def _logistic_regression(features: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Weights (K, D) and bias (K,) with the smallest sum of cross-entropies + |W|² / 2."""
    weights = torch.zeros(classes, features.shape[1], dtype=features.dtype, requires_grad=True)
    bias = torch.zeros(classes, dtype=features.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, bias], max_iter=1000, tolerance_grad=1e-6, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        # Divided by n, so that the tolerances mean the same for few and for many images.
        value = F.cross_entropy(features @ weights.T + bias, targets) + weights.square().sum() / (2 * len(features))
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach(), bias.detach()
