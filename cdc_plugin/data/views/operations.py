"""Crops, flips and the operations of RandAugment on batches, with a magnitude of its own for every image.

Geometric operations are affine maps, so that one interpolation does for all of them. Coordinates run from -1 to 1 over
the image, x to the right and y down; a map takes a point of the output to the point of the input that is shown there.
Colour operations take and return uint8 images (n, 3, H, W) and equal Pillow's operations of the same name up to one
level of rounding.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

CROP_ATTEMPTS = 10


def random_crops(count: int, smallest_area: float, aspect: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Draw boxes as torchvision's RandomResizedCrop does: (count, 4) half width, half height, centre x, centre y.

    Area is uniform from ``smallest_area`` to 1, the aspect ratio log-uniform. A box that does not fit is
    drawn again up to ten times, then the whole image is taken. Positions are not rounded to pixels.
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


def warp(images: Tensor, crops: Tensor, flip: Tensor, maps: Tensor | None, size: int) -> Tensor:
    """Crop, flip and map float images (B, 3, S, S) to (B, 3, size, size) in one bilinear interpolation.

    Args:
        crops: (B, 4) of ``random_crops``, on the device of the images like all that is drawn.
        flip: (B,) 1 or -1.
        maps: (B, 2 or 3, 3) affine maps that follow the crop, or None. What they bring in from beyond the cropped
            image is black, as if the crop had been an image of its own.
    """
    centres = (torch.arange(size, dtype=torch.float32, device=images.device) * 2 + 1) / size - 1
    if maps is None:
        x = centres * (crops[:, 0] * flip)[:, None] + crops[:, 2, None]
        y = centres * crops[:, 1, None] + crops[:, 3, None]
        grid = torch.stack([x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], dim=3)
        return _sample(images, grid)
    columns, rows = centres.view(1, 1, size), centres.view(1, size, 1)
    entries = maps[:, :2].unsqueeze(3).unsqueeze(4)  # (B, 2, 3, 1, 1)
    place = entries[:, :, 0] * columns + (entries[:, :, 1] * rows + entries[:, :, 2])  # (B, 2, size, size)
    inside = (place.abs().amax(dim=1, keepdim=True) <= 1).float()
    half = torch.stack([crops[:, 0] * flip, crops[:, 1]], dim=1).view(-1, 2, 1, 1)
    grid = torch.addcmul(crops[:, 2:].unsqueeze(2).unsqueeze(3), place, half).permute(0, 2, 3, 1)
    return _sample(images, grid).mul_(inside)


def _sample(images: Tensor, grid: Tensor) -> Tensor:
    """Interpolate where the grid (B, H, W, 2) says, beyond the image its outermost pixels: zeros would darken crops."""
    if images.device.type != "mps":
        return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    # Torch before 2.13 has no border on MPS: the same points, moved to the centre of the outermost pixel.
    edge = 1 - 1 / images.shape[3]
    return F.grid_sample(images, grid.clamp(-edge, edge), mode="bilinear", padding_mode="zeros", align_corners=False)


def resize(images: Tensor, size: int) -> Tensor:
    """Return float images (B, 3, S, S) of another size, interpolated with antialiasing."""
    if images.shape[3] == size:
        return images
    # Torch before 2.7 has no antialiasing on MPS.
    pixels = images.cpu() if images.device.type == "mps" else images
    return F.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True).to(images.device)


def rotate(degrees: Tensor) -> Tensor:
    """Turn counter-clockwise about the centre."""
    angle = torch.deg2rad(degrees)
    maps = identity_maps(len(degrees))
    maps[:, 0, 0] = maps[:, 1, 1] = angle.cos()
    maps[:, 0, 1], maps[:, 1, 0] = -angle.sin(), angle.sin()
    return maps


def shear(slope: Tensor, axis: int) -> Tensor:
    """Shift every row (axis 0) or column (axis 1) in proportion to its distance from the top or the left."""
    maps = identity_maps(len(slope))
    maps[:, axis, 1 - axis] = maps[:, axis, 2] = slope
    return maps


def translate(fraction: Tensor, axis: int) -> Tensor:
    """Shift to the left (axis 0) or up (axis 1) by a fraction of the side."""
    maps = identity_maps(len(fraction))
    maps[:, axis, 2] = 2 * fraction
    return maps


def identity_maps(count: int) -> Tensor:
    """Return affine maps (count, 3, 3) that leave images as they are."""
    return torch.eye(3).repeat(count, 1, 1)


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
    levels = images.reshape(rows, pixels).long()
    one = torch.ones((), dtype=torch.int, device=images.device)  # torch on MPS adds no wider integers
    histogram = torch.zeros(rows, 256, dtype=torch.int, device=images.device)
    histogram.scatter_add_(1, levels, one.expand_as(levels))
    brightest = histogram.gather(1, levels.amax(dim=1, keepdim=True))  # (rows, 1) pixels of the last level
    step = (pixels - brightest) // 255
    below = histogram.cumsum(dim=1) - histogram
    # Whole numbers below 2 ** 24 are divided exactly enough in float32, and much faster.
    table = torch.div((below + step // 2).float(), step.clamp(min=1).float(), rounding_mode="floor").clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256.0, device=images.device))
    return table.to(torch.uint8).gather(1, levels).view_as(images)


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
    """Blend with gray: 0 is gray, 1 the image."""
    return _blend(_gray(images), images.float(), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean gray of the image: 0 is flat, 1 the image."""
    mean = (_gray(images).mean(dim=(1, 2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean, images.float(), factor)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black: 0 is black, 1 the image."""
    return (images * _per_image(factor)).to(torch.uint8)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed image: 0 is smooth, 1 the image. The outermost pixels are left as they are."""
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
    """Return the luma (n, 1, H, W) in whole levels, ITU-R 601."""
    red, green, blue = images.float().split(1, dim=1)
    return (red * 0.299 + green * 0.587 + blue * 0.114 + 0.5).floor()


def _blend(far: Tensor, pixels: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(far.expand_as(pixels), pixels, _per_image(factor)).to(torch.uint8)


# Name -> (operation, smallest magnitude, largest magnitude), the ranges of SCAN's strong augmentation.
GEOMETRIC_OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "rotate": (rotate, -30, 30),
    "shear_x": (partial(shear, axis=0), -0.1, 0.1),
    "shear_y": (partial(shear, axis=1), -0.1, 0.1),
    "translate_x": (partial(translate, axis=0), -0.1, 0.1),
    "translate_y": (partial(translate, axis=1), -0.1, 0.1),
}
COLOUR_OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, float]] = {
    "autocontrast": (autocontrast, 0, 1),
    "equalize": (equalize, 0, 1),
    "solarize": (solarize, 0, 256),
    "posterize": (posterize, 4, 8),
    "color": (color, 0.05, 0.95),
    "contrast": (contrast, 0.05, 0.95),
    "brightness": (brightness, 0.05, 0.95),
    "sharpness": (sharpness, 0.05, 0.95),
}
