"""Build the heads that a run starts with: from feature prototypes (Sec. 3.3) or from an older clustering model."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.prototypes import BATCHNORM_EPSILON, STARTS, HeadWeights, fit_prototype_head, standardize_rows
from cdc_plugin.core.random_streams import fork_rng
from cdc_plugin.models.heads import ClusterHead, LayeredHead

RefineCenters = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class InitialHeads:
    """Both heads at the start of a run, and the k-means partition of the features that they compete with."""

    clustering: nn.Module
    calibration: nn.Module
    partition: Tensor  # (N,)
    centers: Tensor | None = None  # (C, D) of the partition among standardised rows


def build_initial_heads(
    init: str,
    old_heads: tuple[nn.Module, ...],
    features: Tensor,
    old_probs: NDArray[np.float32] | None,
    clusters: int,
    hidden: int,
    generator: torch.Generator,
    refine_centers: RefineCenters | None = None,
    partition: Tensor | None = None,
) -> InitialHeads:
    """Build both heads on (N, D) features: ``prototypes`` (Sec. 3.3), ``keep`` those of an old model, or ``random``.

    With the ``old_probs`` (N, C') of an old model, prototype clusters take the numbers of those of its clusters that
    they share most samples with; ``refine_centers`` and ``partition`` as in `core.prototypes.fit_prototype_head`.
    """
    if init == "keep":
        return keep_old_heads(old_heads, features, hidden, generator, refine_centers)
    if init == "random":
        return build_random_heads(features, clusters, hidden, generator)
    weights = fit_prototype_head(features, clusters, hidden, generator, refine_centers, partition)
    if old_probs is not None:
        assignment = _build_head(weights, features.shape[1])(features).argmax(dim=1)
        order = match_cluster_numbers(assignment.cpu().numpy(), old_probs.argmax(axis=1), clusters, old_probs.shape[1])
        weights = replace(weights, second=weights.second[torch.from_numpy(order).to(weights.second.device)])
    head = _build_head(weights, features.shape[1])
    return InitialHeads(head, copy.deepcopy(head), weights.partition, weights.centers)


def keep_old_heads(
    heads: tuple[nn.Module, ...],
    features: Tensor,
    hidden: int,
    generator: torch.Generator,
    refine_centers: RefineCenters | None = None,
) -> InitialHeads:
    """Keep the old model's heads, with the logits they had; a linear head is lifted into the MLP of Sec. 3.3."""
    clusters = int(heads[-1].clusters)  # type: ignore[arg-type]
    weights = fit_prototype_head(features, clusters, max(hidden, 2 * clusters), generator, refine_centers)
    first, last = (_keep_head(head, weights, features) for head in (heads[0], heads[-1]))
    return InitialHeads(first, last, weights.partition, weights.centers)


def build_random_heads(features: Tensor, clusters: int, hidden: int, generator: torch.Generator) -> InitialHeads:
    """Build two equal heads with torch's random weights, which prototypes are compared with (Tab. 3, I)."""
    partition = kmeans(standardize_rows(features), clusters, generator, starts=STARTS)
    with fork_rng(generator, torch.device("cpu")):
        head = ClusterHead(features.shape[1], hidden, clusters)
    head = head.to(features.device).eval()
    return InitialHeads(head, copy.deepcopy(head), partition.assignment, partition.centers)


@torch.no_grad()
def lift_linear(linear: nn.Linear, weights: HeadWeights, features: Tensor) -> ClusterHead:
    """Build the MLP of Sec. 3.3 that has exactly the logits of a linear layer.

    Two hidden units carry a logit a as ReLU(a) - ReLU(-a). BatchNorm passes it on unchanged: it restores the
    mean and deviation of the data that it removes. The other hidden units are those of the prototypes and have no
    effect yet, since their outgoing weights are 0. BatchNorm takes the statistics of the features (N, D).
    """
    clusters = linear.out_features
    bias = linear.bias if linear.bias is not None else torch.zeros(clusters, device=linear.weight.device)
    logits = features @ linear.weight.T + bias
    deviation, mean = torch.std_mean(torch.cat([logits, -logits], dim=1), dim=0, correction=0)
    variance = deviation.square().clamp_min(1e-12)
    lifted = slice(0, 2 * clusters)
    head = _build_head(weights, linear.in_features)
    state = head.state_dict()  # its tensors are the head's own
    state["0.weight"][lifted] = torch.cat([linear.weight, -linear.weight])
    state["0.bias"][lifted] = torch.cat([bias, -bias])
    state["1.running_mean"][lifted], state["1.running_var"][lifted] = mean, variance
    state["1.weight"][lifted], state["1.bias"][lifted] = (variance + BATCHNORM_EPSILON).sqrt(), mean
    identity = torch.eye(clusters, device=linear.weight.device)
    state["3.weight"].zero_()[:, lifted] = torch.cat([identity, -identity], dim=1)
    return head


def match_cluster_numbers(
    new: NDArray[np.int64], old: NDArray[np.int64], clusters: int, old_clusters: int
) -> NDArray[np.int64]:
    """Return which new cluster takes each number, (clusters,), so that most samples (N,) keep their number.

    >>> match_cluster_numbers(np.array([0, 0, 1, 1]), np.array([1, 1, 0, 0]), 2, 2).tolist()
    [1, 0]
    """
    from scipy.optimize import linear_sum_assignment  # half a second of import

    size = max(clusters, old_clusters)
    counts = np.bincount(new * size + old, minlength=size * size).reshape(size, size)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    taken = {int(n): int(c) for c, n in zip(rows, columns, strict=True) if c < clusters and n < clusters}
    spare = iter(sorted(set(range(clusters)) - set(taken.values())))
    return np.array([taken[n] if n in taken else next(spare) for n in range(clusters)])


def _keep_head(head: nn.Module, weights: HeadWeights, features: Tensor) -> nn.Module:
    head = copy.deepcopy(head).to(features.device)
    if isinstance(head, LayeredHead) and len(head) == 1 and isinstance(head[0], nn.Linear):
        return lift_linear(head[0], weights, features)
    return head


def _build_head(weights: HeadWeights, feature_dim: int) -> ClusterHead:
    head = ClusterHead(feature_dim, len(weights.first), len(weights.second)).to(weights.first.device)
    head.initialize(weights)
    return head.eval()
