"""Build the heads that a run starts with: from feature prototypes (Sec. 3.3) or from an older clustering model."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from cdc_plugin.core.kinds import SAMPLE, find_kinds
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.mahalanobis import Prototypes, fit_prototypes
from cdc_plugin.core.prototypes import BATCHNORM_EPSILON, STARTS, HeadWeights, fit_prototype_head, standardize_rows
from cdc_plugin.core.random_streams import fork_rng
from cdc_plugin.errors import ConfigError, option
from cdc_plugin.models.heads import ClusterHead, LayeredHead

RefineCenters = Callable[[Tensor], Tensor]
FITTING_STEPS, ROW_PENALTY = 60, 1e-3  # of the rows of new clusters


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
    prototypes: Prototypes | None = None,
    partition: Tensor | None = None,
) -> InitialHeads:
    """Build both heads on (N, D) features: ``prototypes`` (Sec. 3.3), ``keep`` or ``grow`` old ones, or ``random``.

    With the ``old_probs`` (N, C') of an old model, prototype clusters take the numbers of those of its clusters that
    they share most samples with; ``refine_centers`` and ``partition`` as in `core.prototypes.fit_prototype_head`.
    """
    if init == "keep":
        return keep_old_heads(old_heads, features, hidden, generator, refine_centers)
    if init == "grow":
        return grow_old_heads(old_heads, features, clusters, hidden, generator, prototypes)
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


def grow_old_heads(
    heads: tuple[nn.Module, ...],
    features: Tensor,
    clusters: int,
    hidden: int,
    generator: torch.Generator,
    prototypes: Prototypes | None = None,
) -> InitialHeads:
    """Keep the old model's clusters with their numbers and logits; add others for new kinds among (N, D) features.

    ``prototypes`` are those of the old clusters, fitted to the features if left out.
    """
    kept = keep_old_heads(heads, features, hidden, generator)
    first, last = kept.clustering.eval(), kept.calibration.eval()
    old = int(last.clusters)  # type: ignore[arg-type]
    if old == clusters:
        return kept
    if prototypes is None:
        with torch.no_grad():
            prototypes = fit_prototypes(features, last(features).argmax(dim=1), old)
    sample = features[torch.linspace(0, len(features) - 1, min(len(features), SAMPLE)).long()]
    kind, _ = find_kinds(sample, prototypes, generator, wanted=clusters - old).assign(features.cpu())
    first, last = (add_clusters(head, features, kind.to(features.device), clusters - old) for head in (first, last))
    partition = kmeans(standardize_rows(features), clusters, generator, starts=STARTS)
    return InitialHeads(first, last, partition.assignment, partition.centers)


def add_clusters(head: nn.Module, features: Tensor, kind: Tensor, count: int) -> LayeredHead:
    """Return a head with ``count`` more clusters for the kinds (N,), from 0, of features (N, D); -1 is an old cluster.

    The old logits stay as they are. The new rows begin as prototypes, the mean hidden units of a kind, and are fitted
    so that every kind is told from the others and from the old clusters.
    """
    if not (isinstance(head, LayeredHead) and isinstance(head[-1], nn.Linear)):
        raise ConfigError(f"{option('init', 'grow')} takes heads that end in a linear layer; leave it out")
    outer = head[-1]
    with torch.no_grad():
        hidden = head.hidden(features)
        logits = head.logits(hidden)
        means = [
            hidden[kind == number].mean(dim=0) if (kind == number).any() else 0 * hidden[0] for number in range(count)
        ]
        prototypes = F.normalize(torch.stack(means) - hidden.mean(dim=0), dim=1)
        targets = torch.where(kind < 0, logits.argmax(dim=1), head.clusters + kind)
    rows = fit_rows(hidden, logits, targets, prototypes)
    bias = torch.zeros_like(outer.weight[:, 0]) if outer.bias is None else outer.bias
    last, state = len(head) - 1, head.state_dict()
    state[f"{last}.weight"] = torch.cat([outer.weight.detach(), rows[:, :-1]])
    state[f"{last}.bias"] = torch.cat([bias.detach(), rows[:, -1]])
    grown = _widen(head, count).to(features.device)
    grown.load_state_dict(state)
    return grown.eval()


def fit_rows(hidden: Tensor, logits: Tensor, targets: Tensor, start: Tensor) -> Tensor:
    """Return rows (K, H + 1), biases last, that beside fixed logits (N, C) tell targets (N,) by hidden units (N, H)."""
    rows = torch.cat([start, logits.mean().expand(len(start), 1)], dim=1).requires_grad_()
    optimizer = torch.optim.LBFGS([rows], max_iter=FITTING_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        new = hidden @ rows[:, :-1].T + rows[:, -1]
        value = F.cross_entropy(torch.cat([logits, new], dim=1), targets) + ROW_PENALTY * rows[:, :-1].square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return rows.detach()


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


def _widen(head: LayeredHead, count: int) -> LayeredHead:
    """Build a head of the same kind with so many more clusters, and random weights."""
    if isinstance(head, ClusterHead):
        return ClusterHead(head.layers[0][1], head.spec["hidden"], head.clusters + count)
    kind, inputs, outputs, *_ = head.layers[-1]
    return LayeredHead([*head.layers[:-1], [kind, inputs, outputs + count]])


def _keep_head(head: nn.Module, weights: HeadWeights, features: Tensor) -> nn.Module:
    head = copy.deepcopy(head).to(features.device)
    if isinstance(head, LayeredHead) and len(head) == 1 and isinstance(head[0], nn.Linear):
        return lift_linear(head[0], weights, features)
    return head


def _build_head(weights: HeadWeights, feature_dim: int) -> ClusterHead:
    head = ClusterHead(feature_dim, len(weights.first), len(weights.second)).to(weights.first.device)
    head.initialize(weights)
    return head.eval()
