"""What the training loop is fed with: views of the images, or their cached features where the backbone is frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cdc_plugin.config.schema import RefineConfig, batch_sizes
from cdc_plugin.core.random_streams import ORDER, VIEWS, generator
from cdc_plugin.data.images import ImageSet
from cdc_plugin.data.row_file import RowFile
from cdc_plugin.data.views import Share, ViewSettings, channels_last, plain_view, strong_view, view_settings, weak_view
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training.distributed import SINGLE, Distributed
from cdc_plugin.training.progress import progress
from cdc_plugin.training.refiner import Views
from cdc_plugin.training.sub_batches import plan_shards_of
from cdc_plugin.training.sync_batchnorm import synchronised

MakeViews = Callable[[Tensor, torch.Generator], Views]


def batches_of(make: MakeViews, images: int, config: RefineConfig) -> Callable[[int, int], Iterator[Views]]:
    """The batches of an epoch but the first ones; order and views depend on (seed, epoch, number) only, so that any
    batch can be had again.
    """
    assert config.batch_size is not None
    sizes = batch_sizes(images, config.batch_size)

    def batches(epoch: int, done: int) -> Iterator[Views]:
        order = torch.randperm(images, generator=generator(config.seed, ORDER, epoch))
        for number, chosen in enumerate(order.split(sizes)):
            if number >= done:
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


def fresh_views(
    config: RefineConfig, backbone: Backbone, images: ImageSet, device: torch.device, distributed: Distributed = SINGLE
) -> MakeViews:
    """Three views of this process's share of the chosen images, made anew every time.

    Where passes are to be saved, the weak views are the plain ones as well; those of a frozen backbone cost nothing.
    """
    settings = training_views(config, backbone)
    fast = config.passes == "fast" and not config.freeze_backbone

    def make(chosen: Tensor, randomness: torch.Generator) -> Views:
        share = Share(len(chosen), plan_shards_of(len(chosen), config, distributed).owned[distributed.rank])
        pixels = images.batch(chosen[share.rows])
        if device.type == "cuda":
            pixels = pixels.pin_memory()
        pixels = pixels.to(device, non_blocking=True)
        weak = channels_last(weak_view(pixels, settings, randomness, share))
        plain = weak if fast else channels_last(plain_view(pixels, settings))
        drawn = randomness.get_state()

        def strong(own: Tensor) -> Tensor:
            """Of some images only, just before they are trained on; what is random does not depend on which."""
            some = Share(share.count, share.rows[own.cpu()])
            again = torch.Generator().set_state(drawn)
            return channels_last(strong_view(pixels.index_select(0, own), settings, again, some))

        return Views(plain, weak, strong, chosen)

    return make


@torch.no_grad()
def view_features(
    config: RefineConfig, backbone: Backbone, images: ImageSet, device: torch.device, distributed: Distributed = SINGLE
) -> Iterator[Tensor]:
    """Rows (n, 1 + 2 views, D) of consecutive images, from a frozen backbone: plain, weak and strong ones."""
    make = fresh_views(config, backbone, images, device, distributed)
    backbone.eval()
    parts = torch.arange(len(images)).split(256)
    for number, part in enumerate(progress(parts, len(parts), "features of views")):
        views = [make(part, generator(config.seed, VIEWS, -1 - view, number)) for view in range(config.frozen_views)]
        own = torch.arange(len(views[0].plain), device=device)
        pixels = [views[0].plain, *(view.weak for view in views), *(view.strong_of(own) for view in views)]
        rows = plan_shards_of(len(part), config, distributed).whole(distributed.rank)
        with synchronised(distributed, config.sync_batchnorm, rows):
            features = torch.stack([backbone(each) for each in pixels], dim=1).float()
        yield distributed.gather(features, rows.shares).cpu()


def cached_views(rows: Tensor | RowFile, device: torch.device) -> MakeViews:
    """Views that are drawn from the rows (N, 1 + 2 views, D) of `view_features`."""
    count = (rows.shape[1] - 1) // 2

    def pick(chosen: Tensor, randomness: torch.Generator) -> Views:
        which = torch.randint(count, (2, len(chosen)), generator=randomness)
        found = rows[chosen] if isinstance(rows, Tensor) else torch.from_numpy(rows[chosen.numpy()])
        each = torch.arange(len(chosen))
        views = (found[:, 0], found[each, 1 + which[0]], found[each, 1 + count + which[1]])
        plain, weak, strong = (view.to(device) for view in views)
        return Views(plain, weak, strong, chosen)

    return pick
