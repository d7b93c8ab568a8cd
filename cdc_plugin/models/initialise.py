"""Where the heads of a run come from: feature prototypes (Sec. 3.3), or the head of an older clustering model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.prototypes import BATCHNORM_EPSILON, STARTS, HeadWeights, prototype_head, standardize_rows
from cdc_plugin.core.random_streams import fork_rng
from cdc_plugin.errors import UserError
from cdc_plugin.models.heads import ClusterHead, CosineHead, LayeredHead

Refine = Callable[[Tensor], Tensor]
INITS = ("prototypes", "keep", "random")


@dataclass(frozen=True)
class InitialHeads:
    """Both heads as a run begins, and the k-means partition (N,) of the features that they compete with.

    ``centers`` (C, D) are those of the partition, among standardised rows.
    """

    clustering: nn.Module
    calibration: nn.Module
    partition: Tensor
    centers: Tensor | None = None


def with_clusters(config: RefineConfig, heads: tuple[nn.Module, ...]) -> RefineConfig:
    """The number of clusters is the user's, else the old model's."""
    if config.clusters is not None:
        return config
    if not heads:
        raise UserError("missing --clusters: the checkpoint is a backbone and does not say how many")
    return replace(config, clusters=int(heads[-1].clusters))  # type: ignore[arg-type]


def choose_init(asked: str | None, heads: tuple[nn.Module, ...], clusters: int) -> str:
    """How to begin: as asked, else from the old head where there is one of the right size."""
    if asked not in (None, *INITS):
        raise UserError(f"init is one of {', '.join(INITS)}; found {asked!r}")
    sizes = {int(head.clusters) for head in heads}  # type: ignore[arg-type]
    if asked == "keep" and not heads:
        raise UserError("--init keep needs a checkpoint with a clustering head, this one is a backbone; leave it out")
    if asked == "keep" and sizes != {clusters}:
        found = ", ".join(map(str, sorted(sizes)))
        raise UserError(f"--init keep keeps the {found} clusters of the old model; leave --clusters {clusters} out")
    return asked or ("keep" if sizes == {clusters} else "prototypes")


def initial_heads(
    init: str,
    old_heads: tuple[nn.Module, ...],
    features: Tensor,
    old: NDArray[np.float32] | None,
    config: RefineConfig,
    generator: torch.Generator,
    refine: Refine | None = None,
) -> InitialHeads:
    """Both heads on (N, D) features, by one of ``INITS``; ``refine`` as in `core.prototypes.prototype_head`."""
    assert config.clusters is not None
    if init == "keep":
        return heads_kept(old_heads, features, config.hidden, generator, refine)
    if init == "random":
        return heads_at_random(features, config.clusters, config.hidden, generator)
    return heads_from_prototypes(features, config.clusters, config.hidden, generator, old, refine)


def heads_from_prototypes(
    features: Tensor,
    clusters: int,
    hidden: int,
    generator: torch.Generator,
    old: NDArray[np.float32] | None,
    refine: Refine | None = None,
) -> InitialHeads:
    """Both heads alike, from (N, D) features; clusters take the numbers of the old model's that they meet most.

    Args:
        old: (N, C') probabilities of the old model, if there is one.
    """
    weights = prototype_head(features, clusters, hidden, generator, refine)
    if old is not None:
        assignment = _head_with(weights, features.shape[1])(features).argmax(dim=1)
        order = matching_order(assignment.cpu().numpy(), old.argmax(axis=1), clusters, old.shape[1])
        weights = replace(weights, second=weights.second[torch.from_numpy(order).to(weights.second.device)])
    head = _head_with(weights, features.shape[1])
    return InitialHeads(head, copy.deepcopy(head), weights.partition, weights.centers)


def heads_kept(
    heads: tuple[nn.Module, ...],
    features: Tensor,
    hidden: int,
    generator: torch.Generator,
    refine: Refine | None = None,
) -> InitialHeads:
    """The old model's heads, which give the same logits as before; a linear one is lifted into the MLP."""
    clusters = int(heads[-1].clusters)  # type: ignore[arg-type]
    weights = prototype_head(features, clusters, max(hidden, 2 * clusters), generator, refine)
    first, last = (_kept(head, weights, features) for head in (heads[0], heads[-1]))
    return InitialHeads(first, last, weights.partition, weights.centers)


def heads_at_random(features: Tensor, clusters: int, hidden: int, generator: torch.Generator) -> InitialHeads:
    """Both heads alike, with torch's random weights: what prototypes are compared with (Tab. 3, I)."""
    partition = kmeans(standardize_rows(features), clusters, generator, starts=STARTS)
    with fork_rng(generator, torch.device("cpu")):
        head = ClusterHead(features.shape[1], hidden, clusters)
    head = head.to(features.device).eval()
    return InitialHeads(head, copy.deepcopy(head), partition.assignment, partition.centers)


@torch.no_grad()
def lift_linear(linear: nn.Linear, weights: HeadWeights, features: Tensor) -> ClusterHead:
    """The MLP of Sec. 3.3 with the same logits as a linear layer, exactly.

    A logit a is carried by two hidden units as ReLU(a) - ReLU(-a). BatchNorm lets them pass: it restores the
    mean and deviation of the data that it takes away. The other hidden units are the prototypes' and have no
    say yet, their outgoing weights are 0.

    Args:
        weights: prototype weights for those other units.
        features: (N, D), whose statistics BatchNorm gets.
    """
    clusters, hidden = linear.out_features, len(weights.first)
    bias = linear.bias if linear.bias is not None else torch.zeros(clusters, device=linear.weight.device)
    logits = features @ linear.weight.T + bias
    deviation, mean = torch.std_mean(torch.cat([logits, -logits], dim=1), dim=0, correction=0)
    variance = deviation.square().clamp_min(1e-12)
    lifted = slice(0, 2 * clusters)
    assert 2 * clusters <= hidden
    head = _head_with(weights, linear.in_features)
    state = head.state_dict()  # its tensors are the head's own
    state["0.weight"][lifted] = torch.cat([linear.weight, -linear.weight])
    state["0.bias"][lifted] = torch.cat([bias, -bias])
    state["1.running_mean"][lifted], state["1.running_var"][lifted] = mean, variance
    state["1.weight"][lifted], state["1.bias"][lifted] = (variance + BATCHNORM_EPSILON).sqrt(), mean
    identity = torch.eye(clusters, device=linear.weight.device)
    state["3.weight"].zero_()[:, lifted] = torch.cat([identity, -identity], dim=1)
    return head


def matching_order(
    found: NDArray[np.int64], old: NDArray[np.int64], clusters: int, old_clusters: int
) -> NDArray[np.int64]:
    """Which new cluster takes each number, (clusters,), so that most samples keep their old cluster's number."""
    from scipy.optimize import linear_sum_assignment

    size = max(clusters, old_clusters)
    counts = np.bincount(found * size + old, minlength=size * size).reshape(size, size)
    new, number = linear_sum_assignment(counts, maximize=True)
    taken = {int(n): int(c) for c, n in zip(new, number, strict=True) if c < clusters and n < clusters}
    spare = iter(sorted(set(range(clusters)) - set(taken.values())))
    return np.array([taken[n] if n in taken else next(spare) for n in range(clusters)])


def _kept(head: nn.Module, weights: HeadWeights, features: Tensor) -> nn.Module:
    if isinstance(head, LayeredHead) and len(head) == 1 and isinstance(head[0], nn.Linear):
        return lift_linear(head[0].to(features.device), weights, features)
    assert isinstance(head, (LayeredHead, CosineHead))
    return copy.deepcopy(head)


def _head_with(weights: HeadWeights, feature_dim: int) -> ClusterHead:
    head = ClusterHead(feature_dim, len(weights.first), len(weights.second)).to(weights.first.device)
    head.initialize(weights)
    return head.eval()
