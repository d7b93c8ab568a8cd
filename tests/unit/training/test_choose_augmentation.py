import numpy as np
import pytest
import torch
from torch import nn

from cdc_plugin.config.schema import AugmentConfig
from cdc_plugin.data.images import open_images
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training.batches import CROP_SCALES, choose_augmentation
from cdc_plugin.training.runtime import Runtime

CPU = Runtime(torch.device("cpu"))


class Sides(nn.Module):
    """Mean brightness of the left and of the right half."""

    def forward(self, images):
        return torch.stack([half.mean(dim=(1, 2, 3)) for half in images.chunk(2, dim=3)], dim=1)


class Colour(nn.Module):
    def forward(self, images):
        return images.mean(dim=(2, 3))[:, :2]


def wrap(module: nn.Module) -> Backbone:
    return Backbone(module, 2, [0.5] * 3, [0.5] * 3, 16)


def lit_on_one_side() -> np.ndarray:
    pixels = np.zeros((60, 16, 16, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        image[:, : 8 * (index % 2 + 1)][:, -8:] = 255
    return pixels


def red_or_green() -> np.ndarray:
    pixels = np.zeros((60, 16, 16, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        image[..., index % 2] = 200
    return pixels


def choose(asked, module, pixels, seed=0):
    images = open_images(pixels, 16)
    return choose_augmentation(asked, wrap(module), nn.Identity(), images, CPU, torch.Generator().manual_seed(seed))


def test_a_backbone_that_tells_left_from_right_gets_no_flips():
    chosen, measured = choose(AugmentConfig(), Sides(), lit_on_one_side())
    assert chosen.flip is False
    assert measured["flip"] == 0


def test_a_backbone_that_looks_at_colours_gets_flips_and_the_smallest_crops():
    chosen, measured = choose(AugmentConfig(), Colour(), red_or_green())
    assert chosen.flip is True
    assert chosen.crop_scale == CROP_SCALES[0]
    assert measured["flip"] == 1
    assert set(measured) == {"flip", *(f"crop {scale}" for scale in CROP_SCALES)}


def test_what_is_asked_for_is_kept():
    chosen, _ = choose(AugmentConfig(flip=True, operations=2), Sides(), lit_on_one_side())
    assert chosen.flip is True
    assert chosen.operations == 2
    assert chosen.crop_scale in CROP_SCALES
    chosen, _ = choose(AugmentConfig(crop_scale=0.33), Sides(), lit_on_one_side())
    assert chosen.crop_scale == 0.33
    assert chosen.flip is False


def test_nothing_is_measured_when_nothing_is_open():
    asked = AugmentConfig(flip=False, crop_scale=0.5)
    assert choose(asked, Sides(), lit_on_one_side()) == (asked, {})


def test_the_choice_repeats_for_the_same_generator():
    first = choose(AugmentConfig(), Sides(), lit_on_one_side(), seed=3)
    assert choose(AugmentConfig(), Sides(), lit_on_one_side(), seed=3) == first


@pytest.mark.parametrize("count", [1, 5])
def test_few_or_constant_images_are_enough(count):
    chosen, _ = choose(AugmentConfig(), Colour(), np.full((count, 16, 16, 3), 7, dtype=np.uint8))
    assert chosen.flip is not None
    assert chosen.crop_scale in CROP_SCALES
