"""What a number one lower or one higher would change: the pair that merges first, the cluster of two kinds."""

import torch

from cdc_plugin.core.hierarchy import Hierarchy
from cdc_plugin.evaluation.next_changes import find_next_changes


def test_the_first_merge_and_the_cluster_of_two_kinds_are_shown_by_images_of_each_side():
    kind = torch.arange(5).repeat_interleave(60)
    features = 8 * torch.eye(5, 12)[kind] + torch.randn(300, 12, generator=torch.Generator().manual_seed(0))
    assignment = torch.where(kind == 4, 3, kind)  # cluster 3 holds two kinds
    rows = torch.arange(300) * 2  # of a larger set
    found = find_next_changes(features, assignment, rows, Hierarchy(((0, 2), (0, 1), (0, 3)), (0.1, 0.2, 0.3)))
    assert found["merge"]["clusters"] == [0, 2]
    for side, number in zip(found["merge"]["examples"], (0, 2), strict=True):
        assert {int(kind[row // 2]) for row in side} == {number}
    assert found["split"]["clusters"] == [3]
    assert sorted({int(kind[row // 2]) for row in side} for side in found["split"]["examples"]) == [{3}, {4}]


def test_empty_clusters_and_few_images_have_no_change_to_show():
    assignment = torch.tensor([0, 0, 1, 1, 1])
    features = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    found = find_next_changes(features, assignment, torch.arange(5), Hierarchy(((0, 2), (0, 1)), (0.1, 0.2)))
    assert found == {"merge": None, "split": None}
