"""A batch in sub-batches, and which of its images are trained on."""

import pytest
import torch

from cdc_plugin.training.runtime import plan_shards
from cdc_plugin.training.steps import keep_for_training, split_batch


def test_the_images_that_are_worth_training_by_hand():
    trusted, kept = "1101 1111 0011 1110 01", "1101 1110 0111 1110 11"
    found = keep_for_training(torch.tensor([letter == "1" for letter in trusted.replace(" ", "")]))
    assert found.tolist() == [letter == "1" for letter in kept.replace(" ", "")]


def test_of_four_neighbours_one_is_left_out_and_a_trusted_one_only_where_all_are_trusted():
    for count in range(1, 60):
        trusted = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.7
        before, kept = trusted.clone(), keep_for_training(trusted)
        assert torch.equal(trusted, before)
        assert kept.dtype == torch.bool
        assert int((~kept).sum()) == count // 4
        for first in range(0, count, 4):
            block = trusted[first : first + 4].tolist()
            expected = [True] * len(block)
            if len(block) == 4:
                expected[block.index(False) if False in block else 3] = False
            assert kept[first : first + 4].tolist() == expected


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sub_batches_of_several_processes_are_those_of_one(size, fast):
    trusted = torch.rand(151, generator=torch.Generator().manual_seed(3)) < 0.6
    alone = list(split_batch(trusted, plan_shards(151, 3, 1), 0, fast, torch.device("cpu")))
    plan = plan_shards(151, 3, size)
    assert [len(part.trained) for part in alone] == ([39, 38, 38] if fast else [51, 50, 50])
    for rank in range(size):
        for part, expected in zip(split_batch(trusted, plan, rank, fast, torch.device("cpu")), alone, strict=True):
            assert part.rows == expected.rows
            assert torch.equal(part.trained, expected.trained)
            # The views of this process that are trained on show the images at its places.
            assert torch.equal(plan.owned[rank][part.own], part.trained[part.shards[rank]])
