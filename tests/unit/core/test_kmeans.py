import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sklearn.cluster import KMeans

from cdc_plugin.core.kmeans import kmeans, lloyd, lloyd_blocks, nearest, seed_centers
from tests.helpers import seeded


def blobs(count: int, clusters: int, size: int, seed: int = 0) -> torch.Tensor:
    randomness = seeded(seed)
    centers = torch.randn(clusters, size, generator=randomness) * 3
    return centers[torch.arange(count) % clusters] + torch.randn(count, size, generator=randomness)


def as_sets(assignment: torch.Tensor) -> set[frozenset[int]]:
    """A partition without the numbers of its clusters."""
    members: dict[int, list[int]] = {}
    for sample, cluster in enumerate(assignment.tolist()):
        members.setdefault(cluster, []).append(sample)
    return {frozenset(group) for group in members.values()}


def test_four_points_in_two_pairs_by_hand():
    points = torch.tensor([[0.0, 0.0], [0.0, 2.0], [10.0, 0.0], [10.0, 2.0]])
    found = kmeans(points, 2, seeded())
    assert as_sets(found.assignment) == {frozenset({0, 1}), frozenset({2, 3})}
    assert sorted(found.centers.tolist()) == [[0.0, 1.0], [10.0, 1.0]]
    assert found.inertia == pytest.approx(4.0)  # each point lies at distance 1


def test_nearest_agrees_with_all_distances_in_blocks_too(monkeypatch):
    points, centers = blobs(200, 4, 5), blobs(7, 7, 5, seed=1)
    index, distance = nearest(points, centers)
    expected = torch.cdist(points, centers).square().min(dim=1)
    assert torch.equal(index, expected.indices)
    torch.testing.assert_close(distance, expected.values, rtol=1e-4, atol=1e-3)
    monkeypatch.setattr("cdc_plugin.core.kmeans._BLOCK", 16)
    assert torch.equal(nearest(points, centers)[0], index)


@pytest.mark.parametrize(("count", "clusters", "size"), [(400, 10, 16), (300, 40, 3), (200, 2, 64), (2500, 5, 4)])
def test_single_starts_are_on_average_as_good_as_those_of_scikit_learn(count, clusters, size):
    points = blobs(count, 12, size)
    ours = [kmeans(points, clusters, seeded(seed)) for seed in range(12)]
    theirs = [KMeans(clusters, n_init=1, random_state=seed).fit(points.numpy()).inertia_ for seed in range(12)]
    assert sum(run.inertia for run in ours) <= 1.02 * sum(theirs)
    for run in ours:
        spread = (points - run.centers[run.assignment]).square().sum().item()
        assert run.inertia == pytest.approx(spread, rel=1e-3)


def test_lloyd_from_the_same_start_ends_where_scikit_learn_ends():
    points = blobs(300, 6, 8)
    start = points[:6].clone()
    theirs = KMeans(6, init=start.numpy(), n_init=1, tol=0, max_iter=300).fit(points.numpy())
    ours = lloyd(points, start, iterations=300, tolerance=0.0)
    assert as_sets(ours.assignment) == as_sets(torch.from_numpy(theirs.labels_))


def test_more_starts_are_never_worse():
    points = blobs(200, 15, 4)
    assert kmeans(points, 15, seeded(), starts=8).inertia <= kmeans(points, 15, seeded()).inertia


def test_moving_all_points_far_away_changes_nothing():
    points = blobs(200, 5, 6).double()
    near = kmeans(points, 5, seeded())
    far = kmeans(points + 1000, 5, seeded())
    assert as_sets(far.assignment) == as_sets(near.assignment)
    assert far.inertia == pytest.approx(near.inertia, rel=1e-2)


def test_same_seed_same_partition_and_only_the_given_generator_is_used():
    points = blobs(200, 5, 6)
    state = torch.get_rng_state()
    first = kmeans(points, 20, seeded(3))
    torch.rand(7)
    assert torch.equal(first.assignment, kmeans(points, 20, seeded(3)).assignment)
    torch.set_rng_state(state)
    kmeans(points, 20, seeded(3))
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_are_points_and_a_large_set_is_seeded_on_a_sample():
    points = blobs(5000, 3, 2)
    centers = seed_centers(points, 4, seeded())
    assert centers.shape == (4, 2)
    assert torch.cdist(centers, points).min(dim=1).values.max() < 1e-3


def test_seeds_are_the_same_whether_all_distances_fit_into_memory_or_not(monkeypatch):
    points = torch.randint(-8, 9, (60, 4), generator=seeded()).float()  # whole numbers: no rounding
    expected = seed_centers(points, 30, seeded(1))
    monkeypatch.setattr("cdc_plugin.core.kmeans._PAIRS", 0)
    assert torch.equal(seed_centers(points, 30, seeded(1)), expected)


def test_duplicates_take_one_seed_each_before_any_repeats():
    points = torch.eye(4).repeat_interleave(25, dim=0)
    for seed in range(5):
        assert kmeans(points, 4, seeded(seed)).inertia == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("clusters", [1, 2, 7, 10, 25])
@pytest.mark.parametrize(
    "points",
    [torch.ones(10, 3), torch.zeros(10, 1), torch.tensor([[0.0, 0.0], [1.0, 1.0]]).repeat(5, 1), torch.randn(10, 2)],
    ids=["constant", "zero", "duplicates", "random"],
)
def test_degenerate_points_give_finite_centers(points, clusters):
    found = kmeans(points, clusters, seeded())
    assert found.centers.shape == (clusters, points.shape[1])
    assert torch.isfinite(found.centers).all()
    assert found.assignment.shape == (10,)
    assert 0 <= int(found.assignment.min()) <= int(found.assignment.max()) < clusters
    assert found.inertia >= 0


def test_more_clusters_than_points_leave_every_point_alone():
    found = kmeans(blobs(5, 5, 3), 9, seeded())
    assert (found.assignment.tolist(), found.inertia) == ([0, 1, 2, 3, 4], 0)


def test_half_precision_and_gradients_are_no_obstacle():
    points = blobs(50, 3, 4).bfloat16().requires_grad_()
    found = kmeans(points, 3, seeded())
    assert found.centers.dtype == torch.float32
    assert not found.centers.requires_grad


@pytest.mark.parametrize(("count", "clusters"), [(0, 3), (3, 0)])
def test_no_points_or_no_clusters_are_refused(count, clusters):
    with pytest.raises(ValueError, match="at least one cluster and one point"):
        kmeans(torch.zeros(count, 2), clusters, seeded())


class Blocks:
    """Points in blocks; counts how often all of them were asked for."""

    def __init__(self, points: torch.Tensor, *sizes: int) -> None:
        self.parts = points.split(list(sizes)) if sizes else (points,)
        self.passes = 0

    def __call__(self):
        self.passes += 1
        return iter(self.parts)


def test_two_pairs_in_two_blocks_by_hand():
    points = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 2.0], [10.0, 2.0]])
    blocks = Blocks(points, 2, 2)
    start = torch.tensor([[1.0, 0.0], [9.0, 0.0]])
    assert lloyd_blocks(blocks, start).tolist() == [[0.0, 1.0], [10.0, 1.0]]
    assert blocks.passes == 2  # the second finds that nothing has moved
    assert start.tolist() == [[1.0, 0.0], [9.0, 0.0]]


@pytest.mark.parametrize("sizes", [(), (1, 299), (100, 100, 100), (7, 0, 290, 3)], ids=str)
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_centres_are_those_of_lloyd_on_all_points_however_they_are_cut(sizes, iterations):
    points = blobs(300, 6, 8)
    start = points[:6].clone()
    found = lloyd_blocks(Blocks(points, *sizes), start, iterations=iterations, tolerance=0.0)
    expected = lloyd(points, start, iterations, tolerance=0.0)
    torch.testing.assert_close(found, expected.centers, rtol=1e-5, atol=1e-5)
    assert found.dtype == start.dtype


def test_processes_with_points_of_their_own_find_the_centres_of_all():
    points, meeting = blobs(300, 6, 8), threading.Barrier(3, timeout=30)
    start, shares = points[:6].clone(), points.split([120, 180, 0])
    sums = {}

    def process(rank: int) -> torch.Tensor:
        def total(own: torch.Tensor) -> torch.Tensor:
            sums[rank] = own.clone()
            meeting.wait()
            own.copy_(sum(sums.values()))
            meeting.wait()
            return own

        return lloyd_blocks(Blocks(shares[rank]), start.clone(), total, iterations=5, tolerance=0.0)

    expected = lloyd_blocks(Blocks(points), start, iterations=5, tolerance=0.0)
    with ThreadPoolExecutor(3) as pool:
        for centers in pool.map(process, range(3)):
            torch.testing.assert_close(centers, expected, rtol=1e-6, atol=1e-6)


def test_a_cluster_without_points_keeps_its_centre():
    points = torch.tensor([[0.0], [1.0], [4.0], [5.0]])
    start = torch.tensor([[0.0], [5.0], [100.0]])
    for found in (lloyd(points, start).centers, lloyd_blocks(Blocks(points, 3, 1), start)):
        assert found.tolist() == [[0.5], [4.5], [100.0]]


def test_it_stops_when_centres_move_less_than_a_part_of_the_variance():
    # Variance 4.25; centres move by 0.5 each, a sum of squares of 0.5, and then not at all.
    points = torch.tensor([[0.0], [1.0], [4.0], [5.0]])
    for tolerance, passes in ((0.5 / 4.25 * 1.01, 1), (0.5 / 4.25 * 0.99, 2)):
        blocks = Blocks(points, 2, 2)
        assert lloyd_blocks(blocks, torch.tensor([[0.0], [5.0]]), tolerance=tolerance).tolist() == [[0.5], [4.5]]
        assert blocks.passes == passes


def test_moving_all_points_far_away_moves_the_centres_with_them():
    # Whole numbers, and sums of them in double precision: nothing is rounded but the means.
    points = (blobs(200, 4, 3) * 8).round()
    start = points[:4].clone()
    near, far = (lloyd_blocks(Blocks(points + away, 77, 123), start + away) for away in (0.0, 4096.0))
    torch.testing.assert_close(far - 4096.0, near, rtol=0, atol=1e-3)
