"""Which images of a batch are trained on; with sub-batches and processes, in `test_engine_passes`."""

import torch

from cdc_plugin.training.sub_batches import keep_for_training


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


def test_blocks_of_neighbours_do_not_see_each_other():
    trusted = torch.rand(40, generator=torch.Generator().manual_seed(0)) < 0.7
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    moved = trusted.view(10, 4)[order].flatten()
    assert torch.equal(keep_for_training(moved), keep_for_training(trusted).view(10, 4)[order].flatten())
