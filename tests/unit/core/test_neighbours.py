import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cdc_plugin.core.neighbours import balanced_cross_entropy, consistency_loss, nearest_neighbours, scan_loss
from cdc_plugin.errors import UserError


def logits_of(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


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


def test_consistency_of_two_pairs_by_hand():
    images = logits_of([0.8, 0.2], [0.5, 0.5])
    neighbours = logits_of([0.6, 0.4], [1 / 4, 3 / 4])
    # products: .8 * .6 + .2 * .4 = .56; .5 * .25 + .5 * .75 = .5
    expected = -(math.log(0.56) + math.log(0.5)) / 2
    assert consistency_loss(images, neighbours).item() == pytest.approx(expected, abs=1e-6)


def test_consistency_agrees_with_binary_cross_entropy_of_the_products(randomness):
    one, other = torch.randn(2, 30, 7, generator=randomness)
    products = (F.softmax(one, dim=1) * F.softmax(other, dim=1)).sum(dim=1)
    expected = F.binary_cross_entropy(products, torch.ones(30))
    assert consistency_loss(one, other).item() == pytest.approx(expected.item(), abs=1e-5)


def test_consistency_is_symmetric_and_blind_to_the_numbering_of_clusters(randomness):
    one, other = torch.randn(2, 12, 5, generator=randomness)
    order = torch.randperm(5, generator=randomness)
    assert torch.allclose(consistency_loss(one, other), consistency_loss(other, one))
    assert torch.allclose(consistency_loss(one, other), consistency_loss(one[:, order], other[:, order]))


def test_opposite_certainty_has_a_finite_loss_and_gradient():
    one = torch.tensor([[500.0, 0.0]], requires_grad=True)
    loss = consistency_loss(one, torch.tensor([[0.0, 500.0]]))
    loss.backward()
    # log products are 0 - 500 in both clusters: log(2 e^-500)
    assert loss.item() == pytest.approx(500 - math.log(2), abs=1e-3)
    assert torch.isfinite(one.grad).all()


def test_scan_loss_subtracts_the_weighted_entropy_of_the_mean_prediction():
    images = logits_of([0.9, 0.1], [0.3, 0.7])  # mean .6 and .4
    neighbours = logits_of([0.5, 0.5], [0.5, 0.5])  # every product is .5
    entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    assert scan_loss(images, neighbours, 5.0).item() == pytest.approx(math.log(2) - 5 * entropy, abs=1e-6)


def test_even_and_sure_clusters_have_a_lower_scan_loss_than_a_single_one():
    even, single = 20 * torch.eye(4), 20 * torch.eye(4)[[0, 0, 0, 0]]
    assert scan_loss(even, even, 5.0) < scan_loss(single, single, 5.0) - 6  # 5 log 4 = 6.9


def test_a_rare_label_weighs_as_much_as_a_frequent_one():
    logits = logits_of([0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.5, 0.5], [0.1, 0.9])
    labels = torch.tensor([0, 0, 0, 1, 1])
    mask = torch.tensor([True, True, True, True, False])
    # mean of label 0: -log .8; of label 1: -log .5 (the last sample is not trusted)
    expected = -(math.log(0.8) + math.log(0.5)) / 2
    assert balanced_cross_entropy(logits, labels, mask).item() == pytest.approx(expected, abs=1e-6)


def test_balanced_cross_entropy_agrees_with_class_weights_of_torch(randomness):
    logits = torch.randn(50, 6, generator=randomness)
    labels = torch.randint(4, (50,), generator=randomness)  # two clusters never occur
    mask = torch.rand(50, generator=randomness) < 0.6
    counts = np.bincount(labels[mask], minlength=6)
    weights = torch.tensor([mask.sum().item() / count if count else 1.0 for count in counts])
    expected = F.cross_entropy(logits[mask], labels[mask], weight=weights.float())
    assert balanced_cross_entropy(logits, labels, mask).item() == pytest.approx(expected.item(), abs=1e-5)


def test_repeating_the_samples_of_one_label_changes_nothing(randomness):
    logits, labels = torch.randn(6, 3, generator=randomness), torch.tensor([0, 0, 0, 1, 1, 2])
    more = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5])
    once = balanced_cross_entropy(logits, labels, torch.ones(6, dtype=torch.bool))
    twice = balanced_cross_entropy(logits[more], labels[more], torch.ones(9, dtype=torch.bool))
    assert torch.allclose(once, twice)


def test_nothing_trusted_gives_zero_and_a_zero_gradient():
    logits = torch.randn(4, 3, requires_grad=True)
    loss = balanced_cross_entropy(logits, torch.tensor([0, 1, 2, 0]), torch.zeros(4, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(4, 3))
