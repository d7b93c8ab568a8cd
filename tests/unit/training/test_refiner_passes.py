"""Passes through the backbone: saved where they can be, and taken in groups."""

import copy

import pytest
import torch
from torch import Tensor

from cdc_plugin.core.selection.base import Selection, SelectionInput, Selector
from cdc_plugin.models.heads import LayeredHead
from cdc_plugin.training import steps
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.runtime import Runtime
from cdc_plugin.training.steps import Views
from tests.helpers.refiners import CPU, make, same, settings, tensors_of, views, without_batchnorm


def passes_of(refiner: Refiner, given: Views) -> list[tuple[bool, int]]:
    """Every pass through the backbone in a batch: whether it was in training, and of how many images."""
    seen: list[tuple[bool, int]] = []
    refiner.networks.backbone.register_forward_hook(
        lambda module, inputs, output: seen.append((torch.is_grad_enabled(), len(inputs[0])))
    )
    refiner.train_batch(given, torch.Generator())
    return seen


def test_fast_passes_are_one_look_at_the_batch_and_three_of_four_images_but_calibration_sees_all(monkeypatch):
    given = views(count=80)
    fast, full = (make(settings(sub_batch_size=40, passes=passes)) for passes in ("fast", "full"))
    assert passes_of(full, given) == [(False, 80), (False, 80), (True, 40), (True, 40)]
    once = Views(given.weak, given.weak, given.strong, given.rows)
    counts = []
    monkeypatch.setattr(steps, "calibration_loss", lambda logits, *_: counts.append(len(logits)) or logits.sum() * 0)
    assert passes_of(fast, once) == [(False, 80), (True, 30), (True, 30)]
    assert counts == [40, 40]


def test_small_sub_batches_are_trained_whole_by_fast_passes():
    runs = []
    for passes in ("fast", "full"):
        refiner = make(settings(passes=passes, batch_size=62, sub_batch_size=31))
        stats = refiner.train_batch(views(count=62), torch.Generator())
        runs.append((stats, tensors_of(refiner)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])
    assert passes_of(make(settings(passes="fast", sub_batch_size=32)), views(count=64))[2:] == [(True, 24)] * 2


def trusting(mask: Tensor):
    """A selection of these images, all of them in the cluster of their number."""

    class Known(Selector):
        def __call__(self, seen: SelectionInput) -> Selection:
            return Selection(seen.rows % 3, mask.clone(), torch.zeros(3, dtype=torch.long))

    return Known(len(mask), 3, 0.95, 0.9, CPU)


def without_any_batchnorm(passes: str, mask: Tensor) -> Refiner:
    torch.manual_seed(0)
    heads = [LayeredHead([["linear", 5, 3]]) for _ in range(2)]
    config = settings(passes=passes, sub_batch_size=40, schedule="constant")
    refiner = Refiner(without_batchnorm(), *heads, config, Runtime(CPU, config.precision), image_count=80)
    refiner.select = trusting(mask)
    return refiner


def test_images_that_are_not_trusted_are_not_missed_where_nothing_but_the_loss_sees_them():
    mask = torch.ones(80, dtype=torch.bool)
    mask[torch.arange(20) * 4 + torch.arange(20) % 4] = False  # one in every block
    fast, full = (without_any_batchnorm(passes, mask) for passes in ("fast", "full"))
    losses = [refiner.train_batch(views(count=80), torch.Generator()) for refiner in (fast, full)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, tensor in tensors_of(full).items():
        torch.testing.assert_close(tensors_of(fast)[name], tensor, rtol=1e-4, atol=1e-5)
    mask[:] = True  # now trusted images have to wait as well
    other, everyone = (
        without_any_batchnorm(passes, mask).train_batch(views(count=80), torch.Generator())
        for passes in ("fast", "full")
    )
    assert other["clustering_loss"] != pytest.approx(everyone["clustering_loss"], rel=1e-5)
    assert other["selected"] == everyone["selected"] == 1


@pytest.mark.parametrize("passes", ["fast", "full"])
def test_strong_views_that_are_made_when_they_are_needed_train_the_same(passes):
    given, asked = views(count=80), []

    def lazily(own: Tensor) -> Tensor:
        asked.append(own.tolist())
        return given.strong[own]

    eager, lazy = (make(settings(sub_batch_size=40, passes=passes)) for _ in range(2))
    expected = eager.train_batch(given, torch.Generator())
    found = lazy.train_batch(Views(given.plain, given.weak, lazily, given.rows), torch.Generator())
    assert found == expected
    assert same(tensors_of(lazy), tensors_of(eager))
    # Each sub-batch asks for its own, in order, and once.
    assert [len(own) for own in asked] == [30 if passes == "fast" else 40] * 2
    assert all(own == sorted(set(own)) for own in asked)
    assert max(asked[0]) < 40 <= min(asked[1])


def test_strong_views_are_made_in_full_precision_and_not_for_judging():
    given, kinds = views(), set()

    def lazily(own: Tensor) -> Tensor:
        strong = given.strong[own]
        kinds.add((strong @ strong.T).dtype)
        return strong

    refiner, lazy = make(settings(precision="bfloat16")), Views(given.plain, given.weak, lazily, given.rows)
    refiner.compute_targets(lazy, torch.Generator())
    assert kinds == set()
    refiner.train_batch(lazy, torch.Generator())
    assert kinds == {torch.float32}


@pytest.mark.parametrize(
    ("at_once", "groups"), [(240, [24]), (239, [12, 12]), (100, [12, 6, 6]), (60, [6, 6, 6, 6]), (1, [6, 6, 6, 6])]
)
def test_large_batches_are_judged_in_groups_of_whole_sub_batches(monkeypatch, at_once, groups):
    # 24 images of 10 numbers in four sub-batches of 6.
    monkeypatch.setattr(steps, "LARGEST_PASS", at_once)
    refiner, given = make(settings(sub_batch_size=6)), views()
    seen = []
    refiner.networks.backbone.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    twin = copy.deepcopy(refiner.networks.backbone).train()
    features = refiner.compute_targets(given, torch.Generator()).features
    assert seen == 2 * groups  # plain ones, then weak ones
    with torch.no_grad():
        expected = torch.cat([twin(part) for part in given.plain.split(groups)])
    torch.testing.assert_close(features, expected)


def test_groups_make_no_difference_to_a_network_without_batchnorm(monkeypatch):
    refiner = make(settings(sub_batch_size=6), without_batchnorm)
    whole = refiner.compute_targets(views(), torch.Generator())
    monkeypatch.setattr(steps, "LARGEST_PASS", 100)
    grouped = refiner.compute_targets(views(), torch.Generator())
    torch.testing.assert_close(grouped.features, whole.features)
    torch.testing.assert_close(grouped.soft, whole.soft)
    assert torch.equal(grouped.selection.mask, whole.selection.mask)
