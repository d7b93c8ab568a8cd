import pytest
import torch

from cdc_plugin.core.kinds import LEAST, find_kinds, measure_silhouette
from cdc_plugin.core.mahalanobis import fit_prototypes

KNOWN = 5


def images(counts: list[int], generator: torch.Generator, dim: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (N, D) of so many images of every kind, and their kinds (N,); the first `KNOWN` are clusters."""
    centers = torch.randn(8, dim, generator=torch.Generator().manual_seed(1))
    kind = torch.cat([torch.full((count,), number) for number, count in enumerate(counts)])
    return centers[kind] + 0.4 * torch.randn(len(kind), dim, generator=generator), kind


@pytest.fixture
def prototypes(randomness):
    return fit_prototypes(*images([80] * KNOWN, randomness), KNOWN)


def found_in(counts: list[int], prototypes, generator: torch.Generator, wanted: int | None = None):
    features, truth = images(counts, generator)
    kinds = find_kinds(features, prototypes, generator, wanted)
    return kinds.assign(features)[0], truth, kinds


def test_two_new_kinds_come_back_the_larger_first(prototypes, randomness):
    found, truth, _ = found_in([40] * KNOWN + [50, 30], prototypes, randomness)
    for number, kind in enumerate((KNOWN, KNOWN + 1)):
        assert (truth[found == number] == kind).float().mean() > 0.95
        assert (found[truth == kind] == number).float().mean() > 0.9


def test_images_of_the_clusters_are_no_new_kind(prototypes, randomness):
    for counts in ([40] * KNOWN, [200] * KNOWN, [300, 0, 0, 0, 0]):
        found, _, kinds = found_in(counts, prototypes, randomness)
        assert len(kinds.centers) == 0
        assert (found == -1).all()


def test_images_within_the_limit_of_outliers_are_found(prototypes, randomness):
    wide = type(prototypes)(prototypes.centers, prototypes.whitening, float("inf"))
    found, truth, _ = found_in([40] * KNOWN + [50], wide, randomness)
    assert ((found >= 0) == (truth == KNOWN)).float().mean() > 0.95


def test_few_images_are_no_kind(prototypes, randomness):
    for counts in ([0, 0, 3], [40] * KNOWN + [LEAST - 3], [1], [0] * KNOWN + [3]):
        found, _, _ = found_in(counts, prototypes, randomness)
        assert (found == -1).all()


def test_only_new_images_and_equal_ones_are_taken_as_they_come(prototypes, randomness):
    found, _, _ = found_in([0] * KNOWN + [60], prototypes, randomness)
    assert (found >= 0).float().mean() > 0.9
    same = torch.ones(50, 24)
    found, _ = find_kinds(same, prototypes, randomness).assign(same)
    assert len(found) == 50


@pytest.mark.parametrize("wanted", [1, 2, 3, 12])
def test_as_many_kinds_as_are_wanted_are_returned(prototypes, randomness, wanted):
    _, _, kinds = found_in([40] * KNOWN + [50, 30], prototypes, randomness, wanted)
    assert kinds.centers.shape[0] == wanted


def test_the_same_images_give_the_same_kinds(prototypes):
    features, _ = images([40] * KNOWN + [50, 30], torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    first = find_kinds(features, prototypes, torch.Generator().manual_seed(0)).assign(features)
    torch.manual_seed(1)
    second = find_kinds(features, prototypes, torch.Generator().manual_seed(0)).assign(features)
    assert torch.equal(first[0], second[0])


def test_the_silhouette_of_equal_points_is_a_number():
    assert measure_silhouette(torch.zeros(4, 4), torch.tensor([0, 0, 1, 1])) == 0
