import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.targets import find_mini_clusters, hard_targets, mini_cluster_count, mini_cluster_targets
from tests.helpers import seeded


def random_case(batch: int, clusters: int, mini_clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
    probs = F.softmax(torch.randn(batch, clusters, generator=seeded()), dim=1)
    return probs, torch.randint(mini_clusters, (batch,), generator=seeded(1))


@pytest.mark.parametrize(("batch", "clusters", "mini_clusters"), [(50, 4, 7), (30, 2, 30), (9, 3, 1), (20, 5, 100)])
def test_targets_agree_with_a_loop_over_mini_clusters(batch, clusters, mini_clusters):
    probs, assignment = random_case(batch, clusters, mini_clusters)
    expected = np.empty((batch, clusters), dtype=np.float32)
    for mini_cluster in np.unique(assignment.numpy()):
        members = assignment.numpy() == mini_cluster
        expected[members] = probs.numpy()[members].mean(axis=0)
    targets = mini_cluster_targets(probs, assignment, mini_clusters)
    torch.testing.assert_close(targets, torch.from_numpy(expected))
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(batch))


@pytest.mark.parametrize(("confidence", "count"), [(0.1, 20), (0.75, 20), (0.9, 125), (0.99, 333), (1.0, 333)])
def test_the_number_of_mini_clusters_by_hand(confidence, count):
    assert mini_cluster_count(confidence, 1000, 10, 50) == count  # 1000 / 50, / 50, / 8, / 3, / 3


def test_the_number_of_mini_clusters_grows_with_confidence_within_its_bounds():
    for batch, clusters in [(1000, 10), (64, 2), (60, 37), (4, 2), (5000, 200)]:
        counts = [mini_cluster_count(step / 100, batch, clusters, 50) for step in range(101)]
        assert counts == sorted(counts)
        assert min(2 * clusters, batch) <= counts[0] <= counts[-1] <= batch
    assert 1 <= mini_cluster_count(float("nan"), 100, 5, 50) <= 100  # the loss will tell


def test_mini_clusters_hold_features_of_one_direction_whatever_their_length():
    directions = torch.eye(4).repeat(6, 1)
    lengths = torch.rand(24, 1, generator=seeded()) * 50 + 0.1
    assignment = find_mini_clusters(directions * lengths, 4, seeded())
    for first in range(4):
        assert len(set(assignment[first::4].tolist())) == 1
    assert len(set(assignment.tolist())) == 4


@pytest.mark.parametrize(
    "features", [torch.zeros(8, 3), torch.ones(8, 3), torch.randn(8, 3)], ids=["zero", "constant", "random"]
)
@pytest.mark.parametrize("mini_clusters", [1, 2, 8, 20])
def test_any_features_and_more_mini_clusters_than_samples_will_do(features, mini_clusters):
    assignment = find_mini_clusters(features, mini_clusters, seeded())
    assert assignment.shape == (8,)
    targets = mini_cluster_targets(torch.full((8, 2), 0.5), assignment, max(mini_clusters, 8))
    assert torch.isfinite(targets).all()


def test_hard_targets_are_the_most_probable_clusters():
    probs = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]], dtype=torch.float64)
    targets = hard_targets(probs)
    assert targets.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert targets.dtype == probs.dtype


def test_mini_clusters_are_those_of_kmeans_after_twenty_iterations():
    features = torch.randn(300, 6, generator=seeded(5))
    assignment = find_mini_clusters(features, 12, seeded())
    directions = F.normalize(features, dim=1)
    assert torch.equal(assignment, kmeans(directions, 12, seeded(), iterations=20).assignment)
    assert not torch.equal(assignment, kmeans(directions, 12, seeded(), iterations=1).assignment)
