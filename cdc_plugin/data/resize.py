"""From images of any size to one square size: how large images are kept, and how they get there."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional as F

Pixels = NDArray[np.uint8]

SMALL_SIDE = 96  # up to here images are kept whole, as CIFAR and STL images are


def storage_size(input_size: int) -> int:
    """Side at which images are kept for a network that takes ``input_size``.

    Above 96 pixels there is a margin of 8/7, so that the plain view is the usual centre crop (256 for 224).
    """
    return input_size if input_size <= SMALL_SIDE else round(input_size * 8 / 7)


def square_from_pil(image: Image.Image, side: int) -> Pixels:
    """Centre square of an RGB image, resized with antialiasing to (side, side, 3)."""
    width, height = image.size
    if width == height == side:
        return np.asarray(image)
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    # Cropping within the resize keeps a 1 x 10,000 strip from becoming a giant on the way.
    box = (left, top, left + short, top + short)
    square = image.resize((side, side), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    return np.asarray(square)


def squares_from_array(images: Pixels, side: int) -> Pixels:
    """Centre squares of (N, H, W, 3) images, resized with antialiasing to (N, side, side, 3)."""
    height, width = images.shape[1:3]
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    cropped = images[:, top : top + short, left : left + short]
    if short == side:
        return cropped
    batch = torch.from_numpy(np.array(cropped)).permute(0, 3, 1, 2)
    resized = F.interpolate(batch, size=(side, side), mode="bilinear", antialias=True, align_corners=False)
    return resized.permute(0, 2, 3, 1).numpy()
