"""What the training loop is fed with: views of the images, or their cached features where the backbone is frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cdc_plugin.clusterer import view_settings
from cdc_plugin.config import RefineConfig, batch_sizes
from cdc_plugin.data.images import ImageSet
from cdc_plugin.data.views import ViewSettings, make_views
from cdc_plugin.engine import Views
from cdc_plugin.model import Backbone
from cdc_plugin.runtime import generator
from cdc_plugin.tracking import progress

# Purposes of random numbers: generator(seed, PURPOSE, ...) gives each its own stream. Training uses 2.
ORDER, INITIALISATION, VIEWS, AUGMENTATION, FINAL, QUALITY = 1, 3, 4, 5, 6, 7

MakeViews = Callable[[Tensor, torch.Generator], Views]


def batches_of(make: MakeViews, images: int, config: RefineConfig) -> Callable[[int], Iterator[Views]]:
    """The batches of an epoch; order and views depend on (seed, epoch) only, so any epoch can be had again."""
    assert config.batch_size is not None
    sizes = batch_sizes(images, config.batch_size)

    def batches(epoch: int) -> Iterator[Views]:
        order = torch.randperm(images, generator=generator(config.seed, ORDER, epoch))
        for number, chosen in enumerate(order.split(sizes)):
            yield make(chosen, generator(config.seed, VIEWS, epoch, number))

    return batches


def training_views(config: RefineConfig, backbone: Backbone) -> ViewSettings:
    """The augmentation of a run; what is still to be measured has its default."""
    augment = config.augment
    return view_settings(
        backbone,
        flip=True if augment.flip is None else augment.flip,
        crop_scale=augment.crop_scale or 0.2,
        operations=augment.operations,
        cutout=augment.cutout,
        excluded=tuple(augment.exclude),
    )


def fresh_views(config: RefineConfig, backbone: Backbone, images: ImageSet, device: torch.device) -> MakeViews:
    """Three views of the chosen images, made anew every time."""
    settings = training_views(config, backbone)

    def make(chosen: Tensor, randomness: torch.Generator) -> Views:
        pixels = images.batch(chosen)
        if device.type == "cuda":
            pixels = pixels.pin_memory()
        return Views(*make_views(pixels.to(device, non_blocking=True), settings, randomness), chosen)

    return make


@dataclass(frozen=True)
class ViewFeatures:
    """Features of a frozen backbone: plain (N, D), weak and strong (views, N, D)."""

    plain: Tensor
    weak: Tensor
    strong: Tensor


@torch.no_grad()
def view_features(config: RefineConfig, backbone: Backbone, images: ImageSet, device: torch.device) -> ViewFeatures:
    """Features of a fixed number of weak and strong views, computed once by the frozen backbone."""
    count, make = config.frozen_views, fresh_views(config, backbone, images, device)
    backbone.eval()
    plain: list[Tensor] = []
    weak: list[list[Tensor]] = [[] for _ in range(count)]
    strong: list[list[Tensor]] = [[] for _ in range(count)]
    parts = torch.arange(len(images)).split(256)
    for number, part in enumerate(progress(parts, len(parts), "features of views")):
        for view in range(count):
            views = make(part, generator(config.seed, VIEWS, -1 - view, number))
            if view == 0:
                plain.append(backbone(views.plain))
            weak[view].append(backbone(views.weak))
            strong[view].append(backbone(views.strong))
    of_views = [torch.stack([torch.cat(rows) for rows in of_view]) for of_view in (weak, strong)]
    return ViewFeatures(torch.cat(plain), *of_views)


def cached_views(features: ViewFeatures) -> MakeViews:
    """Views that are drawn from cached features."""
    device, count = features.plain.device, len(features.weak)

    def pick(chosen: Tensor, randomness: torch.Generator) -> Views:
        which = torch.randint(count, (2, len(chosen)), generator=randomness).to(device)
        rows = chosen.to(device)
        return Views(features.plain[rows], features.weak[which[0], rows], features.strong[which[1], rows], chosen)

    return pick
