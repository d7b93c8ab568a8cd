"""Blobs whose number is known: it must be found, lie in its range, and neighbours must not be confused with halves."""

import itertools
import math

import numpy as np
import pytest
import torch

from cdc_plugin.core.cluster_count import Weights, count_clusters, list_candidates, measure_strength, weigh
from cdc_plugin.core.communities import count_communities
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.probe import principal_components
from cdc_plugin.core.valley import compare_neighbours, cut_groups, measure_valley


def blobs(kinds: int, each: int, apart: float, seed: int = 0) -> torch.Tensor:
    """Return points around ``kinds`` corners of a simplex, in twice as many dimensions."""
    randomness = torch.Generator().manual_seed(seed)
    centers = torch.eye(kinds, 2 * kinds).repeat_interleave(each, dim=0) * apart
    return centers + torch.randn(centers.shape, generator=randomness)


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kinds", [2, 4, 7, 12])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_number_of_clear_kinds_is_found(kinds, seed):
    points = principal_components(blobs(kinds, 60, apart=9.0, seed=seed))
    found = count_clusters(points, 2, 20, random(seed))
    assert found.number == kinds
    assert found.low <= kinds <= found.high


def test_a_range_is_kept_and_never_more_than_the_points_can_show():
    points = principal_components(blobs(6, 20, apart=9.0))
    found = count_clusters(points, 3, 5, random())
    assert 3 <= found.low <= found.number <= found.high <= 5
    assert max(count_clusters(points, 2, 50, random()).candidates) == len(points) // 20
    assert count_clusters(points[:5], 2, 50, random()).number == 2


def test_the_same_seed_finds_the_same():
    points = principal_components(blobs(5, 40, apart=4.0))
    assert count_clusters(points, 2, 10, random()) == count_clusters(points, 2, 10, random())


def test_points_that_are_all_the_same_have_a_number_too():
    assert count_clusters(torch.zeros(100, 8), 2, 5, random()).number in range(2, 6)


def test_candidates_are_all_small_numbers_and_end_with_the_highest():
    candidates = list_candidates(2, 200)
    assert candidates[:19] == list(range(2, 21))
    assert candidates[-1] == 200
    assert all(b / a <= 1.1 for a, b in itertools.pairwise(candidates[18:]))


def test_evidence_is_weighed_by_its_weights():
    evidence = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    found = weigh(evidence, [5, 6], Weights(1.0, 0.5, -1.0, 0.25, held=0.6))
    odds = math.exp(1.0 + 1.0 - 3.0 + 1.0)
    assert found.shares == pytest.approx([1 / (1 + odds), odds / (1 + odds)])
    assert weigh(evidence, [5, 6], Weights(1.0, 0, 0, 0, held=0.7)).number == 6
    assert (weigh(evidence, [5, 6], Weights(1.0, 0, 0, 0, held=0.7)).low) == 6
    assert (weigh(evidence, [5, 6], Weights(1.0, 0, 0, 0, held=0.8)).low) == 5


def test_strength_is_that_of_counting_pairs():
    points = blobs(3, 30, apart=3.0)
    halves = torch.randperm(90, generator=random()).tensor_split(2)
    found = measure_strength(points, halves, 4, random(1))
    randomness = random(1)
    first, second = (kmeans(points[half], 4, randomness, starts=3) for half in halves)
    shares = []
    for own, other, half in ((first, second, halves[0]), (second, first, halves[1])):
        named = torch.cdist(points[half], other.centers).argmin(dim=1).tolist()
        for number in range(4):
            members = [place for place, cluster in enumerate(own.assignment.tolist()) if cluster == number]
            pairs = [(a, b) for a in members for b in members if a != b]
            if pairs:
                shares.append(np.mean([named[a] == named[b] for a, b in pairs]))
    assert found == pytest.approx(np.mean(shares), abs=1e-5)


def test_a_cut_through_one_kind_has_no_valley_and_a_gap_has():
    points = torch.randn(600, 10, generator=random())
    cut = points[:, 0] > 0
    assert measure_valley(points[cut], points[~cut], random()) > 0.8
    step = torch.zeros(10)
    step[0] = 3.0
    valleys = [measure_valley(points[cut] + far * step, points[~cut], random()) for far in (0.3, 0.7, 1.5)]
    assert valleys == sorted(valleys, reverse=True)
    assert valleys[-1] < 0.1


def test_few_points_and_equal_points_have_no_valley():
    assert measure_valley(torch.zeros(3, 2), torch.ones(3, 2), random()) == 1.0
    assert measure_valley(torch.ones(50, 2), torch.ones(50, 2), random()) == 1.0


def test_the_pair_that_was_cut_and_the_cluster_of_two_kinds_stand_out():
    points = blobs(4, 100, apart=8.0)
    kind = torch.arange(4).repeat_interleave(100)
    cut = torch.where((kind == 0) & (points[:, 5] > 0), 4, kind)  # half of kind 0 is a cluster of its own
    cut[kind == 3] = 2  # and 2 holds two kinds
    pairs = compare_neighbours(points, cut, random())
    assert max(pairs, key=lambda pair: pairs[pair]) == (0, 4)
    inside = cut_groups(points, cut, random())
    assert min(inside, key=lambda number: inside[number][0]) == 2
    halves = inside[2][1]
    assert sorted([halves[:100].float().mean().round().item(), halves[100:].float().mean().round().item()]) == [0, 1]


def test_communities_are_counted_whatever_the_order_and_however_few():
    points = blobs(4, 60, apart=9.0)
    order = torch.randperm(240, generator=random(5))
    assert count_communities(points, random()) == count_communities(points[order], random()) == 4
    assert count_communities(points[:2], random()) >= 1
