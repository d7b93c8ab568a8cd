"""Make the random views of the pretext task: crop, flip, colour jitter, grayscale, blur, solarisation (appendix)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cdc_plugin.core.random_streams import send
from cdc_plugin.data.views import CropSettings, random_flips
from cdc_plugin.data.views.operations import random_crops, warp
from cdc_plugin.errors import UserError

ASPECT = (3 / 4, 4 / 3)
BLUR_SIGMA = (0.1, 2.0)  # pixels, as in SimCLR and MoCo-v2
SOLARIZED_FROM = 128 / 255  # levels from here on are inverted, as in Pillow


@dataclass(frozen=True)
class PretextSettings(CropSettings):
    """How the views of the pretext task are made."""

    # Largest change of brightness, contrast, saturation and hue; hue in turns of the colour circle.
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    jitter_share: float = 0.8  # of the views that are changed, as the three below
    grayscale: float = 0.2
    blur: float = 0.5
    solarize: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.jitter) != 4 or not all(0 <= value <= 1 for value in self.jitter) or self.jitter[3] > 0.5:
            raise UserError(
                "jitter takes 4 numbers from 0 to 1, for brightness, contrast, saturation and hue (up to 0.5); "
                f"found {list(self.jitter)}"
            )
        for name in ("jitter_share", "grayscale", "blur", "solarize"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is a share of the views, from 0 to 1; found {getattr(self, name)}")


def pretext_view(images: Tensor, settings: PretextSettings, generator: torch.Generator) -> Tensor:
    """Return one random view of uint8 images (B, 3, S, S), normalised, in the channels-last layout."""
    count, device = len(images), images.device
    crops = random_crops(count, settings.crop_scale, ASPECT, generator)
    flips = random_flips(count, settings, generator)
    pixels = warp(images.float(), send(crops, device), send(flips, device), None, settings.input_size)
    pixels = _jitter(pixels.mul_(1 / 255).clamp_(0, 1), settings, generator)
    gray = send(torch.rand(count, generator=generator) < settings.grayscale, device)
    pixels = torch.where(gray.view(-1, 1, 1, 1), _luma(pixels), pixels)
    blurred = (torch.rand(count, generator=generator) < settings.blur).nonzero().flatten()
    low, high = BLUR_SIGMA
    sigma = low + (high - low) * torch.rand(count, generator=generator)
    if len(blurred):
        rows = send(blurred, device)
        pixels[rows] = gaussian_blur(pixels[rows], send(sigma[blurred], device))
    if settings.solarize:
        chosen = send(torch.rand(count, generator=generator) < settings.solarize, device)
        pixels = torch.where(chosen.view(-1, 1, 1, 1) & (pixels >= SOLARIZED_FROM), 1 - pixels, pixels)
    mean, std = send(torch.tensor([settings.mean, settings.std]), device).view(2, 1, 3, 1, 1)
    return pixels.sub_(mean).div_(std).contiguous(memory_format=torch.channels_last)


def change_brightness(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with black: 0 is black, 1 the image; pixels (B, 3, H, W) lie in [0, 1], as in all that follows."""
    return (pixels * factor.view(-1, 1, 1, 1)).clamp_(0, 1)


def change_contrast(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean gray of the image: 0 is flat, 1 the image."""
    return _lerp(_luma(pixels).mean(dim=(2, 3), keepdim=True), pixels, factor)


def change_saturation(pixels: Tensor, factor: Tensor) -> Tensor:
    """Blend with gray: 0 is gray, 1 the image."""
    return _lerp(_luma(pixels), pixels, factor)


def shift_hue(pixels: Tensor, turn: Tensor) -> Tensor:
    """Turn the colours by a share of the colour circle; value and saturation stay as they are."""
    red, green, blue = pixels.unbind(dim=1)
    high, low = pixels.amax(dim=1), pixels.amin(dim=1)
    chroma = high - low
    divisor = torch.where(chroma > 0, chroma, 1.0)
    # Hue in sixths of the circle, from red over green to blue.
    hue = torch.where(high == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    hue = torch.where(high == red, (green - blue) / divisor, hue) + 6 * turn.view(-1, 1, 1)
    channels = []
    for start in (5, 3, 1):  # where red, green and blue begin to be taken away
        place = (start + hue) % 6
        channels.append(high - chroma * torch.minimum(place, 4 - place).clamp_(0, 1))
    return torch.stack(channels, dim=1).clamp_(0, 1)


def gaussian_blur(pixels: Tensor, sigma: Tensor) -> Tensor:
    """Blur every image by its own (B,) standard deviation in pixels.

    Each axis is one matrix product: there is no kernel size to choose, and what a kernel would take from beyond
    the border is left out of its mean.
    """
    side = pixels.shape[3]
    place = torch.arange(side, device=pixels.device, dtype=pixels.dtype)
    distance = (place.view(1, -1) - place.view(-1, 1)).square()
    weights = torch.exp(-distance / (2 * sigma.square().view(-1, 1, 1)))  # (B, side, side)
    weights = (weights / weights.sum(dim=2, keepdim=True)).unsqueeze(1)
    return weights @ pixels @ weights.transpose(2, 3)


def _jitter(pixels: Tensor, settings: PretextSettings, generator: torch.Generator) -> Tensor:
    """Change the colours of a share of the images, in one order for the batch: one per image would take it apart."""
    count = len(pixels)
    chosen = torch.rand(count, generator=generator) < settings.jitter_share
    drawn = 2 * torch.rand(4, count, generator=generator) - 1
    for number in torch.randperm(4, generator=generator).tolist():
        if settings.jitter[number] > 0:
            change, still = _CHANGES[number]
            amount = torch.where(chosen, still + settings.jitter[number] * drawn[number], still)
            pixels = change(pixels, send(amount, pixels.device))
    return pixels


def _luma(pixels: Tensor) -> Tensor:
    """Return the luma (B, 1, H, W), ITU-R 601."""
    weights = send(torch.tensor([0.299, 0.587, 0.114]), pixels.device).view(1, 3, 1, 1)
    return (pixels * weights).sum(dim=1, keepdim=True)


def _lerp(far: Tensor, pixels: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(far.expand_as(pixels), pixels, factor.view(-1, 1, 1, 1)).clamp_(0, 1)


# What jitter changes, and the amount that leaves an image as it is.
_CHANGES: tuple[tuple[Callable[[Tensor, Tensor], Tensor], float], ...] = (
    (change_brightness, 1.0),
    (change_contrast, 1.0),
    (change_saturation, 1.0),
    (shift_hue, 0.0),
)
