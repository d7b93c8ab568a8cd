"""Colour operations of RandAugment on batches of uint8 images (n, 3, H, W), one magnitude an image.

Each equals Pillow's operation of the same name up to one level of rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def autocontrast(images: Tensor, magnitude: Tensor) -> Tensor:
    """Stretch every channel so that its darkest pixel becomes 0 and its brightest 255."""
    pixels = images.float()
    low, high = pixels.flatten(2).aminmax(dim=2)  # (n, 3)
    constant = high <= low  # nothing to stretch
    scale = torch.where(constant, 1.0, 255 / (high - low).clamp(min=1))
    # The small addend keeps products that should be whole from being cut to the level below.
    offset = torch.where(constant, 0.0, -low * scale) + 1e-3
    return pixels.mul_(scale[:, :, None, None]).add_(offset[:, :, None, None]).to(torch.uint8)


def equalize(images: Tensor, magnitude: Tensor) -> Tensor:
    """Map every channel so that its histogram becomes as flat as it can be.

    A channel is left as it is if one level fills it or if it has fewer than 255 pixels beside the brightest
    level, as in Pillow.
    """
    count, channels, height, width = images.shape
    rows, pixels = count * channels, height * width
    levels = images.reshape(rows, pixels)
    places = levels.int() + torch.arange(0, rows * 256, 256, dtype=torch.int32, device=images.device).unsqueeze(1)
    histogram = torch.bincount(places.flatten(), minlength=rows * 256).view(rows, 256)
    brightest = histogram.gather(1, levels.amax(dim=1, keepdim=True).long())  # (rows, 1) pixels of the last level
    step = (pixels - brightest) // 255
    below = histogram.cumsum(dim=1) - histogram
    # Whole numbers below 2 ** 24 are divided exactly enough in float32, and much faster.
    table = torch.div((below + step // 2).float(), step.clamp(min=1).float(), rounding_mode="floor").clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256.0, device=images.device))
    return table.to(torch.uint8).gather(1, levels.long()).view_as(images)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the pixels from the threshold (0 to 256) up."""
    # Whole levels compare alike with the threshold rounded up, and integers are compared faster.
    bright = images.to(torch.int16) >= _per_image(threshold.ceil().to(torch.int16))
    return images ^ (bright.to(torch.uint8) * 255)  # level ^ 255 = 255 - level


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest ``bits`` bits of every pixel."""
    kept = 256 - 2 ** (8 - bits.long())
    return images & _per_image(kept.to(torch.uint8))


def color(images: Tensor, factor: Tensor) -> Tensor:
    """Towards gray: 0 is gray, 1 the image."""
    return _blend(_gray(images), images.float(), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Towards the mean gray of the image: 0 is flat, 1 the image."""
    mean = (_gray(images).mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean, images.float(), factor)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Towards black: 0 is black, 1 the image."""
    return (images * _per_image(factor)).to(torch.uint8)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Towards a smoothed image: 0 is smooth, 1 the image. The outermost pixels are left as they are."""
    pixels = images.float()
    smooth = pixels.clone()
    inner = pixels[:, :, 1:-1, 1:-1]
    # The kernel is 1 all around and 5 in the middle, over 13.
    three = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    nine = three[..., :-2] + three[..., 1:-1] + three[..., 2:]
    smooth[:, :, 1:-1, 1:-1] = nine.add_(inner, alpha=4).mul_(1 / 13).add_(0.5 + 1e-3).floor_()
    return _blend(smooth, pixels, factor)


def _per_image(magnitude: Tensor) -> Tensor:
    return magnitude.view(-1, 1, 1, 1)


def _gray(images: Tensor) -> Tensor:
    """Luma (n, 1, H, W) in whole levels, ITU-R 601."""
    red, green, blue = images.float().split(1, dim=1)
    return (red * 0.299 + green * 0.587 + blue * 0.114 + 0.5).floor()


def _blend(far: Tensor, pixels: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(far.expand_as(pixels), pixels, _per_image(factor)).to(torch.uint8)


ColourOperation = Callable[[Tensor, Tensor], Tensor]

# Name -> (operation, smallest magnitude, largest magnitude), the ranges of SCAN's strong augmentation.
COLOUR_OPERATIONS: dict[str, tuple[ColourOperation, float, float]] = {
    "autocontrast": (autocontrast, 0, 1),
    "equalize": (equalize, 0, 1),
    "solarize": (solarize, 0, 256),
    "posterize": (posterize, 4, 8),
    "color": (color, 0.05, 0.95),
    "contrast": (contrast, 0.05, 0.95),
    "brightness": (brightness, 0.05, 0.95),
    "sharpness": (sharpness, 0.05, 0.95),
}
