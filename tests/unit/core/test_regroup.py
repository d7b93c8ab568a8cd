import pytest
import torch

from cdc_plugin.core.agreement import agreement, nearest_neighbours
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.regroup import measure_bonds, regroup


def blobs(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    kinds = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    noise = torch.randn(len(kinds), 8, generator=torch.Generator().manual_seed(0))
    return 6 * torch.eye(len(sizes), 8)[kinds] + noise, kinds


def again(points: torch.Tensor, assignment: torch.Tensor, clusters: int, margin: float = 1.5):
    return regroup(points, assignment, clusters, margin, torch.Generator().manual_seed(0))


def test_a_large_kind_that_was_cut_in_two_is_joined_and_two_small_ones_are_parted():
    points, kinds = blobs(150, 120, 40, 30)
    halves = kmeans(points[kinds == 0], 2, torch.Generator().manual_seed(0)).assignment
    wrong = torch.where(kinds == 3, 2, kinds)
    wrong[kinds == 0] = torch.where(halves == 0, 0, 3)
    found, ratio = again(points, wrong, 4)
    assert ratio > 2
    assert agreement(found, kinds, 4) > 0.98
    assert agreement(wrong, kinds, 4) < 0.75


def test_clusters_that_overlap_are_not_all_joined_to_one_that_is_far_larger_than_the_others():
    points, kinds = blobs(200, 60, 60)
    wrong = torch.where(kinds == 2, 1, kinds)
    wrong[:100] = 2  # the first kind has half of the images and more
    assert agreement(again(points, wrong, 3)[0], kinds, 3) > 0.98
    points, kinds = blobs(300, 60, 60)
    wrong = torch.where(kinds == 2, 1, kinds)
    wrong[:150] = 2
    assert torch.equal(again(points, wrong, 3)[0], wrong)


@pytest.mark.parametrize("sizes", [(100, 100, 100), (300, 60, 20)])
def test_right_clusters_of_any_sizes_are_left_as_they_are(sizes):
    points, kinds = blobs(*sizes)
    found, ratio = again(points, kinds, 3)
    assert torch.equal(found, kinds)
    assert ratio < 1


def test_one_that_stands_apart_takes_the_place_of_an_empty_cluster():
    points, kinds = blobs(200, 100, 20)
    found, _ = again(points, kinds.clamp(max=1), 3)
    assert agreement(found, kinds, 3) > 0.98
    assert found.bincount(minlength=3).min() >= 18


def test_a_few_strays_are_no_cluster():
    points, kinds = blobs(300, 200, 4)
    found, _ = again(points, kinds.clamp(max=1), 3, margin=1.0)
    assert found.bincount(minlength=3).min() != 4


def test_nothing_can_be_regrouped_into_two_clusters():
    points, kinds = blobs(60, 30)
    assert torch.equal(again(points, kinds, 2)[0], kinds)


def test_bonds_are_shares_of_links_counted_one_by_one():
    points, _ = blobs(30, 20)
    assignment = torch.randint(3, (50,), generator=torch.Generator().manual_seed(1))
    near = nearest_neighbours(points, 4)
    links = [(int(assignment[i]), int(assignment[j])) for i in range(50) for j in near[i]]
    bonds = measure_bonds(assignment, near, 3)
    for one in range(3):
        for other in range(3):
            ends = [sum(link.count(cluster) for link in links) for cluster in (one, other)]
            between = sum(set(link) == {one, other} for link in links) if one != other else 0
            assert bonds[one, other].item() == pytest.approx(between / min(ends))
