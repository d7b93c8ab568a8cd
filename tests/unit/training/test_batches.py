"""What the training loop is fed with: every image once an epoch, and the same views whoever makes them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cdc_plugin.config.resolve import ResolvedConfig, batch_sizes
from cdc_plugin.config.schema import AugmentConfig
from cdc_plugin.data.images import ImageSet, open_images
from cdc_plugin.data.views import plain_view, strong_view, weak_view
from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training import batches as module
from cdc_plugin.training.batches import (
    CROP_SCALES,
    cached_views,
    choose_augmentation,
    fresh_views,
    make_batches,
    training_views,
    view_features,
)
from cdc_plugin.training.features import Features
from cdc_plugin.training.runtime import Distributed, Runtime, plan_shards
from cdc_plugin.training.steps import Views
from tests.helpers import seeded
from tests.helpers.in_step import in_step

CPU = torch.device("cpu")
RUNTIME = Runtime(CPU)
OPEN = AugmentConfig(flip=True, crop_scale=0.2)


def settings(**changes: Any) -> ResolvedConfig:
    usual = {"clusters": 3, "batch_size": 30, "sub_batch_size": 10, "hidden": 8, "augment": OPEN}
    return ResolvedConfig(**{**usual, **changes})


@pytest.fixture
def images(digits) -> ImageSet:
    return open_images(digits[0][:40], 32)


def numbers_only(chosen: Tensor, randomness: torch.Generator, pixels: None = None) -> Views:
    """Views that show nothing but which images, and what is drawn for them."""
    return Views(chosen, torch.rand(len(chosen), generator=randomness), chosen, chosen)


@pytest.mark.parametrize(("count", "batch"), [(100, 30), (75, 30), (30, 30), (7, 3), (5, 30)])
def test_every_image_is_in_one_batch_of_an_epoch_and_batches_can_be_had_again(count, batch):
    whole = list(make_batches(numbers_only, count, batch, 0)(4, 0))
    assert [len(views.rows) for views in whole] == batch_sizes(count, batch)
    assert sorted(torch.cat([views.rows for views in whole]).tolist()) == list(range(count))
    for done in range(len(whole) + 1):
        again = list(make_batches(numbers_only, count, batch, 0)(4, done))
        for one, other in zip(again, whole[done:], strict=True):
            assert torch.equal(one.rows, other.rows)
            assert torch.equal(one.weak, other.weak)


def test_the_augmentation_of_a_run_is_that_of_its_settings(tiny_backbone):
    augment = AugmentConfig(flip=False, crop_scale=0.7, operations=2, exclude=["identity"], cutout=5)
    known = training_views(augment, tiny_backbone)
    assert (known.flip, known.crop_scale, known.operations, known.excluded) == (False, 0.7, 2, ("identity",))
    assert (known.largest_hole, known.input_size) == (5, 32)
    assert known.mean == pytest.approx([0.3] * 3)
    with pytest.raises(UserError, match="unknown operations"):
        training_views(AugmentConfig(flip=True, crop_scale=0.2, exclude=["sharpen it"]), tiny_backbone)


def test_fresh_views_are_those_of_the_whole_batch_and_one_is_plain_and_weak_where_passes_are_saved(
    tiny_backbone, images
):
    chosen, own = torch.tensor([3, 1, 39, 7, 20, 21]), torch.arange(6)
    full, fast, frozen = (
        fresh_views(settings(**changes), tiny_backbone, images, RUNTIME)(chosen, seeded(5))
        for changes in ({"passes": "full"}, {"passes": "fast"}, {"passes": "fast", "freeze_backbone": True})
    )
    pixels, known, drawn = images.batch(chosen), training_views(OPEN, tiny_backbone), seeded(5)
    assert torch.equal(full.plain, plain_view(pixels, known))
    assert torch.equal(full.weak, weak_view(pixels, known, drawn))
    assert torch.equal(full.strong_of(own), strong_view(pixels, known, drawn))
    assert torch.equal(full.rows, chosen)
    assert full.plain.is_contiguous(memory_format=torch.channels_last)
    assert fast.plain is fast.weak
    assert torch.equal(fast.weak, full.weak)
    assert torch.equal(fast.strong_of(own), full.strong_of(own))
    for views in (full, frozen):  # those of a frozen backbone cost nothing
        assert not torch.equal(views.plain, views.weak)


def test_strong_views_are_made_of_those_images_only_that_are_asked_for(tiny_backbone, images, monkeypatch):
    made: list[int] = []

    def counting(pixels: Tensor, *arguments: Any) -> Tensor:
        made.append(len(pixels))
        return strong_view(pixels, *arguments)

    monkeypatch.setattr("cdc_plugin.training.batches.strong_view", counting)
    randomness = seeded()
    views = fresh_views(settings(), tiny_backbone, images, RUNTIME)(torch.arange(20), randomness)
    before = randomness.get_state()
    assert made == []
    whole = views.strong_of(torch.arange(20))
    for own in ([0, 1, 2], [19, 4], [7], [], list(range(20))):
        # They do not depend on which others are made, nor on how often.
        assert torch.equal(views.strong_of(torch.tensor(own, dtype=torch.long)), whole[own])
    assert made == [20, 3, 2, 1, 0, 20]
    assert torch.equal(randomness.get_state(), before)  # the random stream of the batch is left alone


@pytest.mark.parametrize("size", [2, 3])
def test_processes_make_the_views_of_their_share_as_one_process_would(tiny_backbone, images, size):
    config, chosen = settings(passes="full"), torch.randperm(40, generator=seeded())[:31]
    alone = fresh_views(config, tiny_backbone, images, RUNTIME)(chosen, seeded(7))

    def work(distributed: Distributed) -> list[Tensor]:
        views = fresh_views(config, tiny_backbone, images, Runtime(CPU, distributed=distributed))(chosen, seeded(7))
        assert torch.equal(views.rows, chosen)
        owned = plan_shards(31, config.sub_batch_size, size).owned
        own = torch.arange(len(owned[distributed.rank]))
        assert len(views.plain) == len(own)
        return [distributed.gather(each, owned) for each in (views.plain, views.weak, views.strong_of(own))]

    expected = [alone.plain, alone.weak, alone.strong_of(torch.arange(31))]
    for found in in_step(size, work):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_features_of_views_are_plain_ones_then_weak_ones_then_strong_ones(tiny_backbone, images):
    config = settings(freeze_backbone=True, frozen_views=2)
    rows = torch.cat(list(view_features(config, tiny_backbone, images, RUNTIME)))
    assert rows.shape == (40, 5, 8)
    with torch.no_grad():
        plain = tiny_backbone(fresh_views(config, tiny_backbone, images, RUNTIME)(torch.arange(40), seeded()).plain)
    torch.testing.assert_close(rows[:, 0], plain)
    # No two views are the same, but all are more like the plain view of their image than like those of others.
    distances = torch.cdist(rows.transpose(0, 1), rows[:, 0].expand(5, -1, -1))
    own = distances.diagonal(dim1=1, dim2=2)
    assert (own[1:] > 0).all()
    assert (own[1:].mean(dim=1) < distances[1:].mean(dim=(1, 2))).all()
    assert torch.equal(rows, torch.cat(list(view_features(config, tiny_backbone, images, RUNTIME))))
    other = torch.cat(list(view_features(replace(config, seed=1), tiny_backbone, images, RUNTIME)))
    assert torch.equal(other[:, 0], rows[:, 0])
    assert not torch.equal(other[:, 1], rows[:, 1])


@pytest.mark.parametrize("size", [2, 3])
def test_features_of_views_are_the_same_in_any_number_of_processes(tiny_backbone, digits, size):
    several = open_images(np.concatenate([digits[0], digits[0]])[:257], 32)  # the last part has a single image
    config = settings(freeze_backbone=True, frozen_views=1)

    def work(distributed: Distributed) -> Tensor:
        return torch.cat(list(view_features(config, tiny_backbone, several, Runtime(CPU, distributed=distributed))))

    expected = work(Distributed())
    for found in in_step(size, work):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_cached_views_by_hand():
    # Two images, whose plain views are 0 and 10; weak ones follow at 1 and 2, strong ones at 3 and 4.
    rows = torch.arange(5.0).view(1, 5, 1) + torch.tensor([0.0, 10.0]).view(2, 1, 1)
    pick, seen = cached_views(rows, 2, CPU), set()
    for seed in range(120):
        views = pick(torch.tensor([1, 0]), seeded(seed))
        assert views.rows.tolist() == [1, 0]
        assert views.plain.tolist() == [[10.0], [0.0]]
        seen |= {(*views.weak.flatten().tolist(), *views.strong_of(torch.arange(2)).flatten().tolist())}
    assert seen == {(a, b, c, d) for a in (11, 12) for b in (1, 2) for c in (13, 14) for d in (3, 4)}


def test_neighbours_are_strong_views_where_there_are_no_others():
    # Two groups of four on two lines: nobody is exchanged for an image of the other group.
    rows = torch.cat(
        [torch.tensor([[1.0, 0.1 * n] for n in range(4)]), torch.tensor([[-0.1 * n, 1.0] for n in range(4)])]
    )
    pick, chosen, seen = cached_views(rows[:, None], 2, CPU), torch.tensor([5, 0, 3]), set()
    for seed in range(40):
        views = pick(chosen, seeded(seed))
        assert torch.equal(views.plain, rows[chosen])
        assert views.weak is views.plain
        strong = views.strong_of(torch.arange(3))
        places = [int((rows == row).all(dim=1).nonzero()) for row in strong]
        assert [place // 4 for place in places] == [1, 0, 0]
        seen |= set(enumerate(places))
    assert seen == {(0, 5), (0, 6), (1, 0), (1, 1), (2, 3), (2, 2)}  # half of a group: itself and the nearest


def test_neighbours_of_very_many_images_are_among_a_sample(monkeypatch):
    monkeypatch.setattr("cdc_plugin.training.features.SAMPLE", 30)
    monkeypatch.setattr("cdc_plugin.training.features.SAMPLE_A_CLUSTER", 1)
    angles = torch.linspace(0, 1.5, 90)
    rows = torch.stack([angles.cos(), angles.sin()], dim=1)
    near = module.find_near(Features(rows, 90), 3, CPU)
    assert near.shape == (90, 5)
    assert len(near.unique()) <= 30
    assert (angles[near.long()] - angles[:, None]).abs().max() < 0.6


def test_features_of_views_are_computed_once_and_again_for_other_settings(tmp_path, monkeypatch, tiny_backbone, images):
    monkeypatch.setenv("CDC_CACHE", str(tmp_path))
    made: list[int] = []

    def counting(config: ResolvedConfig, *arguments: Any) -> Any:
        made.append(config.seed)
        return view_features(config, *arguments)

    monkeypatch.setattr(module, "view_features", counting)
    config = settings(freeze_backbone=True, frozen_views=1)
    for seed in (0, 0, 1, 0):
        module.cached_view_features(replace(config, seed=seed), tiny_backbone, images, RUNTIME)
    assert made == [0, 1]


class Sides(nn.Module):
    """Mean brightness of the left and of the right half."""

    def forward(self, images):
        return torch.stack([half.mean(dim=(1, 2, 3)) for half in images.chunk(2, dim=3)], dim=1)


class Colour(nn.Module):
    def forward(self, images):
        return images.mean(dim=(2, 3))[:, :2]


LIT_ON_ONE_SIDE, RED_OR_GREEN = np.zeros((2, 60, 16, 16, 3), dtype=np.uint8)
for number in (0, 1):
    LIT_ON_ONE_SIDE[number::2, :, 8 * number : 8 * number + 8] = 255
    RED_OR_GREEN[number::2, ..., number] = 200


def choose(asked, module=None, pixels=LIT_ON_ONE_SIDE):
    backbone = Backbone(module or Sides(), 2, [0.5] * 3, [0.5] * 3, 16)
    return choose_augmentation(asked, backbone, nn.Identity(), open_images(pixels, 16), RUNTIME, seeded())


def test_a_backbone_gets_no_flips_if_it_tells_left_from_right_and_the_smallest_crops_if_it_looks_at_colours():
    chosen, measured = choose(AugmentConfig())
    assert (chosen.flip, measured["flip"]) == (False, 0)
    assert choose(AugmentConfig()) == (chosen, measured)
    chosen, measured = choose(AugmentConfig(), Colour(), RED_OR_GREEN)
    assert (chosen.flip, chosen.crop_scale, measured["flip"]) == (True, CROP_SCALES[0], 1)
    assert set(measured) == {"flip", *(f"crop {scale}" for scale in CROP_SCALES)}


def test_what_is_asked_for_is_kept():
    chosen, _ = choose(AugmentConfig(flip=True, operations=2))
    assert (chosen.flip, chosen.operations) == (True, 2)
    assert chosen.crop_scale in CROP_SCALES
    chosen, _ = choose(AugmentConfig(crop_scale=0.33))
    assert (chosen.flip, chosen.crop_scale) == (False, 0.33)
    nothing_open = AugmentConfig(flip=False, crop_scale=0.5)
    assert choose(nothing_open) == (nothing_open, {})


@pytest.mark.parametrize("count", [1, 5])
def test_few_or_constant_images_are_enough(count):
    chosen, _ = choose(AugmentConfig(), Colour(), np.full((count, 16, 16, 3), 7, dtype=np.uint8))
    assert chosen.flip is not None
    assert chosen.crop_scale in CROP_SCALES
