"""Sub-batches, and how heads, gradients, selections and calibrations are exchanged by the config alone."""

import copy

import pytest
import torch
from torch import Tensor

from cdc_plugin.core.losses import calibrations
from cdc_plugin.models.heads import ClusterHead, CosineHead
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.runtime import plan_shards
from cdc_plugin.training.steps import keep_for_training, split_batch
from tests.helpers.refiners import CPU, fit, make, same, settings, tensors_of, train_one_batch, trust, weights


def refiner(**changes) -> Refiner:
    return make(settings(**{"threshold": 0.4, **changes}))


@pytest.mark.parametrize("heads", ["clu", "clu+cal"])
def test_a_single_head_ends_as_both_heads(heads):
    made = refiner(heads=heads)
    assert made.networks.target_head is made.networks.clustering_head
    fit(made)
    assert same(made.networks.clustering_head.state_dict(), made.networks.calibration_head.state_dict())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"heads": "clu"}, []),
        ({"heads": "clu+cal"}, ["clustering_head"]),
        ({"stop_gradient": True}, ["calibration_head"]),
        ({"stop_gradient": False}, ["backbone", "calibration_head"]),
        *(({"calibration": name}, ["calibration_head"]) for name in calibrations.names()),
    ],
    ids=str,
)
def test_where_nothing_is_trusted_the_calibration_loss_alone_moves_what_it_may(changes, expected):
    made = refiner(**changes)
    made.select = trust(0)
    stats, moved = train_one_batch(made)
    assert stats["selected"] == 0
    assert moved == expected
    assert (stats["calibration_loss"] != 0) is (changes != {"heads": "clu"})
    if "calibration" in changes:
        assert (stats["mini_clusters"] > 0) is (changes["calibration"] == "mini-clusters")


@pytest.mark.parametrize("selection", ["flexmatch", "freematch", "freematch+ppf", "confident+gsf"])
def test_a_resumed_run_remembers_what_its_selection_had_learnt(selection):
    whole, first, second = (refiner(selection=selection, epochs=4, schedule="constant") for _ in range(3))
    fit(whole)
    first.settings.epochs = 2
    fit(first)
    second.restore(copy.deepcopy(first.state()))
    fit(second)
    assert same(tensors_of(whole), tensors_of(second))
    assert same(whole.select.state, second.select.state)


def test_strength_entropy_and_selection_are_what_the_config_says():
    def calibrated(**changes: object) -> dict[str, Tensor]:
        made = refiner(**changes)
        fit(made)
        return weights(made.networks.calibration_head)

    smoothed = {"calibration": "label-smoothing", "calibration_strength": 0.1}
    assert same(calibrated(**smoothed), calibrated(**smoothed))
    assert not same(calibrated(**smoothed), calibrated(**{**smoothed, "calibration_strength": 0.5}))
    for change in ({"entropy_weight": 0.0}, {"selection": "fixed"}):
        assert not same(calibrated(), calibrated(**change))


@pytest.mark.parametrize(
    "head", [ClusterHead(5, 8, 3), CosineHead([["linear", 5, 4]], 4, 3, 0.1)], ids=["mlp", "cosine"]
)
def test_a_head_is_its_last_layer_after_the_others(head):
    features = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    head.eval()
    assert torch.equal(head(features), head.logits(head.hidden(features)))


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
    alone = list(split_batch(trusted, plan_shards(151, 50, 1), 0, fast, CPU))
    plan = plan_shards(151, 50, size)
    assert [len(part.trained) for part in alone] == ([39, 38, 38] if fast else [51, 50, 50])
    for rank in range(size):
        for part, expected in zip(split_batch(trusted, plan, rank, fast, CPU), alone, strict=True):
            assert part.rows == expected.rows
            assert torch.equal(part.trained, expected.trained)
            # The views of this process that are trained on show the images at its places.
            assert torch.equal(plan.owned[rank][part.own], part.trained[part.shards[rank]])
