import json

import numpy as np
import pytest
import torch

from cdc_plugin.core.hierarchy import Hierarchy, build_hierarchy, read_hierarchy, sum_groups
from cdc_plugin.errors import CheckpointError, ConfigError

FIVE = Hierarchy(((1, 4), (0, 2), (0, 1), (0, 3)), (0.1, 0.2, 0.2, 0.9))


def images_of(directions: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (N, D) around directions (C, D), 40 each, and probabilities that are sure of all."""
    truth = torch.arange(40 * len(directions)) % len(directions)
    features = directions[truth] + 0.05 * torch.randn(len(truth), directions.shape[1], generator=generator)
    return features, 0.98 * torch.eye(len(directions))[truth] + 0.02 / len(directions)


def test_groups_are_numbered_by_their_smallest_cluster():
    expected = {5: [0, 1, 2, 3, 4], 4: [0, 1, 2, 3, 1], 3: [0, 1, 0, 2, 1], 2: [0, 0, 0, 1, 0], 1: [0] * 5}
    assert {level: FIVE.groups(level).tolist() for level in expected} == expected
    for level in (0, 6, -1):
        with pytest.raises(ConfigError, match="1 to 5"):
            FIVE.groups(level)


def test_every_level_divides_groups_of_the_level_above():
    for level in range(2, 6):
        fine, coarse = FIVE.groups(level), FIVE.groups(level - 1)
        assert all(len(set(coarse[fine == group])) == 1 for group in range(level))


def test_the_probability_of_a_group_is_that_of_its_clusters(randomness):
    probabilities = torch.rand(50, 5, generator=randomness).softmax(dim=1).numpy()
    for level in range(1, 6):
        groups = FIVE.groups(level)
        sums = sum_groups(probabilities, groups)
        np.testing.assert_allclose(sums.sum(axis=1), 1, atol=1e-6)
        assert (sums.max(axis=1) >= probabilities.max(axis=1) - 1e-7).all()
        np.testing.assert_allclose(sums[:, 0], probabilities[:, groups == 0].sum(axis=1), atol=1e-6)


def test_clusters_with_like_features_merge_first(randomness):
    directions = torch.randn(3, 20, generator=randomness).repeat_interleave(2, dim=0)
    directions += 0.3 * torch.randn(6, 20, generator=randomness)
    built = build_hierarchy(*images_of(directions, randomness))
    assert built.groups(3).tolist() == [0, 0, 1, 1, 2, 2]
    assert list(built.distances) == sorted(built.distances)


def test_clusters_that_are_confused_merge_first(randomness):
    features, probabilities = images_of(torch.eye(4, 20), randomness)  # all equally far apart
    torn = probabilities.argmax(dim=1) == 1
    probabilities[torn] = torch.tensor([0.01, 0.55, 0.01, 0.43])
    assert build_hierarchy(features, probabilities).merges[0] == (1, 3)


def test_clusters_without_images_and_equal_features_have_a_place(randomness):
    probabilities = torch.full((30, 4), 0.01)
    probabilities[:, 2] = 0.97
    for features in (torch.randn(30, 6, generator=randomness), torch.ones(30, 6)):
        built = build_hierarchy(features, probabilities)
        assert read_hierarchy(json.loads(json.dumps(built.record())), 4, "here") is not None
    assert build_hierarchy(torch.ones(3, 2), torch.ones(3, 1)).groups(1).tolist() == [0]


@pytest.mark.parametrize(
    "record",
    [
        {"merges": [[0, 1]], "distances": [0.5]},  # one merge too few
        {"merges": [[0, 1], [0, 1]], "distances": [0.1, 0.2]},  # cluster 1 is gone
        {"merges": [[1, 0], [1, 2]], "distances": [0.1, 0.2]},
        {"merges": [[0, 1], [0, 3]], "distances": [0.1, 0.2]},
        {"merges": [[0, 1], [0, 2], [0, 0]], "distances": [0.1, 0.2, 0.3]},
        {"merges": [[0, 1], [0, 2]], "distances": [0.2, 0.1]},
        {"merges": [[0, 1], [0, 2]], "distances": [0.1]},
        {"merges": [[0, 1], [0, 2]], "distances": [0.1, float("nan")]},
        {"merges": [[0, 1], [0, 2]], "distances": [0.1, 10**400]},
        {"merges": [[0, 1], "ab"], "distances": [0.1, 0.2]},
        {"merges": [[0, 1.5], [0, 2]], "distances": [0.1, 0.2]},
        {"merges": [[0, True], [0, 2]], "distances": [0.1, 0.2]},
        {"merges": 3, "distances": []},
        {"distances": [0.1, 0.2]},
        [],
        "x",
    ],
)
def test_a_hierarchy_that_no_run_wrote_is_refused(record):
    with pytest.raises(CheckpointError, match="3 clusters"):
        read_hierarchy(record, 3, "here")


def test_no_hierarchy_is_none_and_a_stored_one_is_read_again():
    assert read_hierarchy(None, 3, "here") is None
    assert read_hierarchy(FIVE.record(), 5, "here") == FIVE
