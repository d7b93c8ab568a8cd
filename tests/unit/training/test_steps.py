"""Heads, gradients, selections and calibrations of a run are exchanged by its config alone."""

import copy

import pytest
import torch
from torch import Tensor

from cdc_plugin.core.losses import calibrations
from cdc_plugin.models.heads import ClusterHead, CosineHead
from cdc_plugin.training.refiner import Refiner
from tests.helpers.refiners import fit, make, same, settings, tensors_of, train_one_batch, trust, weights


def refiner(**changes) -> Refiner:
    return make(settings(**{"threshold": 0.4, **changes}))


def trusting_nothing(**changes) -> Refiner:
    made = refiner(**changes)
    made.select = trust(0)
    return made


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
    stats, moved = train_one_batch(trusting_nothing(**changes))
    assert stats["selected"] == 0
    assert moved == expected
    assert (stats["calibration_loss"] != 0) is (changes != {"heads": "clu"})
    if "calibration" in changes:
        assert (stats["mini_clusters"] > 0) is (changes["calibration"] == "mini-clusters")


@pytest.mark.parametrize("selection", ["flexmatch", "freematch", "freematch+ppf", "confident+gsf"])
def test_a_resumed_run_remembers_what_its_selection_had_learnt(selection):
    whole, first, second = (refiner(selection=selection, epochs=4) for _ in range(3))
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
