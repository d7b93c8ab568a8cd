import pytest
import torch

from cdc_plugin.core.neighbours import nearest_neighbours
from cdc_plugin.errors import UserError


def test_neighbours_of_directions_on_a_quarter_circle():
    degrees = torch.tensor([0.0, 10.0, 30.0, 90.0]).deg2rad()
    features = torch.stack([degrees.cos(), degrees.sin()], dim=1)
    # 0 is 10, 30, 90 away; 10 is 10, 20, 80; 30 is 20, 30, 60; 90 is 60, 80, 90
    assert nearest_neighbours(features, 2).tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]


def test_neighbours_agree_with_scikit_learn_over_several_chunks(randomness):
    from sklearn.neighbors import NearestNeighbors

    features = torch.randn(1500, 6, generator=randomness)
    oracle = NearestNeighbors(n_neighbors=6, metric="cosine").fit(features.numpy())
    expected = oracle.kneighbors(return_distance=False)[:, :5]  # without the samples themselves
    assert (nearest_neighbours(features, 5).numpy() == expected).mean() > 0.999  # rounding may swap two


def test_neighbours_do_not_depend_on_the_length_of_features(randomness):
    features = torch.randn(40, 5, generator=randomness)
    scaled = features * (torch.rand(40, 1, generator=randomness) + 0.5)
    assert torch.equal(nearest_neighbours(features, 4), nearest_neighbours(scaled, 4))


def test_no_image_is_its_own_neighbour_even_among_copies():
    found = nearest_neighbours(torch.ones(5, 3), 4)
    for row, others in enumerate(found.tolist()):
        assert sorted(others) == sorted(set(range(5)) - {row})


def test_tiny_sets_have_fewer_neighbours_than_asked_for():
    assert nearest_neighbours(torch.eye(3), 20).shape == (3, 2)


def test_a_single_image_has_no_neighbours_and_is_refused():
    with pytest.raises(UserError, match="at least 2 images; found 1"):
        nearest_neighbours(torch.ones(1, 3), 20)
