"""Crops, flips and the geometric operations of RandAugment as affine maps, and one interpolation for all.

Coordinates run from -1 to 1 over the image, x to the right and y down; a map takes a point of the output to
the point of the input that is shown there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

CROP_ATTEMPTS = 10


def random_crops(count: int, smallest_area: float, aspect: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Boxes of random area and aspect ratio, drawn as torchvision's RandomResizedCrop draws them.

    Area is uniform from ``smallest_area`` to 1, the aspect ratio log-uniform. A box that does not fit is
    drawn again up to ten times, then the whole image is taken. Positions are not rounded to pixels.

    Returns:
        (count, 4): half width, half height, centre x, centre y.
    """
    draws = torch.rand(CROP_ATTEMPTS, 2, count, generator=generator)
    area = smallest_area + (1 - smallest_area) * draws[:, 0]
    ratio = torch.exp(math.log(aspect[0]) + (math.log(aspect[1]) - math.log(aspect[0])) * draws[:, 1])
    width, height = (area * ratio).sqrt(), (area / ratio).sqrt()  # (attempts, count)
    fits = (width <= 1) & (height <= 1)
    first = fits.float().argmax(dim=0, keepdim=True)
    found = fits.any(dim=0)
    half_width = torch.where(found, width.gather(0, first)[0], 1.0)
    half_height = torch.where(found, height.gather(0, first)[0], 1.0)
    place = 2 * torch.rand(2, count, generator=generator) - 1
    return torch.stack([half_width, half_height, place[0] * (1 - half_width), place[1] * (1 - half_height)], dim=1)


def rotate(degrees: Tensor) -> Tensor:
    """Turn counter-clockwise about the centre."""
    angle = torch.deg2rad(degrees)
    maps = _identity(len(degrees))
    maps[:, 0, 0] = maps[:, 1, 1] = angle.cos()
    maps[:, 0, 1], maps[:, 1, 0] = -angle.sin(), angle.sin()
    return maps


def shear_x(slope: Tensor) -> Tensor:
    """Shift every row in proportion to its distance from the top."""
    maps = _identity(len(slope))
    maps[:, 0, 1] = maps[:, 0, 2] = slope
    return maps


def shear_y(slope: Tensor) -> Tensor:
    """Shift every column in proportion to its distance from the left."""
    maps = _identity(len(slope))
    maps[:, 1, 0] = maps[:, 1, 2] = slope
    return maps


def translate_x(fraction: Tensor) -> Tensor:
    """Shift to the left by a fraction of the width."""
    maps = _identity(len(fraction))
    maps[:, 0, 2] = 2 * fraction
    return maps


def translate_y(fraction: Tensor) -> Tensor:
    """Shift up by a fraction of the height."""
    maps = _identity(len(fraction))
    maps[:, 1, 2] = 2 * fraction
    return maps


def warp(images: Tensor, crops: Tensor, flip: Tensor, maps: Tensor | None, size: int) -> Tensor:
    """Crop, flip and map a batch in one bilinear interpolation.

    Args:
        images: float (B, 3, S, S).
        crops: (B, 4) of ``random_crops``, on the CPU like all that is drawn.
        flip: (B,) 1 or -1.
        maps: (B, 3, 3) affine maps that follow the crop, or None. What they bring in from beyond the cropped
            image is black, as if the crop had been an image of its own.
        size: side of the output.

    Returns:
        float (B, 3, size, size).
    """
    centres = (torch.arange(size, dtype=torch.float32) * 2 + 1) / size - 1
    device = images.device
    if maps is None:
        x = (centres * (crops[:, 0] * flip)[:, None] + crops[:, 2, None]).to(device)
        y = (centres * crops[:, 1, None] + crops[:, 3, None]).to(device)
        grid = torch.stack([x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], dim=3)
        return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    centres, maps = centres.to(device), maps.to(device)
    columns, rows = centres.view(1, 1, size), centres.view(1, size, 1)
    entries = maps[:, :2].unsqueeze(3).unsqueeze(4)  # (B, 2, 3, 1, 1)
    place = entries[:, :, 0] * columns + (entries[:, :, 1] * rows + entries[:, :, 2])  # (B, 2, size, size)
    inside = (place.abs().amax(dim=1, keepdim=True) <= 1).float()
    half = torch.stack([crops[:, 0] * flip, crops[:, 1]], dim=1).to(device).view(-1, 2, 1, 1)
    grid = torch.addcmul(crops[:, 2:].to(device).view(-1, 2, 1, 1), place, half).permute(0, 2, 3, 1)
    # Border, not zeros: zeros would darken the outermost pixels of a crop that touches the edge.
    sampled = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return sampled.mul_(inside)


def _identity(count: int) -> Tensor:
    return torch.eye(3).repeat(count, 1, 1)


# Name -> (map, smallest magnitude, largest magnitude), the ranges of SCAN's strong augmentation.
GEOMETRIC_OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "rotate": (rotate, -30, 30),
    "shear_x": (shear_x, -0.1, 0.1),
    "shear_y": (shear_y, -0.1, 0.1),
    "translate_x": (translate_x, -0.1, 0.1),
    "translate_y": (translate_y, -0.1, 0.1),
}
