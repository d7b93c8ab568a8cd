"""Make views of the images: batches for the training loop, cached features of a frozen backbone, second looks."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.config.resolve import ResolvedConfig, batch_sizes
from cdc_plugin.config.schema import AugmentConfig
from cdc_plugin.core.random_streams import NEIGHBOURS, ORDER, VIEWS, generator, send
from cdc_plugin.data.images import ImageSet
from cdc_plugin.data.views import Share, ViewSettings, channels_last, plain_view, strong_view, view_settings, weak_view
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training.features import Features, features_key, find_rows, images_per_pass, keep_rows
from cdc_plugin.training.runtime import Runtime, plan_shards
from cdc_plugin.training.steps import Views

MakeViews = Callable[..., Views]  # of image numbers (n,), a generator and, where they were fetched ahead, the pixels
Fetch = Callable[[Tensor], Tensor]
View = Callable[[Tensor], Tensor]
TRIED_ON = 512  # images that an augmentation is tried on
CROP_SCALES = (0.2, 0.4, 0.6, 0.8)  # SCAN's 0.2 first, then milder ones
# A change is overlooked if it moves few more images to another cluster than the mildest crop does.
FLIP_SHARE, CROP_SHARE = 0.9, 0.95
SNAPSHOT_IMAGES, SNAPSHOT_EPOCHS = 512, 3  # images that are predicted after each of the last epochs
NEAR = 20  # images near by that one may be exchanged for, as in SCAN; of half a cluster at most
AUGMENTED_IMAGES = 1024  # images that are predicted again in an augmented view


def make_batches(
    make: MakeViews, image_count: int, batch_size: int, seed: int, fetch: Fetch | None = None
) -> Callable[[int, int], Iterator[Views]]:
    """Return a function that yields the batches of an epoch but its first ones; any can be made again.

    ``fetch`` reads the pixels of the next batch on another thread while a device is busy with the present one.
    """
    sizes = batch_sizes(image_count, batch_size)

    def batches(epoch: int, done: int) -> Iterator[Views]:
        order = torch.randperm(image_count, generator=generator(seed, ORDER, epoch))
        left = list(enumerate(order.split(sizes)))[done:]
        ahead = fetch_ahead(fetch, [rows for _, rows in left]) if fetch is not None else itertools.repeat(None)
        for (number, rows), pixels in zip(left, ahead, strict=False):
            yield make(rows, generator(seed, VIEWS, epoch, number), pixels)

    return batches


def load_pixels(images: ImageSet, rows: Tensor, device: torch.device) -> Tensor:
    """Return the pixels of some images on the device; a copy to a GPU runs beside other work."""
    return send(images.batch(rows), device)


def fetch_ahead(fetch: Fetch, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield what ``fetch`` returns for each batch; the next one is on its way while the caller works."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        pending = deque(thread.submit(fetch, rows) for rows in batches[:1])
        for rows in batches[1:]:
            pending.append(thread.submit(fetch, rows))
            yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def load_ahead(images: ImageSet, batches: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield the pixels of each batch on the device; for a GPU, the next ones are read meanwhile."""
    if device.type == "cpu":
        return (images.batch(rows) for rows in batches)
    return (send(pixels, device) for pixels in fetch_ahead(partial(_read_locked, images), batches))


def _read_locked(images: ImageSet, rows: Tensor) -> Tensor:
    """Return the pixels of some images, in locked memory where there is a GPU to send them to."""
    pixels = images.batch(rows)
    return pixels.pin_memory() if torch.cuda.is_available() else pixels


def fetch_pixels(settings: ResolvedConfig, images: ImageSet, runtime: Runtime) -> Fetch | None:
    """Return a function that reads this process's shard of a batch for `make_batches`; on the CPU it gains nothing."""
    if runtime.device.type == "cpu":
        return None
    distributed = runtime.distributed

    def fetch(rows: Tensor) -> Tensor:
        plan = plan_shards(len(rows), settings.sub_batch_size, distributed.size)
        return _read_locked(images, rows[plan.owned[distributed.rank]])

    return fetch


def training_views(augment: AugmentConfig, backbone: Backbone) -> ViewSettings:
    """Return how the views of a run are made, by an augmentation in which nothing is left to choose."""
    return view_settings(
        backbone,
        flip=augment.flip,
        crop_scale=augment.crop_scale,
        operations=augment.operations,
        cutout=augment.cutout,
        excluded=tuple(augment.exclude),
    )


def fresh_views(settings: ResolvedConfig, backbone: Backbone, images: ImageSet, runtime: Runtime) -> MakeViews:
    """Return a function that makes three new views of this process's shard of the chosen images."""
    augmentation = training_views(settings.augment, backbone)
    device, distributed = runtime.device, runtime.distributed
    # To save passes, the weak views are the plain ones as well; those of a frozen backbone cost nothing.
    fast = settings.passes == "fast" and not settings.freeze_backbone

    def make(rows: Tensor, randomness: torch.Generator, pixels: Tensor | None = None) -> Views:
        plan = plan_shards(len(rows), settings.sub_batch_size, distributed.size)
        shard = Share(len(rows), plan.owned[distributed.rank])
        pixels = load_pixels(images, rows[shard.rows], device) if pixels is None else send(pixels, device)
        weak = channels_last(weak_view(pixels, augmentation, randomness, shard))
        plain = weak if fast else channels_last(plain_view(pixels, augmentation))
        drawn = randomness.get_state()

        def strong(own: Tensor) -> Tensor:
            """Make views of some images, just before they are trained on; their randomness does not depend on which."""
            some = Share(shard.count, shard.rows[own])
            again = torch.Generator().set_state(drawn)
            return channels_last(strong_view(pixels.index_select(0, send(own, device)), augmentation, again, some))

        return Views(plain, weak, strong, rows)

    return make


@torch.no_grad()
def view_features(settings: ResolvedConfig, backbone: Backbone, images: ImageSet, runtime: Runtime) -> Iterator[Tensor]:
    """Yield rows (n, 1 + 2 views, D) of consecutive images, from a frozen backbone: plain, weak and strong views."""
    make = fresh_views(settings, backbone, images, runtime)
    backbone.eval()
    parts = torch.arange(len(images)).split(images_per_pass(backbone.input_size, runtime.device))
    for number, part in enumerate(runtime.progress(parts, len(parts), "features of views")):
        streams = [generator(settings.seed, VIEWS, -1 - view, number) for view in range(settings.frozen_views)]
        views = [make(part, stream) for stream in streams]
        own = torch.arange(len(views[0].plain))
        pixels = [views[0].plain, *(view.weak for view in views), *(view.strong_of(own) for view in views)]
        features = torch.stack([backbone(each) for each in pixels], dim=1).float()
        plan = plan_shards(len(part), settings.sub_batch_size, runtime.distributed.size)
        yield runtime.distributed.gather(features, plan.owned).cpu()


def cached_view_features(settings: ResolvedConfig, backbone: Backbone, images: ImageSet, runtime: Runtime) -> Tensor:
    """Return the rows of `view_features`: all processes compute them, the main one keeps and has them."""
    distributed = runtime.distributed
    shape = (len(images), 1 + 2 * settings.frozen_views, backbone.feature_dim)
    key = features_key(backbone, images, runtime, f"{settings.augment} {settings.seed} of {distributed.size}")
    rows = find_rows(key, shape) if distributed.main else None
    if distributed.broadcast_from_main(lambda: rows is not None):
        return torch.empty(0, *shape[1:]) if rows is None else rows
    parts = view_features(settings, backbone, images, runtime)
    if distributed.main:
        return keep_rows(key, shape, parts)
    for _ in parts:
        pass
    return torch.empty(0, *shape[1:])


def cached_views(rows: Tensor, clusters: int, device: torch.device) -> MakeViews:
    """Return a function that draws views from the rows (N, 1 + 2 views, D) of `view_features`."""
    count = (rows.shape[1] - 1) // 2
    if not count:
        return neighbour_views(Features(rows[:, 0], len(rows)), clusters, device)

    def pick(chosen: Tensor, randomness: torch.Generator, pixels: None = None) -> Views:
        which = torch.randint(count, (2, len(chosen)), generator=randomness)
        views = rows[chosen]
        each = torch.arange(len(chosen))
        triple = (views[:, 0], views[each, 1 + which[0]], views[each, 1 + count + which[1]])
        plain, weak, strong = (send(view, device) for view in triple)
        return Views(plain, weak, strong, chosen)

    return pick


def neighbour_views(features: Features, clusters: int, device: torch.device) -> MakeViews:
    """Return a function that takes the features of images near by as strong views, and the plain ones as weak views.

    Like a view of pixels, a neighbour differs from an image in what mostly does not change its kind.
    """
    near, rows = find_near(features, clusters, device), features.gather()

    def pick(chosen: Tensor, randomness: torch.Generator, pixels: None = None) -> Views:
        drawn = near[chosen, torch.randint(near.shape[1], (len(chosen),), generator=randomness)].long()
        plain, strong = (send(rows[places], device) for places in (chosen, drawn))
        return Views(plain, plain, strong, chosen)

    return pick


def find_near(features: Features, clusters: int, device: torch.device) -> Tensor:
    """Return which images (N, k) are near each one, mostly itself among them: of all or, of very many, a sample."""
    rows, chosen = features.sample(clusters, generator(0, NEIGHBOURS))
    unit, count = F.normalize(rows.to(device), dim=1), max(1, min(NEAR, len(rows) // (2 * clusters)))

    def find(block: Tensor) -> Tensor:
        similarity = F.normalize(block.to(device), dim=1) @ unit.T
        return chosen[similarity.topk(count, dim=1).indices.cpu()].int()

    return features.map(find)


def choose_augmentation(
    asked: AugmentConfig,
    backbone: Backbone,
    head: nn.Module,
    images: ImageSet,
    runtime: Runtime,
    randomness: torch.Generator,
) -> tuple[AugmentConfig, dict[str, float]]:
    """Fill in ``flip`` and ``crop_scale`` where they are None; return them with the measured agreements.

    A self-supervised backbone has learnt to overlook the changes it was pretrained with. Digits are pretrained without
    mirroring, and mirrored ones land in other clusters: so they must not be mirrored here either. Agreement is the
    share of a sample of images that the fresh head puts into the same cluster with and without the change.
    """
    if backbone.takes_features:
        return dataclasses.replace(asked, flip=False, crop_scale=1.0), {}
    if asked.flip is not None and asked.crop_scale is not None:
        return asked, {}
    chosen = torch.randperm(len(images), generator=randomness)[:TRIED_ON].sort().values
    parts = images.batch(chosen).split(images_per_pass(backbone.input_size, runtime.device))

    def clusters(view: View) -> Tensor:
        return predict_clusters(backbone, head, parts, view, runtime)

    plain = view_settings(backbone)
    reference = clusters(lambda part: plain_view(part, plain))

    def agreement(view: View) -> float:
        return (clusters(view) == reference).float().mean().item()

    measured = {"flip": agreement(lambda part: plain_view(part.flip(-1), plain))}
    for scale in CROP_SCALES:
        settings = view_settings(backbone, flip=False, crop_scale=scale)
        measured[f"crop {scale}"] = agreement(lambda part, s=settings: weak_view(part, s, randomness))  # type: ignore[misc]
    mildest = measured[f"crop {CROP_SCALES[-1]}"]
    flip, crop_scale = asked.flip, asked.crop_scale
    if flip is None:
        flip = measured["flip"] >= FLIP_SHARE * mildest
    if crop_scale is None:
        crop_scale = next(s for s in CROP_SCALES if measured[f"crop {s}"] >= CROP_SHARE * mildest)
    return dataclasses.replace(asked, flip=flip, crop_scale=crop_scale), measured


def predict_snapshot(backbone: Backbone, head: nn.Module, images: ImageSet, runtime: Runtime) -> Tensor:
    """Predict the clusters (m,) of a few images, always the same ones, to see how many change between epochs."""
    settings = view_settings(backbone)
    size = images_per_pass(backbone.input_size, runtime.device)
    parts = (images.batch(part) for part in snapshot_rows(len(images)).split(size))
    return predict_clusters(backbone, head, parts, lambda pixels: plain_view(pixels, settings), runtime)


def snapshot_rows(image_count: int) -> Tensor:
    """Return the indices of the images that `predict_snapshot` predicts."""
    return torch.linspace(0, image_count - 1, min(SNAPSHOT_IMAGES, image_count)).long()


def predict_augmented(
    backbone: Backbone,
    head: nn.Module,
    images: ImageSet,
    augment: AugmentConfig,
    runtime: Runtime,
    randomness: torch.Generator,
    most: int = AUGMENTED_IMAGES,
) -> tuple[Tensor, Tensor | None]:
    """Return indices of a sample of images, and the cluster that the head assigns to a weak view of each.

    Features that others have computed have no views: None.
    """
    settings = training_views(augment, backbone)
    chosen = torch.randperm(len(images), generator=randomness)[:most].sort().values
    if backbone.takes_features:
        return chosen, None
    parts = (images.batch(part) for part in chosen.split(images_per_pass(backbone.input_size, runtime.device)))
    return chosen, predict_clusters(
        backbone, head, parts, lambda pixels: weak_view(pixels, settings, randomness), runtime
    )


@torch.no_grad()
def predict_clusters(
    backbone: Backbone, head: nn.Module, parts: Iterable[Tensor], view: View, runtime: Runtime
) -> Tensor:
    """Return the cluster that a head assigns to a view of each image, of pixels that come part by part."""
    backbone.eval()
    head.eval()
    clusters = []
    for pixels in parts:
        views = channels_last(view(send(pixels, runtime.device)))
        with runtime.autocast():
            clusters.append(head(backbone(views)).float().argmax(dim=1).cpu())
    return torch.cat(clusters)
