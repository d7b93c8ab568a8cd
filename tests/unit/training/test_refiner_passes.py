"""Passes through the backbone: saved where they can be, in groups, and shared by several processes."""

import copy

import pytest
import torch
from torch import Tensor, nn

from cdc_plugin.core.selection.base import Selection, SelectionInput, Selector
from cdc_plugin.models.heads import ClusterHead, LayeredHead
from cdc_plugin.training import refiner as engine
from cdc_plugin.training.distributed import Distributed
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.runtime import Runtime
from cdc_plugin.training.steps import Views
from cdc_plugin.training.sub_batches import plan_shards_of
from tests.helpers.in_step import in_step
from tests.helpers.refiners import (
    CPU,
    make,
    same,
    settings,
    tensors_of,
    views,
    without_batchnorm,
)


def passes_of(refiner: Refiner, given: Views) -> list[tuple[bool, int]]:
    """Every pass through the backbone in a batch: whether it was in training, and of how many images."""
    seen: list[tuple[bool, int]] = []
    hook = refiner.networks.backbone.register_forward_hook(
        lambda module, inputs, output: seen.append((torch.is_grad_enabled(), len(inputs[0])))
    )
    refiner.train_batch(given, torch.Generator())
    hook.remove()
    return seen


def test_fast_passes_are_one_look_at_the_batch_and_three_of_four_images():
    given = views(count=80)
    fast, full = (make(settings(sub_batch_size=40, passes=passes)) for passes in ("fast", "full"))
    assert passes_of(full, given) == [(False, 80), (False, 80), (True, 40), (True, 40)]
    once = Views(given.weak, given.weak, given.strong, given.rows)
    assert passes_of(fast, once) == [(False, 80), (True, 30), (True, 30)]


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
    other = without_any_batchnorm("fast", mask).train_batch(views(count=80), torch.Generator())
    everyone = without_any_batchnorm("full", mask).train_batch(views(count=80), torch.Generator())
    assert other["clustering_loss"] != pytest.approx(everyone["clustering_loss"], rel=1e-5)
    assert other["selected"] == everyone["selected"] == 1


def test_the_calibration_head_learns_from_all_images_of_a_fast_pass(monkeypatch):
    counts = []
    monkeypatch.setattr(engine, "calibration_loss", lambda logits, *_: counts.append(len(logits)) or logits.sum() * 0)
    make(settings(sub_batch_size=40, passes="fast")).train_batch(views(count=80), torch.Generator())
    assert counts == [40, 40]


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


def test_judging_asks_for_no_strong_view():
    given = views()
    refuse = Views(given.plain, given.weak, lambda own: pytest.fail("asked for"), given.rows)
    refiner = make(settings())
    judged = refiner.judge(refuse, torch.Generator())
    assert torch.equal(judged.features, refiner.judge(given, torch.Generator()).features)


def test_strong_views_are_made_in_full_precision():
    given, kinds = views(), set()

    def lazily(own: Tensor) -> Tensor:
        strong = given.strong[own]
        kinds.add((strong @ strong.T).dtype)
        return strong

    refiner = make(settings(precision="bfloat16"))
    refiner.train_batch(Views(given.plain, given.weak, lazily, given.rows), torch.Generator())
    assert kinds == {torch.float32}


@pytest.mark.parametrize(
    ("at_once", "groups"), [(240, [24]), (239, [12, 12]), (100, [12, 6, 6]), (60, [6, 6, 6, 6]), (1, [6, 6, 6, 6])]
)
def test_large_batches_are_judged_in_groups_of_whole_sub_batches(monkeypatch, at_once, groups):
    # 24 images of 10 numbers in four sub-batches of 6.
    monkeypatch.setattr(engine, "_JUDGED_AT_ONCE", at_once)
    refiner, given = make(settings(sub_batch_size=6)), views()
    seen = []
    refiner.networks.backbone.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    twin = copy.deepcopy(refiner.networks.backbone).train()
    features = refiner.judge(given, torch.Generator()).features
    assert seen == 2 * groups  # plain ones, then weak ones
    with torch.no_grad():
        expected = torch.cat([twin(part) for part in given.plain.split(groups)])
    torch.testing.assert_close(features, expected)


def test_groups_make_no_difference_to_a_network_without_batchnorm(monkeypatch):
    whole = make(settings(sub_batch_size=6), without_batchnorm).judge(views(), torch.Generator())
    monkeypatch.setattr(engine, "_JUDGED_AT_ONCE", 100)
    grouped = make(settings(sub_batch_size=6), without_batchnorm).judge(views(), torch.Generator())
    torch.testing.assert_close(grouped.features, whole.features)
    torch.testing.assert_close(grouped.targets, whole.targets)
    assert torch.equal(grouped.selection.mask, whole.selection.mask)


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 5), nn.BatchNorm1d(5))


def images_of(count: int) -> Views:
    given = views(count=count, size=49)
    return Views(*(each.view(count, 1, 7, 7) for each in (given.plain, given.weak, given.strong)), given.rows)


Trained = tuple[dict[str, float], Tensor, dict[str, Tensor]]


def trained_by(size: int, count: int, **changes) -> list[Trained]:
    """Three batches in so many processes: the figures, the selection that follows and all weights in each of them."""
    config = settings(lr_backbone=0.05, lr_heads=0.05, sync_batchnorm=True, **changes)

    def work(distributed: Distributed) -> Trained:
        refiner = Refiner(*copy.deepcopy(modules), config, CPU, count, total_steps=20, distributed=distributed)
        given, own = images_of(count), plan_shards_of(count, config, distributed).owned[distributed.rank]
        shared = Views(given.plain[own], given.weak[own], given.strong[own], given.rows)
        randomness = torch.Generator().manual_seed(1)
        for _ in range(3):
            stats = refiner.train_batch(shared, randomness)
        return stats, refiner.judge(shared, randomness).selection.mask, tensors_of(refiner)

    with torch.random.fork_rng():  # which threads, unlike processes, share
        torch.manual_seed(0)
        modules = [convolutional(), *(ClusterHead(5, config.hidden, 3) for _ in range(2))]
        return in_step(size, work, exact=True)


def assert_same_training(found: list[Trained], expected: Trained) -> None:
    for stats, mask, tensors in found:
        assert stats == expected[0]
        assert torch.equal(mask, expected[1])
        assert same(tensors, expected[2])


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (75, {"sub_batch_size": 38}),
        (75, {"sub_batch_size": 38, "passes": "full"}),
        (47, {"sub_batch_size": 12, "heads": "clu+cal"}),
        (47, {"sub_batch_size": 24, "stop_gradient": False}),
    ],
    ids=str,
)
def test_processes_train_what_one_process_trains_bit_for_bit(count, changes):
    (alone,) = trained_by(1, count, **changes)
    for size in (2, 3):
        assert_same_training(trained_by(size, count, **changes), alone)


def test_processes_judge_in_the_same_groups_as_one_process(monkeypatch):
    monkeypatch.setattr(engine, "_JUDGED_AT_ONCE", 40 * 49)
    (alone,) = trained_by(1, 75, sub_batch_size=20)
    for size in (2, 3):
        assert_same_training(trained_by(size, 75, sub_batch_size=20), alone)
    monkeypatch.undo()
    assert not same(trained_by(1, 75, sub_batch_size=20)[0][2], alone[2])  # groups have statistics of their own


def test_eight_processes_leave_out_the_images_that_one_process_leaves_out():
    # 33 images in pieces of two: the last of eight processes has three of them.
    (alone,) = trained_by(1, 33, sub_batch_size=33)
    assert_same_training(trained_by(8, 33, sub_batch_size=33), alone)
