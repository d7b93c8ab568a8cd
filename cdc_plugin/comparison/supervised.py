"""The only training that sees labels: reference rows of a comparison, marked "uses labels", never a baseline.

It sees those of half of the images; figures are reported on the other half. Only the comparison imports this module.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from cdc_plugin.comparison.baselines.loop import BaselineTask, build_random_heads, compute_features, train_epochs
from cdc_plugin.comparison.temperature import fit_temperature
from cdc_plugin.core.random_streams import generator, send
from cdc_plugin.metrics.clustering import true_columns
from cdc_plugin.metrics.confidence import check_probabilities
from cdc_plugin.models.heads import LayeredHead

SPLIT = 19  # purpose of random numbers, beside those of `baselines.loop`


def split_labelled(image_count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return rows that are labelled, half of them, and rows that are reported on, drawn at random; both sorted.

    >>> labelled, reported = split_labelled(5, seed=0)
    >>> len(labelled), len(reported)
    (2, 3)
    """
    order = torch.randperm(image_count, generator=generator(seed, SPLIT))
    labelled, reported = order[: image_count // 2], order[image_count // 2 :]
    return labelled.sort().values, reported.sort().values


def train_linear(task: BaselineTask, labels: Tensor, rows: Tensor) -> nn.Module:
    """Train a linear classifier on the frozen plain features: logistic regression with penalty |W|² / 2, converged.

    Of the labels (N,), any whole numbers, only those of the labelled ``rows`` (n,) are read. The head has one logit
    for each class among them, in rising order. It takes raw features: standardisation is folded into its weights.
    """
    classes, targets = labels.cpu().long()[rows.cpu()].unique(return_inverse=True)
    # In 64 bits, which not every device has.
    features = task.features[rows.to(task.features.device)].detach().cpu().double()
    mean, spread = features.mean(dim=0), features.std(dim=0, correction=0)
    # A feature that hardly varies, as of a dead unit, must not be scaled up to the size of the others.
    spread = spread.where(spread > 1e-6 * spread.max(), 1.0)
    weights, bias = _fit_logistic_regression((features - mean) / spread, targets, len(classes))
    head = LayeredHead([["linear", task.feature_dim, len(classes)]])
    folded = weights / spread
    with torch.no_grad():
        head[0].weight.copy_(folded)  # type: ignore[operator]
        head[0].bias.copy_(bias - folded @ mean)  # type: ignore[operator]
    return head.to(task.device).eval()


def train_supervised(task: BaselineTask, labels: Tensor, rows: Tensor) -> nn.Module:
    """Fine-tune backbone and linear head by cross-entropy on strong views of the labelled images (appendix B.1).

    Rates and number of steps are those of the task: an epoch shows as many views as there are images, two of
    every labelled one. The head starts at random, as usual: started as `train_linear` leaves it, it was worse on
    one of two sets (75.9 against 78.4 % accuracy on 5,000 Fashion-MNIST images, one seed each) and equal on digits.
    """
    classes, targets = labels.to(task.device).long()[rows.to(task.device)].unique(return_inverse=True)
    (head,) = build_random_heads(task, [[["linear", task.feature_dim, len(classes)]]])

    def step(drawn: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        places = drawn % len(rows)
        features = compute_features(task, task.strong(rows[places], randomness))
        return {"loss": F.cross_entropy(head(features), targets[send(places, task.device)])}

    train_epochs(task, head, step)
    return head


def calibrate_by_temperature(probs: NDArray[np.float32], labels: ArrayLike, rows: ArrayLike) -> NDArray[np.float64]:
    """Return (N, C) probabilities of any clustering, rescaled by the temperature that suits the labelled rows.

    This is temperature scaling (Guo et al. 2017). Clusters are matched with classes on the labelled rows, which
    gives the right column of each; an image whose class has no cluster counts as one with an even target. No image
    changes its cluster. Of the labels (N,) only those of ``rows`` (n,) are read.
    """
    table, labelled = check_probabilities(probs), np.asarray(rows)
    columns = true_columns(table[labelled], np.asarray(labels)[labelled])
    # A probability of 0 was rounded: its logarithm is that of the smallest number of a network's output.
    logits = torch.from_numpy(np.log(np.maximum(table, np.finfo(np.float32).tiny)).astype(np.float64))
    temperature = fit_temperature(logits[labelled], torch.from_numpy(columns))
    return F.softmax(logits / temperature, dim=1).numpy()


def _fit_logistic_regression(features: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return weights (K, D) and bias (K,) with the smallest sum of cross-entropies + |W|² / 2."""
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
