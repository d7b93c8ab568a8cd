"""Make the three views of a sample: plain for features and calibration, weak for selection, strong for training.

A batch is handled at once, with parameters of its own for every image. All of them are drawn from one CPU
generator and then moved, so that a seed gives the same views on every device.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cdc_plugin.core.random_streams import send
from cdc_plugin.data.side import Side
from cdc_plugin.data.views.operations import (
    COLOUR_OPERATIONS,
    GEOMETRIC_OPERATIONS,
    identity_maps,
    random_crops,
    resize,
    warp,
)
from cdc_plugin.errors import UserError

OPERATIONS = ("identity", *COLOUR_OPERATIONS, *GEOMETRIC_OPERATIONS)
SMALL_SIDE = 96  # up to here images are kept whole, as CIFAR and STL images are


def storage_size(input_size: int) -> int:
    """Return the side at which images are kept for a network that takes ``input_size``.

    Unless its authors state it, above 96 pixels there is a margin of 8/7, so that the plain view is the usual centre
    crop (256 for 224).

    >>> storage_size(32), storage_size(224)
    (32, 256)
    """
    if isinstance(input_size, Side):
        return input_size.to_store()
    return input_size if input_size <= SMALL_SIDE else round(input_size * 8 / 7)


@dataclass(frozen=True)
class CropSettings:
    """The input of a network, and random crops of it."""

    input_size: int
    mean: tuple[float, float, float]  # as ``std`` a statistic that images in [0, 1] are normalised with
    std: tuple[float, float, float]
    flip: bool = True  # mirror half of the images; off for digits, letters and the like
    crop_scale: float = 0.2  # smallest area of a random crop

    def __post_init__(self) -> None:
        if not 0 < self.crop_scale <= 1:
            raise UserError(f"crop_scale is a share of the area, above 0 and up to 1; found {self.crop_scale}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise UserError(f"mean and std take 3 numbers, std above 0; found {self.mean} and {self.std}")


@dataclass(frozen=True)
class ViewSettings(CropSettings):
    """How views are made."""

    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # range of a crop's width over height
    operations: int = 4  # random ones on every strong view
    cutout: int | None = None  # largest side of the hole in a strong view; None for half of the input, at most 32
    excluded: tuple[str, ...] = ()  # operations that are never drawn

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = set(self.excluded) - set(OPERATIONS)
        if unknown:
            raise UserError(
                f"unknown operations to exclude: {', '.join(sorted(unknown))}; known: {', '.join(OPERATIONS)}"
            )
        if self.operations and not self.allowed:
            raise UserError("every operation is excluded; set the number of operations to 0 instead")
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise UserError(f"aspect goes from a smaller to a larger ratio above 0; found {self.aspect}")
        if self.operations < 0 or self.largest_hole < 0 or self.input_size < 1:
            raise UserError(
                "input_size is at least 1, operations and cutout at least 0; found "
                f"{self.input_size}, {self.operations} and {self.cutout}"
            )

    @property
    def allowed(self) -> list[str]:
        """Return the operations that may be drawn."""
        return [name for name in OPERATIONS if name not in self.excluded]

    @property
    def largest_hole(self) -> int:
        return min(self.input_size // 2, 32) if self.cutout is None else self.cutout


class TakesImages(Protocol):
    """A network that says what images it takes; a `Backbone` is one."""

    input_size: int
    mean: Tensor
    std: Tensor


def view_settings(network: TakesImages, **augmentation: Any) -> ViewSettings:
    """Return the settings of views that suit a network: its input size and statistics, and this augmentation."""
    return ViewSettings(network.input_size, tuple(network.mean.tolist()), tuple(network.std.tolist()), **augmentation)


@dataclass(frozen=True)
class Share:
    """The images of a batch that are at hand; random numbers are drawn for all, so that views do not depend on it."""

    count: int  # images of the whole batch
    rows: Tensor  # (n,) which of them


def channels_last(view: Tensor) -> Tensor:
    """Return a view in the layout in which convolutions take a third less time on CPUs, and which suits GPUs too."""
    return view.contiguous(memory_format=torch.channels_last) if view.ndim == 4 else view


def plain_view(images: Tensor, settings: ViewSettings) -> Tensor:
    """Return the whole image up to 96 pixels, above the centre crop that leaves out the margin; nothing is random."""
    if images.ndim == 2:  # vectors in place of images
        return images
    _check(images)
    size, stored = settings.input_size, images.shape[3]
    side = round(stored * size / storage_size(size))
    start = (stored - side) // 2
    pixels = images[:, :, start : start + side, start : start + side].float()
    return _normalise(resize(pixels, size), settings)


def weak_view(images: Tensor, settings: ViewSettings, generator: torch.Generator, share: Share | None = None) -> Tensor:
    """Return a random resized crop, mirrored half of the time, of uint8 images that are a share of a batch, or all."""
    if images.ndim == 2:
        return images
    _check(images)
    share = share or Share(len(images), torch.arange(len(images)))
    crops = random_crops(share.count, settings.crop_scale, settings.aspect, generator)[share.rows]
    flip = random_flips(share.count, settings, generator)[share.rows]
    crops, flip = _send_columns([crops, flip], images.device)
    return _normalise(warp(images.float(), crops, flip, None, settings.input_size), settings)


def strong_view(
    images: Tensor, settings: ViewSettings, generator: torch.Generator, share: Share | None = None
) -> Tensor:
    """Return a random resized crop, mirrored half of the time, with random operations and a square hole.

    Each slot draws one of the operations and a magnitude for every image. The geometric ones are merged with
    the crop into a single interpolation, the colour ones follow in the order of their slots: one after
    another as in RandAugment would blur the image with every step and cost several times as much.
    """
    if images.ndim == 2:
        return images
    _check(images)
    share = share or Share(len(images), torch.arange(len(images)))
    count, rows, size = share.count, share.rows, settings.input_size
    crops = random_crops(count, settings.crop_scale, settings.aspect, generator)[rows]
    flip = random_flips(count, settings, generator)[rows]
    drawn = torch.randint(max(len(settings.allowed), 1), (settings.operations, count), generator=generator)[:, rows]
    strength = torch.rand(settings.operations, count, generator=generator)[:, rows]
    maps = _merged_maps(settings.allowed, drawn, strength)
    holes = _random_holes(settings, generator, share)
    orders, strength, sizes = _sort_by_operation(drawn, strength, len(settings.allowed))
    columns = [crops, flip, maps[:, :2].flatten(1), holes, strength.T, orders.T]
    crops, flip, maps, holes, strength, orders = _send_columns(columns, images.device)
    # Clamped, since rounding in the interpolation can leave the range by a hair.
    levels = warp(images.float(), crops, flip, maps.view(-1, 2, 3), size).add_(0.5).clamp_(0, 255).to(torch.uint8)
    levels = _recolour(levels, settings.allowed, orders.T.long(), strength.T, sizes)
    return _cut_out(_normalise(levels.float(), settings), holes)


def _send_columns(columns: list[Tensor], device: torch.device) -> list[Tensor]:
    """Send what was drawn for each image, (B,) or (B, n), to a device in one copy; whole numbers up to 2 ** 24 stay."""
    matrices = [column.float() if column.ndim == 2 else column.float().unsqueeze(1) for column in columns]
    sent = send(torch.cat(matrices, dim=1), device).split([matrix.shape[1] for matrix in matrices], dim=1)
    return [part if column.ndim == 2 else part[:, 0] for part, column in zip(sent, columns, strict=True)]


def _merged_maps(allowed: list[str], drawn: Tensor, strength: Tensor) -> Tensor:
    """Merge the geometric operations of all slots into one affine map per image, (B, 3, 3).

    ``drawn`` (slots, B) are indices into ``allowed``, ``strength`` (slots, B) places of magnitudes in their range.
    """
    maps = identity_maps(drawn.shape[1])
    for operations, shares in zip(drawn, strength, strict=True):
        for number, name in enumerate(allowed):
            if name in GEOMETRIC_OPERATIONS:
                chosen = (operations == number).nonzero().flatten()
                operation, low, high = GEOMETRIC_OPERATIONS[name]
                # The latest map acts first on a point of the output.
                maps[chosen] = maps[chosen] @ operation(low + (high - low) * shares[chosen])
    return maps


def _sort_by_operation(drawn: Tensor, strength: Tensor, operations: int) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return for each slot which place the image at each place comes from, its strength, and the sizes of the groups.

    Sorted by their operation, the images of each operation are one slice: picking scattered images out and putting
    them back takes longer than most operations. The last row of places, (slots + 1, B), puts them in order again.
    """
    where = torch.arange(drawn.shape[1])  # the image that lies at each place
    orders, shares = [], []
    for slot, strengths in zip(drawn, strength, strict=True):
        orders.append(slot[where].argsort(stable=True))
        where = where[orders[-1]]
        shares.append(strengths[where])
    sizes = [torch.bincount(slot, minlength=operations).tolist() for slot in drawn]
    return torch.stack([*orders, where.argsort()]), torch.stack(shares) if shares else strength, sizes


def _recolour(levels: Tensor, allowed: list[str], orders: Tensor, strength: Tensor, sizes: list[list[int]]) -> Tensor:
    """Apply the colour operations slot by slot to uint8 (B, 3, H, W), as `_sort_by_operation` says."""
    for order, shares, groups in zip(orders, strength, sizes, strict=False):  # a last order follows the slots
        changed = list(levels.index_select(0, order).split(groups))
        for number, (name, part) in enumerate(zip(allowed, shares.split(groups), strict=True)):
            if name in COLOUR_OPERATIONS and groups[number]:
                operation, low, high = COLOUR_OPERATIONS[name]
                changed[number] = operation(changed[number], low + (high - low) * part)
        levels = torch.cat(changed)
    return levels.index_select(0, orders[-1])


def random_flips(count: int, settings: CropSettings, generator: torch.Generator) -> Tensor:
    """Draw (count,) -1 for mirrored, else 1; drawn even if unused, so that other draws do not depend on it."""
    flips = torch.randint(2, (count,), generator=generator).float() * 2 - 1
    return flips if settings.flip else torch.ones(count)


def _normalise(pixels: Tensor, settings: ViewSettings) -> Tensor:
    """Normalise float pixels from 0 to 255 in place."""
    mean, std = send(torch.tensor([settings.mean, settings.std]), pixels.device).view(2, 1, 3, 1, 1)
    return pixels.mul_(1 / (255 * std)).sub_(mean / std)


def _random_holes(settings: ViewSettings, generator: torch.Generator, share: Share) -> Tensor:
    """Draw one square of random side (1 to the largest) and centre for each image: (n, 3) side, first row, column."""
    if settings.largest_hole == 0:
        return torch.zeros(len(share.rows), 3)
    side = torch.randint(1, settings.largest_hole + 1, (share.count, 1), generator=generator)[share.rows]
    centre = torch.randint(settings.input_size, (2, share.count, 1), generator=generator)[:, share.rows]
    return torch.cat([side, *(centre - side // 2)], dim=1)


def _cut_out(images: Tensor, holes: Tensor) -> Tensor:
    """Set the square of `_random_holes` in every image to 0, in place."""
    pixel = torch.arange(images.shape[3], device=images.device)
    side, first = holes[:, :1], holes[:, 1:].T.unsqueeze(2)
    inside = (pixel >= first) & (pixel < first + side)  # (2, B, size): rows, columns
    return images.masked_fill_((inside[0].unsqueeze(2) & inside[1].unsqueeze(1)).unsqueeze(1), 0)


def _check(images: Tensor) -> None:
    shape = tuple(images.shape)
    if images.dtype != torch.uint8 or len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
        raise UserError(
            f"views are made of square uint8 images (B, 3, S, S); found {images.dtype} {shape}; "
            "open the images with open_images and take batches with ImageSet.batch"
        )
