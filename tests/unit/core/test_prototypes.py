import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import polar
from scipy.optimize import minimize_scalar

from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.prototypes import (
    BATCHNORM_EPSILON,
    STARTS,
    HeadWeights,
    consensus_targets,
    fit_prototype_head,
    fit_scale,
    orthogonalize,
    standardize_rows,
)
from cdc_plugin.models.heads import ClusterHead
from tests.helpers import seeded


def separated(count: int, clusters: int, size: int) -> torch.Tensor:
    centers = 4 * torch.randn(clusters, size, generator=seeded(1))
    return centers[torch.arange(count) % clusters] + 0.3 * torch.randn(count, size, generator=seeded(2))


def logits_of(head: HeadWeights, features: torch.Tensor) -> torch.Tensor:
    before = features @ head.first.T
    hidden = F.relu((before - head.mean) / (head.variance + BATCHNORM_EPSILON).sqrt())
    return hidden @ head.second.T


def test_standardized_rows_do_not_depend_on_offset_and_scale():
    features = torch.randn(20, 6, generator=seeded())
    torch.testing.assert_close(standardize_rows(3 * features + 7), standardize_rows(features), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 9), (8, 3), (4, 4)])
def test_orthogonalize_agrees_with_the_polar_factor_of_scipy(shape):
    weight = torch.randn(*shape, generator=seeded(), dtype=torch.float64)
    expected, _ = polar(weight.numpy(), side="left")
    torch.testing.assert_close(orthogonalize(weight), torch.from_numpy(expected))


def test_orthogonalize_by_hand_and_leaves_orthonormal_rows_alone():
    torch.testing.assert_close(orthogonalize(torch.tensor([[2.0, 0.0], [0.0, 5.0]])), torch.eye(2))
    rows = torch.linalg.qr(torch.randn(8, 4, generator=seeded())).Q.T
    torch.testing.assert_close(orthogonalize(rows), rows)


def test_singular_and_zero_matrices_give_no_arbitrary_directions():
    assert not orthogonalize(torch.zeros(3, 5)).any()
    repeated = orthogonalize(torch.tensor([[1.0, 0.0, 0.0]]).repeat(2, 1))
    torch.testing.assert_close(repeated, torch.tensor([[0.5**0.5, 0.0, 0.0]]).repeat(2, 1))


def test_fitted_scale_agrees_with_a_minimiser_of_scipy_and_is_finite_for_hopeless_targets():
    logits = torch.randn(100, 4, generator=seeded(), dtype=torch.float64)
    targets = F.softmax(2.5 * logits + 0.5 * torch.randn(100, 4, generator=seeded(1), dtype=torch.float64), dim=1)
    found = minimize_scalar(
        lambda power: F.cross_entropy(logits * float(np.exp(power)), targets).item(), bounds=(-8, 8), method="bounded"
    )
    assert fit_scale(logits, targets) == pytest.approx(np.exp(found.x), rel=1e-3)
    even = torch.full_like(logits, 1 / 4)
    for targets in (even, F.one_hot(logits.argmax(dim=1), 4).double(), torch.zeros_like(logits)):
        assert np.isfinite([fit_scale(logits, targets), fit_scale(torch.zeros_like(logits), targets)]).all()


def test_consensus_is_sure_where_all_runs_agree_and_soft_where_labels_have_nothing_to_do_with_the_features():
    directions = standardize_rows(separated(90, 3, 8))
    runs = [kmeans(directions, 3, seeded(seed)) for seed in range(3)]
    labels = runs[0].assignment
    targets = consensus_targets(directions, labels, runs, seeded())
    torch.testing.assert_close(targets, F.one_hot(labels, 3).float())
    targets = consensus_targets(directions, torch.randint(3, (90,), generator=seeded(9)), runs, seeded())
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(90))
    assert targets.max() < 0.7


def test_head_finds_separated_clusters_and_is_sure_of_them():
    features = separated(120, 4, 16)
    head = fit_prototype_head(features, 4, 32, seeded())
    probs = F.softmax(logits_of(head, features), dim=1)
    groups = probs.argmax(dim=1).view(30, 4)
    assert (groups == groups[0]).all()
    assert len(set(groups[0].tolist())) == 4
    assert probs.max(dim=1).values.mean() > 0.95
    assert STARTS >= 1


def test_the_network_head_computes_what_the_weights_say():
    features = separated(100, 3, 6)
    weights = fit_prototype_head(features, 3, 12, seeded())
    head = ClusterHead(6, 12, 3)
    head.initialize(weights)
    head.eval()
    torch.testing.assert_close(head(features), logits_of(weights, features), rtol=1e-4, atol=1e-4)


def test_heads_do_not_depend_on_the_global_seed_but_on_the_generator():
    features = separated(60, 3, 6) + torch.randn(60, 6, generator=seeded(3))
    torch.manual_seed(1)
    first = fit_prototype_head(features, 3, 8, seeded())
    torch.manual_seed(2)
    assert torch.equal(first.second, fit_prototype_head(features, 3, 8, seeded()).second)


@pytest.mark.parametrize(
    ("features", "clusters", "hidden"),
    [
        (torch.ones(20, 6), 3, 8),
        (torch.zeros(20, 6), 2, 4),
        (torch.eye(4).repeat(10, 1), 6, 8),
        (torch.randn(20, 3), 2, 512),
        (torch.randn(7, 5), 7, 16),
        (torch.rand(30, 1), 3, 4),
        (torch.cat([torch.zeros(15, 4), torch.ones(15, 4)]), 2, 4),
        (1e6 * torch.randn(30, 5), 3, 8),
        (1e-6 * torch.randn(30, 5), 3, 8),
    ],
    ids=["constant", "zero", "duplicates", "D=3", "N=C<H", "D=1", "constant rows", "huge", "small"],
)
def test_degenerate_features_give_finite_heads(features, clusters, hidden):
    head = fit_prototype_head(features, clusters, hidden, seeded())
    assert head.first.shape == (hidden, features.shape[1])
    assert head.second.shape == (clusters, hidden)
    assert head.partition.shape == (len(features),)
    logits = logits_of(head, features)
    assert torch.isfinite(logits).all()
    network = ClusterHead(features.shape[1], hidden, clusters)
    network.initialize(head)
    F.cross_entropy(network(features), head.partition).backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


def polar_factor(weight: np.ndarray) -> np.ndarray:
    left, _, right = np.linalg.svd(weight, full_matrices=False)
    return left @ right


def mean_rows(rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return for every row the mean of the rows of its group."""
    return np.stack([rows[groups == group].mean(axis=0) for group in groups])


def test_a_head_is_the_one_of_section_3_3_written_out():
    features = torch.randn(300, 12, generator=seeded(4)) + 0.5 * separated(300, 4, 12)
    clusters, hidden, randomness = 4, 9, seeded()
    directions = standardize_rows(features)
    runs = sorted((kmeans(directions, clusters, randomness) for _ in range(STARTS)), key=lambda run: run.inertia)
    # The same numbers are drawn in the same order.
    prototypes = kmeans(directions, hidden, randomness, iterations=20).centers
    first = polar_factor(prototypes.double().numpy())
    before = features.double().numpy() @ first.T
    mean, variance = before.mean(axis=0), before.var(axis=0)
    activations = np.maximum(0, (before - mean) / np.sqrt(variance + BATCHNORM_EPSILON))
    rows = activations - activations.mean(axis=1, keepdims=True)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    partition = runs[0].assignment.numpy()
    means = np.stack([rows[partition == cluster].mean(axis=0) for cluster in range(clusters)])
    # Centred rows are dependent: the direction that they do not span is left out.
    left, size, right = np.linalg.svd(means - means.mean(axis=0), full_matrices=False)
    second = (left * (size > 1e-5 * size.max())) @ right
    logits = activations @ second.T
    votes = [mean_rows(np.eye(clusters)[logits.argmax(axis=1)], run.assignment.numpy()) for run in runs]
    neighbours = kmeans(directions, 2 * clusters, randomness, iterations=20).assignment.numpy()
    targets = torch.from_numpy(mean_rows(np.mean(votes, axis=0), neighbours))
    scale = minimize_scalar(
        lambda power: F.cross_entropy(torch.from_numpy(logits * np.exp(power)), targets).item(),
        bounds=(-8, 8),
        method="bounded",
        options={"xatol": 1e-8},
    )
    head = fit_prototype_head(features, clusters, hidden, seeded())
    np.testing.assert_allclose(head.first.numpy(), first, atol=1e-4)
    np.testing.assert_allclose(head.mean.numpy(), mean, atol=1e-4)
    np.testing.assert_allclose(head.variance.numpy(), variance, rtol=1e-3)
    np.testing.assert_allclose(head.second.numpy(), second * np.exp(scale.x), rtol=1e-2, atol=1e-3)
    assert torch.equal(head.partition, runs[0].assignment)


def test_refined_centres_take_the_place_of_the_sample_and_are_assigned_to():
    features = torch.randn(200, 6, generator=seeded(4))
    refined = []

    def refine(centers: torch.Tensor) -> torch.Tensor:
        refined.append(centers + 0.3 * torch.randn(centers.shape, generator=seeded(8)))
        return refined[0]

    head = fit_prototype_head(features, 3, 8, seeded(), refine)
    assert torch.equal(head.centers, refined[0])
    assert torch.equal(head.partition, torch.cdist(standardize_rows(features), refined[0]).argmin(dim=1))
    assert not torch.equal(head.partition, fit_prototype_head(features, 3, 8, seeded()).partition)


def test_votes_are_averaged_over_mini_clusters_of_twenty_iterations():
    directions = standardize_rows(torch.randn(300, 6, generator=seeded(6)))
    runs = [kmeans(directions, 3, seeded(seed)) for seed in range(3)]
    labels = torch.randint(3, (300,), generator=seeded(9))
    votes = [mean_rows(np.eye(3)[labels.numpy()], run.assignment.numpy()) for run in runs]
    found = consensus_targets(directions, labels, runs, seeded()).numpy()
    for iterations, equal in ((20, True), (1, False)):
        neighbours = kmeans(directions, 6, seeded(), iterations=iterations).assignment.numpy()
        assert np.allclose(found, mean_rows(np.mean(votes, axis=0), neighbours), atol=1e-5) is equal
