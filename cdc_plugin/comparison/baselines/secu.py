"""SeCu ("Stable Cluster Discrimination for Deep Clustering", Qian, ICCV 2023), with an entropy or size constraint.

Points are features of unit length, clusters are unit centres, and the probability of a cluster is the softmax of the
cosines over a temperature. Features, centres and assignments take turns: each has a loss or rule of its own.

SeCu trains from scratch; here it starts from a pretrained backbone, as all others do. Hence:

* The centres begin as those of k-means on the projected features, not at random, and no epoch is spent on them alone.
* One head of C centres, where SeCu has ten, of C to 10 C, that shape the features of a network without pretraining.
* Centres are moved by Adam at the rate of the heads. With SeCu's SGD at a rate of 1.2, made for 150,000 steps, a
  cluster was lost and 80 % of the digits were right after six epochs, against 94 %.
* A weak and a strong view; SeCu's two crops with colour jitter lie between. Two strong ones gave 94 % as well, and a
  mean confidence of 32 against 48 % (a run each).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from cdc_plugin.comparison.baselines.loop import WEIGHTS, BaselineTask, compute_features, train_epochs
from cdc_plugin.core.kmeans import count_members, kmeans
from cdc_plugin.core.prototypes import STARTS
from cdc_plugin.core.random_streams import fork_rng, generator, send
from cdc_plugin.models.heads import CosineHead

PROJECTION_DIM = 128
TEMPERATURE = 0.05  # of features and of centres
LABEL_WEIGHT = 0.2  # tau: share of the label in the target, beside the other view
ENTROPY_WEIGHT = 0.12  # alpha / N: 6,000 for the 50,000 images of CIFAR-10
LEAST_RATIO, DUAL_RATE = 0.9, 0.1  # minimum size of a cluster over the mean size; step of its dual variable

# (b, C) cosines, (b,) rows of the set, (N,) clusters so far -> (b,) new clusters
Assign = Callable[[Tensor, Tensor, Tensor], Tensor]


def train_secu(task: BaselineTask) -> nn.Module:
    """Train SeCu with the entropy of cluster sizes in the assignment: the paper's proposal."""
    return _train(task, keep_entropy)


def train_secu_size(task: BaselineTask) -> nn.Module:
    """Train SeCu-Size: with a minimum size of every cluster instead."""
    return _train(task, KeepSize(task.settings.clusters, task.device))


def keep_entropy(cosines: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """Assign points (b,) so that the entropy of all cluster sizes stays high."""
    sizes = count_members(labels, cosines.shape[1])
    return assign_by_entropy(cosines, labels[rows], sizes, ENTROPY_WEIGHT)


def _train(task: BaselineTask, assign: Assign) -> CosineHead:
    head, labels = _start(task)
    previous, seen = _unit_centers(head).detach(), 0

    def step(rows: Tensor, randomness: torch.Generator) -> dict[str, Tensor]:
        nonlocal previous, seen
        if seen % task.image_count == 0:
            previous = _unit_centers(head).detach()  # features follow the centres and labels of the epoch before
        seen += len(rows)
        rows_there = send(rows, task.device)
        views = [
            F.normalize(head.projection(compute_features(task, make(rows, randomness))), dim=1)
            for make in (task.weak, task.strong)
        ]
        cosines = [view.detach() @ _unit_centers(head).T for view in views]
        old = labels[rows_there]
        new = assign(torch.stack(cosines).detach().mean(dim=0), rows_there, labels)
        labels[rows_there] = new
        center = torch.stack([stable_center_loss(view, new, TEMPERATURE) for view in cosines]).mean()
        first, second = (view @ previous.T for view in views)
        representation = representation_loss(first, second, old, TEMPERATURE, LABEL_WEIGHT)
        moved = (new != old).float().mean()
        loss = center + representation
        return {"loss": loss, "center_loss": center, "representation_loss": representation, "moved": moved}

    train_epochs(task, head, step)
    return head


@torch.no_grad()
def _start(task: BaselineTask) -> tuple[CosineHead, Tensor]:
    """Return SeCu's head (random projection, centres by k-means on its output) and the clusters (N,)."""
    clusters, size, randomness = task.settings.clusters, task.feature_dim, generator(task.settings.seed, WEIGHTS)
    layers: list[list[Any]] = [["linear", size, size], ["batchnorm", size], ["relu"], ["linear", size, PROJECTION_DIM]]
    with fork_rng(randomness, task.device):
        head = CosineHead(layers, PROJECTION_DIM, clusters, TEMPERATURE).to(task.device)
    update_bn([task.features], head.projection)
    points = F.normalize(head.eval().projection(task.features), dim=1)
    partition = kmeans(points, clusters, randomness, starts=STARTS)
    head.centers.copy_(F.normalize(partition.centers, dim=1))
    return head, partition.assignment


def _unit_centers(head: CosineHead) -> Tensor:
    return F.normalize(head.centers, dim=1)


class KeepSize:
    """Assign points so that every cluster stays above a minimum size, by dual variables that follow the batches."""

    def __init__(self, clusters: int, device: torch.device) -> None:
        self.duals = torch.zeros(clusters, device=device)

    def __call__(self, cosines: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        new = (cosines + self.duals).argmax(dim=1)
        self.duals = update_duals(self.duals, new, LEAST_RATIO / len(self.duals), DUAL_RATE)
        return new


def stable_center_loss(cosines: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Compute cluster discrimination that moves a centre by its own points only.

    In cross-entropy, points of other clusters push a centre away; a batch that holds none of its own points
    then moves it arbitrarily, which makes training unstable. So the gradient of a point reaches the centre of
    its cluster alone, with weight 1 - p: hard points count more, whereas k-means weights all equally.
    """
    own = F.one_hot(labels, cosines.shape[1]).bool()
    return F.cross_entropy(torch.where(own, cosines, cosines.detach()) / temperature, labels)


def representation_loss(
    first: Tensor, second: Tensor, labels: Tensor, temperature: float, label_weight: float
) -> Tensor:
    """Compute the cross-entropy of each view to its label, mixed with the prediction for the other view.

    The target of a view is τ · one-hot label + (1 - τ) · probabilities of the other view (no gradient). Cosines (b, C)
    are to the centres at the start of the epoch, when the points had these labels (b,).
    """
    hard = label_weight * F.one_hot(labels, first.shape[1])
    losses = [
        F.cross_entropy(view / temperature, hard + (1 - label_weight) * F.softmax(other.detach() / temperature, dim=1))
        for view, other in ((first, second), (second, first))
    ]
    return (losses[0] + losses[1]) / 2


def assign_by_entropy(cosines: Tensor, labels: Tensor, sizes: Tensor, weight: float) -> Tensor:
    """Return the best cluster (b,) of every point if it alone moved: cosine plus α times the entropy of all sizes (C,).

    Moving a point from a cluster of n to one of m points changes N times the negative entropy by
    f(n - 1) - f(n) + f(m + 1) - f(m) with f(n) = n log n; log N cancels. The paper's α stands before the entropy
    itself; a point's share of that is 1 / N, so its weight of 6,000 for 50,000 images is 0.12 here, for any number.
    """
    counts = sizes.to(cosines.dtype)
    change = _growth(counts) - _growth(counts - 1)[labels].unsqueeze(1)  # (b, C); no cluster of a point is empty
    change = change.scatter(1, labels.unsqueeze(1), 0)  # staying changes nothing
    return (cosines - weight * change).argmax(dim=1)


def update_duals(duals: Tensor, labels: Tensor, least_share: float, rate: float) -> Tensor:
    """Take a step of dual ascent: a cluster with less than its minimum share of the batch becomes more attractive."""
    share = count_members(labels, len(duals)) / len(labels)
    return (duals + rate * (least_share - share)).clamp(min=0)


def _growth(count: Tensor) -> Tensor:
    """Return f(n + 1) - f(n) for f(n) = n log n, exact in single precision even if n is a million."""
    return torch.log(count + 1) + count * torch.log1p(1 / count.clamp(min=1))
