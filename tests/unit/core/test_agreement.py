import itertools

import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import NearestNeighbors

from cdc_plugin.core.agreement import agreement, nearest_neighbours, neighbour_consistency, separation
from cdc_plugin.errors import DataError


def test_agreement_is_the_best_over_all_renumberings(randomness):
    first, second = torch.randint(4, (2, 60), generator=randomness)
    best = max(
        (torch.tensor(order)[first] == second).float().mean().item() for order in itertools.permutations(range(4))
    )
    assert agreement(first, second, 4) == pytest.approx(best)


def test_neighbour_consistency_is_that_of_scikit_learn(randomness):
    features = torch.randn(300, 6, generator=randomness)
    assignment = torch.randint(3, (300,), generator=randomness)
    search = NearestNeighbors(n_neighbors=11).fit(F.normalize(features, dim=1).numpy())
    nearest = search.kneighbors(return_distance=False, n_neighbors=10)
    expected = (assignment[nearest] == assignment[:, None]).float().mean().item()
    assert neighbour_consistency(features, assignment) == pytest.approx(expected, abs=1e-3)


def test_separation_by_hand(randomness):
    points = torch.tensor([[0.0, 5.0], [2.0, 5.0], [10.0, 5.0], [12.0, 5.0]])
    # means 1 and 11, each group with a standard deviation of sqrt(2)
    assert separation(points, torch.tensor([True, True, False, False])) == pytest.approx(10 / (2 * 2**0.5))
    assert separation(torch.eye(3), torch.tensor([True, False, False])) == 0.0  # a group of one
    round_group = torch.randn(20_000, 3, generator=randomness)
    assert separation(round_group, round_group[:, 0] > 0) == pytest.approx(1.32, abs=0.03)


def test_neighbours_agree_with_scikit_learn_over_several_chunks(randomness):
    features = torch.randn(1500, 6, generator=randomness)
    oracle = NearestNeighbors(n_neighbors=6, metric="cosine").fit(features.numpy())
    expected = oracle.kneighbors(return_distance=False)[:, :5]  # without the samples themselves
    assert (nearest_neighbours(features, 5).numpy() == expected).mean() > 0.999  # rounding may swap two


def test_no_image_is_its_own_neighbour_even_among_copies():
    found = nearest_neighbours(torch.ones(5, 3), 20)  # more than there are
    for row, others in enumerate(found.tolist()):
        assert sorted(others) == sorted(set(range(5)) - {row})


def test_a_single_image_has_no_neighbours_to_list_or_to_differ_from():
    with pytest.raises(DataError, match="at least 2 images; found 1"):
        nearest_neighbours(torch.ones(1, 3), 20)
    assert neighbour_consistency(torch.ones(1, 4), torch.zeros(1, dtype=torch.long)) == 1.0
