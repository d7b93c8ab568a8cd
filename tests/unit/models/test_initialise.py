"""Heads to begin with: lifted, kept, or matched to an old model's clusters."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.core.prototypes import fit_prototype_head
from cdc_plugin.errors import CheckpointError, ConfigError
from cdc_plugin.models.heads import ClusterHead, CosineHead, LayeredHead, MixtureHead, build_head
from cdc_plugin.models.initialise import (
    build_initial_heads,
    grow_old_heads,
    keep_old_heads,
    lift_linear,
    match_cluster_numbers,
)


@pytest.fixture
def features(randomness):
    return torch.relu(torch.randn(200, 12, generator=randomness))


def linear_head(clusters=4, features=12, bias=True):
    torch.manual_seed(1)
    return LayeredHead([["linear", features, clusters] if bias else ["linear", features, clusters, False]])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden", [8, 9, 40])
def test_a_lifted_linear_head_gives_the_same_logits_on_any_input(features, randomness, bias, hidden):
    linear = linear_head(bias=bias)[0]
    weights = fit_prototype_head(features, 4, hidden, randomness)
    lifted = lift_linear(linear, weights, features).eval()
    other = 3 * torch.randn(50, 12, generator=randomness)
    torch.testing.assert_close(lifted(other), linear(other), rtol=1e-4, atol=1e-5)
    assert lifted.layers == ClusterHead(12, hidden, 4).layers


def test_a_lifted_head_agrees_on_batches_with_their_own_statistics_and_every_unit_can_learn(features, randomness):
    linear = linear_head()[0]
    lifted = lift_linear(linear, fit_prototype_head(features, 4, 16, randomness), features).train()
    torch.testing.assert_close(lifted(features), linear(features), rtol=1e-4, atol=1e-4)
    lifted(features).square().sum().backward()
    assert (lifted[3].weight.grad.abs().sum(dim=0) > 0).all()


def test_a_small_hidden_size_grows_to_hold_the_old_head(features, randomness):
    old = linear_head(clusters=9)
    kept = keep_old_heads((old,), features, 4, randomness)
    assert kept.calibration.spec == {"kind": "mlp", "hidden": 18, "clusters": 9}
    assert torch.equal(kept.clustering.eval()(features).argmax(1), old(features).argmax(1))


def test_constant_features_do_not_break_the_lift(randomness):
    same = torch.ones(30, 12)
    old = linear_head()
    kept = keep_old_heads((old,), same, 16, randomness)
    torch.testing.assert_close(kept.calibration.eval()(same), old(same))


def test_cosine_and_deeper_heads_are_kept_as_copies(features, randomness):
    torch.manual_seed(0)
    cosine = CosineHead([["linear", 12, 12], ["batchnorm", 12], ["relu"], ["linear", 12, 5]], 5, 4, 0.05).eval()
    deep = LayeredHead([["linear", 12, 7], ["relu"], ["linear", 7, 4]]).eval()
    for old in (cosine, deep):
        before = copy.deepcopy(old.state_dict())
        kept = keep_old_heads((old,), features, 16, randomness)
        assert torch.equal(kept.calibration(features), old(features))
        assert kept.calibration is not old
        assert kept.clustering is not kept.calibration
        with torch.no_grad():
            next(kept.clustering.parameters()).add_(1)
        assert all(torch.equal(before[name], value) for name, value in old.state_dict().items())


def test_two_old_heads_become_clustering_and_calibration_in_this_order(features, randomness):
    torch.manual_seed(0)
    first, second = ClusterHead(12, 6, 3).eval(), ClusterHead(12, 6, 3).eval()
    kept = keep_old_heads((first, second), features, 6, randomness)
    assert torch.equal(kept.clustering(features), first(features))
    assert torch.equal(kept.calibration(features), second(features))


def test_prototype_clusters_take_the_numbers_of_the_old_clusters(randomness):
    truth = torch.arange(120) % 4
    points = 10 * torch.eye(12)[truth] + 0.1 * torch.randn(120, 12, generator=randomness)
    for shift in range(4):
        old = torch.eye(4)[(truth + shift) % 4].numpy()
        made = build_initial_heads("prototypes", (), points, old, 4, 16, torch.Generator().manual_seed(shift))
        assert made.calibration.eval()(points).argmax(1).tolist() == old.argmax(1).tolist()


@pytest.mark.parametrize(("clusters", "old_clusters"), [(3, 5), (5, 3), (4, 4)])
def test_numbers_are_a_permutation_whatever_the_sizes(clusters, old_clusters):
    new, old = (np.random.default_rng(0).integers(size, size=50) for size in (clusters, old_clusters))
    assert sorted(match_cluster_numbers(new, old, clusters, old_clusters)) == list(range(clusters))


def test_numbers_are_matched_as_worked_by_hand():
    found, old = np.array([0, 0, 1, 1, 1, 2]), np.array([2, 2, 0, 0, 1, 1])
    assert match_cluster_numbers(found, old, 3, 3).tolist() == [1, 2, 0]  # number 0 goes to cluster 1, and so on


@pytest.mark.parametrize(
    "head",
    [
        ClusterHead(6, 5, 3),
        LayeredHead([["batchnorm", 6], ["relu"], ["linear", 6, 3, False]]),
        CosineHead([["linear", 6, 4], ["normalize"]], 4, 3, 0.1),
        CosineHead([], 6, 3, 0.1),
        LayeredHead([["linear", 6, 4], ["gelu"], ["linear", 4, 3]]),
        MixtureHead([2, 4], 3, 0.5),
    ],
)
def test_every_head_is_built_again_from_its_spec(head):
    again = build_head(head.spec, 6, "here")
    again.load_state_dict(head.state_dict())
    points = torch.randn(7, 6)
    assert torch.equal(again.eval()(points), head.eval()(points))
    assert again.clusters == head.clusters == 3


@pytest.mark.parametrize(
    "spec", [None, {}, {"kind": "forest"}, {"kind": "layers", "layers": [["dropout"]]}, {"kind": "mixture"}]
)
def test_a_spec_of_no_known_head_is_refused(spec):
    with pytest.raises(CheckpointError, match="does not state its heads"):
        build_head(spec, 6, "here")


def test_the_cosine_head_ignores_lengths():
    head = CosineHead([], 3, 2, 0.5)
    with torch.no_grad():
        head.centers.copy_(torch.tensor([[2.0, 0, 0], [0, 5.0, 0]]))
    logits = head(torch.tensor([[3.0, 0, 0], [0.1, 0.1, 0]]))
    torch.testing.assert_close(logits, torch.tensor([[2.0, 0.0], [2**0.5, 2**0.5]]))
    assert isinstance(head.projection, nn.Sequential)


def blobs(clusters: int, randomness: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    truth = torch.arange(60 * clusters) % clusters
    return 10 * torch.eye(8, 12)[truth] + 0.5 * torch.randn(len(truth), 12, generator=randomness), truth


@pytest.mark.parametrize("make", [lambda old: (old, copy.deepcopy(old)), lambda old: (linear_head(3, 12, bias=False),)])
@pytest.mark.parametrize("with_prototypes", [True, False])
def test_a_grown_head_keeps_its_clusters_and_has_others_for_what_is_new(randomness, make, with_prototypes):
    known, known_truth = blobs(4, randomness)
    old = make(build_initial_heads("prototypes", (), known, None, 4, 16, randomness).calibration)
    clusters = old[-1].clusters
    before = [copy.deepcopy(head.state_dict()) for head in old]
    features, truth = blobs(6, randomness)
    prototypes = fit_prototypes(known, known_truth, 4) if with_prototypes else None
    grown = build_initial_heads("grow", old, features, None, clusters + 2, 16, randomness, prototypes=prototypes)
    for head in (grown.clustering, grown.calibration):
        assert head.clusters == clusters + 2
        torch.testing.assert_close(head(known)[:, :clusters], old[-1].eval()(known), rtol=1e-4, atol=1e-4)
        again = build_head(head.spec, 12, "here")  # as it will be saved
        again.load_state_dict(head.state_dict())
        if with_prototypes and clusters == 4:
            found = head(features).argmax(dim=1)
            assert torch.equal(found[truth < 4], old[-1](features[truth < 4]).argmax(dim=1))
            assert [len(found[truth == kind].unique()) for kind in (4, 5)] == [1, 1]
            assert set(found[truth >= 4].tolist()) == {4, 5}
    assert int(grown.partition.max()) == clusters + 1
    for head, state in zip(old, before, strict=True):
        assert all(torch.equal(state[name], value) for name, value in head.state_dict().items())


def test_growing_by_nothing_keeps_the_heads(features, randomness):
    old = ClusterHead(12, 6, 3).eval()
    assert torch.equal(grow_old_heads((old,), features, 3, 6, randomness).calibration(features), old(features))


def test_heads_without_a_last_linear_layer_do_not_grow(features, randomness):
    old = CosineHead([["linear", 12, 4]], 4, 3, 0.1)
    with pytest.raises(ConfigError, match="init='grow'"):
        grow_old_heads((old,), features, 5, 16, randomness)
