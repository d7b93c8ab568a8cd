import math

import numpy as np
import pytest
import torch

from cdc_plugin.core.mahalanobis import fit_prototypes


def blobs(count: int, dim: int, clusters: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    centers = torch.randn(clusters, dim, generator=torch.Generator().manual_seed(1))
    assignment = torch.arange(count) % clusters
    return centers[assignment] + 0.3 * torch.randn(count, dim, generator=generator), assignment


def test_the_distance_is_the_mahalanobis_distance_to_the_nearest_mean(randomness):
    features, assignment = blobs(4000, 5, 3, randomness)
    unit = (features / features.norm(dim=1, keepdim=True)).double().numpy()
    means = np.stack([unit[assignment.numpy() == number].mean(axis=0) for number in range(3)])
    scatter = np.cov((unit - means[assignment.numpy()]).T, bias=True)
    scatter += 0.01 * np.trace(scatter) / 5 * np.eye(5)
    gaps = unit[:50, None] - means
    expected = np.sqrt(np.einsum("ncd,de,nce->nc", gaps, np.linalg.inv(scatter), gaps)).min(axis=1)
    found = fit_prototypes(features, assignment, 3).distance(features[:50])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3)


def test_about_one_image_in_a_hundred_of_the_same_kind_is_flagged_and_foreign_ones_are(randomness):
    features, assignment = blobs(3000, 20, 5, randomness)
    prototypes = fit_prototypes(features, assignment, 5)
    alike, _ = blobs(3000, 20, 5, randomness)
    foreign = torch.randn(500, 20, generator=randomness)
    assert 0.003 < (prototypes.distance(alike) > prototypes.limit).float().mean() < 0.03
    assert (prototypes.distance(foreign) > prototypes.limit).float().mean() > 0.9


def test_more_directions_than_images_do_not_make_every_new_image_an_outlier(randomness):
    features, assignment = blobs(60, 200, 3, randomness)
    prototypes = fit_prototypes(features, assignment, 3)
    alike, _ = blobs(300, 200, 3, randomness)
    assert (prototypes.distance(alike) > prototypes.limit).float().mean() < 0.1


def test_the_length_of_features_and_the_numbers_of_clusters_do_not_matter(randomness):
    features, assignment = blobs(300, 8, 3, randomness)
    first = fit_prototypes(features, assignment, 3)
    second = fit_prototypes(features * torch.linspace(0.5, 4, 300)[:, None], (assignment + 1) % 3, 3)
    torch.testing.assert_close(first.distance(features), second.distance(7 * features), rtol=1e-3, atol=1e-3)
    assert first.limit == pytest.approx(second.limit, rel=1e-3)


@pytest.mark.parametrize("features", [torch.eye(4)[:1], torch.eye(4)[:3], torch.ones(50, 4)], ids=["1", "3", "equal"])
def test_few_or_equal_images_give_finite_distances_and_too_few_flag_nothing(features):
    prototypes = fit_prototypes(features, torch.zeros(len(features), dtype=torch.long), 2)
    assert torch.isfinite(prototypes.distance(torch.eye(4))).all()
    assert (prototypes.limit == math.inf) == (len(features) < 4)
    assert len(prototypes.centers) == 1  # an empty cluster has none


def test_each_half_of_the_images_is_measured_by_the_prototypes_of_the_other_for_the_limit(randomness):
    features, _ = blobs(400, 6, 2, randomness)
    assignment = torch.arange(400) // 2 % 2  # clusters in both halves
    features = torch.where((torch.arange(400) % 2 == 0)[:, None], features, features + 1.0)  # unlike halves
    even, odd = slice(0, None, 2), slice(1, None, 2)
    distances = [
        fit_prototypes(features[fitted], assignment[fitted], 2).distance(features[measured])
        for fitted, measured in ((even, odd), (odd, even))
    ]
    limit = torch.cat(distances).sort().values[int(0.99 * 400)].item()
    assert fit_prototypes(features, assignment, 2).limit == pytest.approx(limit, rel=1e-4)
