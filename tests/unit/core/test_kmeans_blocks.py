"""K-means on blocks of points is Lloyd's algorithm on all of them."""

import threading

import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from cdc_plugin.core.kmeans import lloyd, lloyd_blocks, nearest


def blobs(count: int, clusters: int, size: int, seed: int = 0) -> Tensor:
    randomness = torch.Generator().manual_seed(seed)
    centers = torch.randn(clusters, size, generator=randomness) * 3
    return centers[torch.arange(count) % clusters] + torch.randn(count, size, generator=randomness)


class Blocks:
    """Points in blocks; counts how often all of them were asked for."""

    def __init__(self, points: Tensor, *sizes: int) -> None:
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


def test_from_the_same_start_it_ends_where_scikit_learn_ends():
    points = blobs(400, 5, 6, seed=2)
    start = points[:5].clone()
    theirs = KMeans(5, init=start.numpy(), n_init=1, tol=0, max_iter=300).fit(points.numpy())
    found = lloyd_blocks(Blocks(points, 150, 250), start, iterations=300, tolerance=0.0)
    torch.testing.assert_close(found, torch.from_numpy(theirs.cluster_centers_), rtol=1e-4, atol=1e-4)
    assert nearest(points, found)[0].tolist() == theirs.labels_.tolist()


def test_processes_with_points_of_their_own_find_the_centres_of_all():
    points, meeting = blobs(300, 6, 8), threading.Barrier(3, timeout=30)
    start, shares = points[:6].clone(), points.split([120, 180, 0])
    sums: list[Tensor] = [torch.empty(0)] * 3
    found: list[Tensor] = [torch.empty(0)] * 3

    def process(rank: int) -> None:
        def total(own: Tensor) -> Tensor:
            sums[rank] = own.clone()
            meeting.wait()
            own.copy_(sum(sums))
            meeting.wait()
            return own

        found[rank] = lloyd_blocks(Blocks(shares[rank]), start.clone(), total, iterations=5, tolerance=0.0)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = lloyd_blocks(Blocks(points), start, iterations=5, tolerance=0.0)
    for centers in found:
        torch.testing.assert_close(centers, expected, rtol=1e-6, atol=1e-6)


def test_a_cluster_without_points_keeps_its_centre():
    points = torch.tensor([[0.0], [1.0], [4.0], [5.0]])
    found = lloyd_blocks(Blocks(points, 3, 1), torch.tensor([[0.0], [5.0], [100.0]]))
    assert found.tolist() == [[0.5], [4.5], [100.0]]


def test_it_stops_when_centres_move_less_than_a_part_of_the_variance():
    # Variance 4.25; centres move by 0.5 each, a sum of squares of 0.5, and then not at all.
    points = torch.tensor([[0.0], [1.0], [4.0], [5.0]])
    for tolerance, passes in ((0.5 / 4.25 * 1.01, 1), (0.5 / 4.25 * 0.99, 2)):
        blocks = Blocks(points, 2, 2)
        assert lloyd_blocks(blocks, torch.tensor([[0.0], [5.0]]), tolerance=tolerance).tolist() == [[0.5], [4.5]]
        assert blocks.passes == passes


def test_no_iterations_leave_the_centres_as_they_are():
    blocks, start = Blocks(blobs(20, 2, 3)), blobs(2, 2, 3, seed=1)
    assert torch.equal(lloyd_blocks(blocks, start, iterations=0), start)
    assert blocks.passes == 0


def test_moving_all_points_far_away_moves_the_centres_with_them():
    # Whole numbers, and sums of them in double precision: nothing is rounded but the means.
    points = (blobs(200, 4, 3) * 8).round()
    start = points[:4].clone()
    near, far = (lloyd_blocks(Blocks(points + away, 77, 123), start + away) for away in (0.0, 4096.0))
    torch.testing.assert_close(far - 4096.0, near, rtol=0, atol=1e-3)


def test_points_of_another_width_are_refused():
    with pytest.raises(RuntimeError):
        lloyd_blocks(Blocks(torch.zeros(5, 3)), torch.zeros(2, 4))
