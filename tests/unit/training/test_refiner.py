import math

import pytest
import torch
from torch import nn

from cdc_plugin.errors import UserError
from cdc_plugin.training import steps
from cdc_plugin.training.refiner import NotFiniteError, Views
from tests.helpers.refiners import (
    PARTS,
    all_finite,
    fit,
    make,
    same,
    settings,
    tensors_of,
    train_one_batch,
    trust,
    views,
    with_batchnorm,
    with_dropout,
    without_batchnorm,
)


def test_the_pseudo_label_step_leaves_the_calibration_head_untouched_and_no_weight_has_two_optimisers(monkeypatch):
    monkeypatch.setattr(steps, "calibration_loss", lambda logits, *others: (logits * 0).sum())
    refiner = make(settings())
    refiner.select = trust(1)
    assert train_one_batch(refiner)[1] == ["backbone", "clustering_head"]
    networks = refiner.networks
    owned = [
        {id(p) for group in optimizer.param_groups for p in group["params"]}
        for optimizer in (networks.clustering_optimizer, networks.calibration_optimizer)
    ]
    assert not owned[0] & owned[1]
    assert owned[0] | owned[1] == {id(p) for part in PARTS for p in getattr(networks, part).parameters()}


def test_a_batch_in_which_nothing_is_trusted_leaves_every_weight_finite():
    refiner = make(settings())
    refiner.train_batch(views(0), torch.Generator())  # the optimisers have a history
    refiner.select = trust(0)
    stats = refiner.train_batch(views(1), torch.Generator())
    assert stats["clustering_loss"] == stats["selected"] == 0
    assert all_finite(refiner)


def test_training_lowers_the_clustering_loss_and_zero_epochs_change_nothing():
    untrained = make(settings(epochs=0))
    before = tensors_of(untrained)
    assert fit(untrained) == []
    assert same(before, tensors_of(untrained))
    refiner = make(settings(epochs=15, schedule="constant"))
    history = fit(refiner)
    assert history[-1]["clustering_loss"] < history[0]["clustering_loss"]
    assert [line["epoch"] for line in history] == list(range(1, 16))
    keys = {"epoch", "clustering_loss", "calibration_loss", "selected", "confidence", "lr_factor"}
    assert keys <= set(history[0])


@pytest.mark.parametrize("backbone", [with_batchnorm, without_batchnorm])
@pytest.mark.parametrize("changes", [{}, {"mini_clusters": 0}, {"sizes": "estimated"}], ids=str)
def test_a_run_restored_from_a_file_that_is_read_safely_continues_bit_for_bit(tmp_path, backbone, changes):
    changes = {**changes, "schedule": "constant"}
    whole, first = make(settings(**changes), backbone), make(settings(epochs=1, **changes), backbone)
    expected, begun = fit(whole), fit(first)
    second = make(settings(**changes), backbone, seed=99)
    torch.save(first.state(), tmp_path / "state.pt")
    second.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert begun + fit(second) == expected
    assert same(tensors_of(second), tensors_of(whole))
    assert all_finite(whole)


def test_estimated_sizes_follow_the_predictions_and_equal_ones_are_not_estimated():
    refiner = make(settings(sizes="estimated", epochs=1))
    targets = []
    for seed in range(3):
        refiner.train_batch(views(seed), torch.Generator().manual_seed(0))
        targets.append(refiner.shares)
    assert not torch.equal(targets[0], targets[2])
    assert refiner.networks.shares is refiner.shares
    plain = make(settings(sizes="equal", epochs=1))
    fit(plain)
    assert plain.shares is plain.networks.shares is None


def test_a_backbone_with_dropout_is_reproducible_and_leaves_the_global_generator_alone():
    runs = []
    for noise in (1, 2):
        refiner = make(settings(), with_dropout)
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        fit(refiner)
        assert torch.equal(torch.get_rng_state(), state)
        runs.append(tensors_of(refiner))
    assert same(*runs)


def test_views_are_judged_by_the_statistics_of_the_batch():
    first, second = make(settings()), make(settings())
    for layer in second.networks.backbone.modules():
        if isinstance(layer, nn.BatchNorm1d):
            nn.init.constant_(layer.running_mean, 50.0)
            nn.init.constant_(layer.running_var, 0.01)
    assert first.train_batch(views(), torch.Generator()) == second.train_batch(views(), torch.Generator())


def test_dropout_is_off_in_judging_and_on_in_training():
    refiner = make(settings(), with_dropout)
    seen: set[tuple[str, bool, bool]] = set()

    def look(layer: nn.Module, _inputs: object, _output: object) -> None:
        seen.add((type(layer).__name__, torch.is_grad_enabled(), layer.training))

    for layer in refiner.networks.backbone:
        layer.register_forward_hook(look)
    refiner.train_batch(views(), torch.Generator())
    dropout, batchnorm = ({entry[1:] for entry in seen if entry[0] == name} for name in ("Dropout", "BatchNorm1d"))
    assert dropout == {(False, False), (True, True)}
    assert batchnorm == {(False, True), (True, True)}  # it takes the statistics of the batch in both passes


def test_running_statistics_follow_the_data_and_momentum_is_left_as_it_was():
    backbone = nn.Sequential(nn.BatchNorm1d(10, momentum=0.3), nn.Linear(10, 5))
    refiner = make(settings(lr_heads=0.0, lr_backbone=0.0), lambda: backbone)
    given = Views(*(view + 5 for view in (views().plain, views().weak, views().strong)), views().rows)
    for _ in range(30):
        refiner.train_batch(given, torch.Generator())
    expected = torch.stack([given.plain, given.weak, given.strong]).mean(dim=(0, 1))
    torch.testing.assert_close(backbone[0].running_mean, expected, rtol=0.05, atol=0.3)
    assert backbone[0].momentum == 0.3


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"mini_clusters": 500}, 24),
        ({"mini_clusters": 1}, 24),
        ({"mini_clusters": 0}, 24),
        ({"mini_clusters": 0, "clusters": 2}, 4),
        ({"sub_batch_size": 500}, 24),
        ({"sub_batch_size": 2}, 25),
        ({"clusters": 2}, 4),
        ({"clusters": 24}, 24),
        ({"entropy_weight": 0.0}, 24),
        ({"precision": "bfloat16"}, 24),
        ({"selection": "confident-column"}, 24),
    ],
    ids=str,
)
def test_unusual_sizes_and_identical_images_train_without_nan(changes, count):
    one_image = torch.ones(count, 10)
    for given in (views(count=count), Views(one_image, one_image, one_image, torch.arange(count))):
        refiner = make(settings(**changes))
        stats = refiner.train_batch(given, torch.Generator())
        assert all(math.isfinite(value) for value in stats.values())
        assert all_finite(refiner)


def test_more_clusters_than_images_in_a_batch_and_an_unknown_selection_are_refused():
    with pytest.raises(UserError, match="batch_size"):
        make(settings(clusters=10)).train_batch(views(count=6), torch.Generator())
    with pytest.raises(UserError, match="did you mean 'confident'"):
        make(settings(selection="confidnt"))


@pytest.mark.parametrize("mini_clusters", [6, 0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_and_a_backbone_that_has_diverged_are_refused(mini_clusters, value):
    refiner, broken = make(settings(mini_clusters=mini_clusters)), views()
    broken.strong[:] = float("nan")
    refiner.select = trust(1)
    with pytest.raises(NotFiniteError):
        refiner.train_batch(broken, torch.Generator())
    refiner = make(settings(mini_clusters=mini_clusters))
    nn.init.constant_(refiner.networks.backbone[0].weight, value)
    with pytest.raises(NotFiniteError):
        refiner.train_batch(views(), torch.Generator())


@pytest.mark.parametrize("what", ["weight", "running_var"])
def test_an_epoch_whose_last_step_has_ruined_a_weight_or_a_statistic_does_not_count(what):
    refiner = make(settings(epochs=2))
    layer = next(layer for layer in refiner.networks.clustering_head.modules() if isinstance(layer, nn.BatchNorm1d))
    ended = []

    def ruin(stats: dict[str, float]) -> None:
        if refiner.epoch == 1:
            with torch.no_grad():
                getattr(layer, what)[0] = float("inf")

    with pytest.raises(NotFiniteError):
        refiner.fit(lambda epoch, done: [views()][done:], ruin, ended.append)
    assert (refiner.epoch, len(ended)) == (1, 1)
