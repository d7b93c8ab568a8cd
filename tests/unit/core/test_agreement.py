import itertools

import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import NearestNeighbors

from cdc_plugin.core.agreement import agreement, neighbour_consistency, separation


def test_agreement_by_hand():
    first = torch.tensor([0, 0, 0, 1, 1, 2])
    second = torch.tensor([1, 1, 0, 0, 0, 2])  # 0 -> 1 (two), 1 -> 0 (two), 2 -> 2 (one)
    assert agreement(first, second, 3) == pytest.approx(5 / 6)


def test_agreement_is_the_best_over_all_renumberings(randomness):
    first, second = torch.randint(4, (2, 60), generator=randomness)
    best = max(
        (torch.tensor(order)[first] == second).float().mean().item() for order in itertools.permutations(range(4))
    )
    assert agreement(first, second, 4) == pytest.approx(best)


def test_other_numbers_for_the_same_clusters_agree_wholly(randomness):
    first = torch.randint(5, (100,), generator=randomness)
    assert agreement(first, (first + 2) % 5, 5) == 1.0


def test_neighbour_consistency_is_that_of_scikit_learn(randomness):
    features = torch.randn(300, 6, generator=randomness)
    assignment = torch.randint(3, (300,), generator=randomness)
    search = NearestNeighbors(n_neighbors=11).fit(F.normalize(features, dim=1).numpy())
    nearest = search.kneighbors(return_distance=False, n_neighbors=10)
    expected = (assignment[nearest] == assignment[:, None]).float().mean().item()
    assert neighbour_consistency(features, assignment) == pytest.approx(expected, abs=1e-3)


def test_one_image_has_no_neighbour_to_differ_from():
    assert neighbour_consistency(torch.ones(1, 4), torch.zeros(1, dtype=torch.long)) == 1.0


def test_separation_by_hand():
    points = torch.tensor([[0.0, 5.0], [2.0, 5.0], [10.0, 5.0], [12.0, 5.0]])
    # means 1 and 11, each group with a standard deviation of sqrt(2)
    assert separation(points, torch.tensor([True, True, False, False])) == pytest.approx(10 / (2 * 2**0.5))


def test_a_round_group_cut_through_its_middle_is_hardly_separated(randomness):
    points = torch.randn(20_000, 3, generator=randomness)
    assert separation(points, points[:, 0] > 0) == pytest.approx(1.32, abs=0.03)


def test_a_group_of_one_is_not_separated():
    assert separation(torch.eye(3), torch.tensor([True, False, False])) == 0.0
