"""What is measured on: a ResNet-18 with random weights, real digits as often as needed, features of known clusters."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cdc_plugin.core.random_streams import generator
from cdc_plugin.data.images import open_images
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone

DIGITS_MEAN, DIGITS_STD = (0.31,) * 3, (0.35,) * 3


def resnet18(width: int = 64) -> Backbone:
    """A ResNet-18 for 32 px with random weights: time does not depend on them."""
    spec = {
        "family": "resnet",
        "block": "basic",
        "depths": [2, 2, 2, 2],
        "widths": [width, 2 * width, 4 * width, 8 * width],
        "stem": {"kernel": 3, "stride": 1, "padding": 1, "pool": True},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network, features = build(spec)
    return Backbone(network, features, DIGITS_MEAN, DIGITS_STD, 32, spec)


def digits_file(folder: Path, images: int) -> Path:
    """An .npy file of so many images at 32 px: the digits that come with the package, again and again."""
    digits = np.ascontiguousarray(open_images("digits", 32, labels=False).images)
    path = folder / f"digits-{images}.npy"
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(images, 32, 32, 3))
    for first in range(0, images, len(digits)):
        rows[first : first + len(digits)] = digits[: images - first]
    rows.flush()
    return path


def blobs(count: int, size: int, clusters: int) -> Tensor:
    """Features (count, size), not negative, around as many centres as there are clusters."""
    centres = torch.randn(clusters, size, generator=generator(1))
    noise = torch.randn(count, size, generator=generator(2))
    return (centres[torch.arange(count) % clusters] + noise).relu()
