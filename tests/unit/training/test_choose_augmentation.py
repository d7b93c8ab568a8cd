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


LIT_ON_ONE_SIDE, RED_OR_GREEN = np.zeros((2, 60, 16, 16, 3), dtype=np.uint8)
for number in (0, 1):
    LIT_ON_ONE_SIDE[number::2, :, 8 * number : 8 * number + 8] = 255
    RED_OR_GREEN[number::2, ..., number] = 200


def choose(asked, module=None, pixels=LIT_ON_ONE_SIDE):
    backbone = Backbone(module or Sides(), 2, [0.5] * 3, [0.5] * 3, 16)
    images, randomness = open_images(pixels, 16), torch.Generator().manual_seed(0)
    return choose_augmentation(asked, backbone, nn.Identity(), images, CPU, randomness)


def test_a_backbone_that_tells_left_from_right_gets_no_flips_every_time():
    chosen, measured = choose(AugmentConfig())
    assert chosen.flip is False
    assert measured["flip"] == 0
    assert choose(AugmentConfig()) == (chosen, measured)


def test_a_backbone_that_looks_at_colours_gets_flips_and_the_smallest_crops():
    chosen, measured = choose(AugmentConfig(), Colour(), RED_OR_GREEN)
    assert chosen.flip is True
    assert chosen.crop_scale == CROP_SCALES[0]
    assert measured["flip"] == 1
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
