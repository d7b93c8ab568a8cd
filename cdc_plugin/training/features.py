"""Extract features of all images, in memory or on disk, and apply heads and k-means to them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from cdc_plugin.core.kmeans import kmeans, lloyd_blocks, nearest
from cdc_plugin.core.prototypes import STARTS, standardize_rows
from cdc_plugin.data import cache
from cdc_plugin.data.images import ImageSet
from cdc_plugin.data.side import describe_side
from cdc_plugin.data.views import channels_last, plain_view, view_settings
from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training.runtime import SINGLE, Distributed, Runtime

BLOCK = 2048
# Images in one pass without gradient: so many of 224 px, more of smaller ones up to a number beyond which nothing is
# gained: a run of EfficientNet-Lite0 at 224 px ended at 1.70 GB with 32, at 1.43 GB with 16, in the same time.
PASS_PIXELS, PASS_IMAGES, ON_GPU = 16 * 224**2, 256, 16
IN_MEMORY = 64 * 1024**2  # bytes; more rows lie in a file, so that memory does not grow with the number of images
# Rows that k-means and its like see at once; of larger sets a random sample. At least so many a cluster.
SAMPLE, SAMPLE_A_CLUSTER = 20_000, 50


def find_rows(key: str | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return the rows of this shape that were kept under this key, on disk; None if there are none."""
    path = None if key is None else cache.find_entry("features", key)
    rows = None if path is None else cache.open_rows(path, shape, np.float32)
    if path is None or rows is None:
        return None
    cache.mark_used(path)
    return torch.from_numpy(rows)


def keep_rows(key: str | None, shape: tuple[int, ...], parts: Iterable[Tensor]) -> Tensor:
    """Keep rows that come part by part, few in memory, many in a mapped file; those with a key can be found again."""
    size = 4 * prod(shape)
    path = None if key is None else cache.find_entry("features", key)
    if size <= IN_MEMORY:
        rows = _concatenate(shape, parts)
        if path is not None:
            with contextlib.suppress(UserError):  # a full disk, for example; they are at hand all the same
                _write(path, shape, [rows])
        return rows
    if path is not None:
        return _write(path, shape, parts)
    # Of use to this process only: the file is gone when the process ends, however it ends.
    written = cache.write_private_rows("features", (part.numpy() for part in parts), shape, np.float32)
    return _concatenate(shape, parts) if written is None else torch.from_numpy(written)


def _concatenate(shape: tuple[int, ...], parts: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return all rows; they are never twice in memory."""
    rows, first = torch.empty(shape, dtype=dtype), 0
    for part in parts:
        rows[first : first + len(part)] = part
        first += len(part)
    return rows


def _write(path: Path, shape: tuple[int, ...], parts: Iterable[Tensor]) -> Tensor:
    cache.make_room(path, 4 * prod(shape))
    with cache.lock_entry(path):
        return torch.from_numpy(cache.write_rows(path, (part.numpy() for part in parts), shape, np.float32))


@dataclass(frozen=True)
class ReadRows:
    """Features that others have computed: read where they lie whenever they are asked for, and never all at once."""

    backbone: Backbone
    images: ImageSet
    shard: Tensor  # (n,) which of them

    def __len__(self) -> int:
        return len(self.shard)

    @torch.no_grad()
    def __getitem__(self, places: slice | Tensor) -> Tensor:
        backbone = self.backbone.eval()
        return backbone(self.images.batch(self.shard[places]).to(backbone.mean.device)).cpu()


@dataclass(frozen=True)
class Features:
    """The features (N, D) of all images, of which each process has those of its shard."""

    own: Tensor | ReadRows  # (n, D), on the CPU; see `Distributed.own_shard`
    count: int  # N
    distributed: Distributed = SINGLE

    def __len__(self) -> int:
        return self.count

    def blocks(self) -> Iterator[Tensor]:
        """Yield this process's features, block by block; at least one, which is empty where it has no image."""
        for start in range(0, max(1, len(self.own)), BLOCK):
            yield self.own[start : start + BLOCK]

    def map(self, work: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what ``work`` makes of every row, (N, ...), from blocks of this process and all others."""
        done = (work(block).cpu() for block in self.blocks())
        start = next(done)
        # Put in place at once: small tensors that are kept between large ones would leave holes in memory.
        whole = _concatenate((len(self.own), *start.shape[1:]), chain([start], done), start.dtype)
        return self.distributed.gather(whole, self.distributed.shards_of(self.count))

    def take(self, chosen: Tensor) -> Tensor:
        """Return the rows (n, D) at rising places (n,), from this process and all others."""
        shares = self.distributed.shards_of(self.count)
        owned = [torch.isin(chosen, share, assume_unique=True).nonzero().flatten() for share in shares]
        first = sum(map(len, shares[: self.distributed.rank]))
        return self.distributed.gather(self.own[chosen[owned[self.distributed.rank]] - first], owned)

    def gather(self) -> Tensor | ReadRows:
        """Return all rows in the main process, where they are: in memory, in a mapped file or not read yet."""
        if self.distributed.size == 1:
            return self.own
        parts = (self.take(part) for part in torch.arange(self.count).split(BLOCK))
        if self.distributed.main:
            return keep_rows(None, (self.count, self.own[:0].shape[1]), parts)
        for _ in parts:  # the others are asked for theirs
            pass
        return self.own[:0]

    def sample(self, clusters: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return rows (n, D) for k-means into so many clusters, and which (n,): all, or a random part of very many."""
        most = max(SAMPLE, SAMPLE_A_CLUSTER * clusters)
        if self.count <= most:
            return self.map(lambda block: block), torch.arange(self.count)
        chosen = torch.randperm(self.count, generator=generator)[:most].sort().values
        return self.take(chosen), chosen


def extract_features(backbone: Backbone, images: ImageSet, runtime: Runtime) -> Tensor:
    """Return the features (N, D) of the plain views, on the CPU, in a single process."""
    return torch.cat(list(_extract_shard(backbone, images, dataclasses.replace(runtime, distributed=SINGLE))))


def shared_features(backbone: Backbone, images: ImageSet, runtime: Runtime, cached: bool = True) -> Features:
    """Return the features of a set of any size, each process those of its shard; kept and found again if cached."""
    distributed = runtime.distributed
    if backbone.takes_features:
        return Features(ReadRows(backbone, images, distributed.own_shard(len(images))), len(images), distributed)
    shape = (len(distributed.own_shard(len(images))), backbone.feature_dim)
    key = features_key(backbone, images, runtime, f"{distributed.rank} of {distributed.size}") if cached else None
    rows = find_rows(key, shape)
    if rows is None:
        rows = keep_rows(key, shape, _extract_shard(backbone, images, runtime))
    return Features(rows, len(images), distributed)


def features_key(backbone: Backbone, images: ImageSet, runtime: Runtime, more: str) -> str | None:
    """Return the name of features in the cache: it changes with weights, images, their input and what else matters."""
    if backbone.spec is None:  # a module of the user's own: the same weights may stand in changed code
        return None
    return hash_inputs(backbone, images, runtime, more)


def hash_inputs(backbone: Backbone, images: ImageSet, runtime: Runtime, more: str = "") -> str:
    """Return a digest of all that features depend on."""
    facts = f"{backbone.mean.tolist()} {backbone.std.tolist()} {backbone.input_size} {backbone.spec}"
    facts += describe_side(backbone.input_size)
    how = f"{runtime.device.type} {runtime.precision} {len(images)} {more}"
    state = backbone.module.state_dict()
    weights = (tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for tensor in state.values())
    return cache.compute_digest([facts, how, images.digest, *state, *(weight.tobytes() for weight in weights)])


@torch.no_grad()
def _extract_shard(backbone: Backbone, images: ImageSet, runtime: Runtime) -> Iterator[Tensor]:
    """Yield the features of this process's shard of the images, part by part."""
    settings = view_settings(backbone)
    backbone.eval()
    shard = runtime.distributed.own_shard(len(images))
    if not len(shard):
        yield torch.empty(0, backbone.feature_dim)
        return
    parts = shard.split(images_per_pass(backbone.input_size, runtime.device))
    for part in runtime.progress(parts, len(parts), "features"):
        views = plain_view(images.batch(part).to(runtime.device), settings)
        with runtime.autocast():
            yield backbone(channels_last(views)).float().cpu()


def images_per_pass(side: int, device: torch.device) -> int:
    """Return how many images of a side a network takes at once where it learns nothing.

    >>> [images_per_pass(side, torch.device("cpu")) for side in (32, 96, 224, 518)]
    [256, 87, 16, 2]
    """
    pixels = PASS_PIXELS * (ON_GPU if device.type == "cuda" else 1)
    return max(1, min(PASS_IMAGES, pixels // side**2))


@torch.no_grad()
def head_probabilities(head: nn.Module, features: Tensor | Features) -> NDArray[np.float32]:
    """Return the softmax (N, C) of a head in evaluation mode."""
    head.eval()
    device = next(head.parameters()).device
    features = Features(features, len(features)) if isinstance(features, Tensor) else features
    return features.map(lambda block: F.softmax(head(block.to(device)), dim=1)).numpy()


def kmeans_assignment(features: Tensor, clusters: int, generator: torch.Generator) -> NDArray[np.int64]:
    """Return the clustering that the stage competes with: the best of ten k-means starts on the same features."""
    return kmeans(standardize_rows(features), clusters, generator, starts=STARTS).assignment.cpu().numpy()


def kmeans_of_all(
    features: Features, clusters: int, device: torch.device, generator: torch.Generator
) -> NDArray[np.int64]:
    """Do as `kmeans_assignment` for any number of features: starts see a sample, the last iterations everything."""
    rows, chosen = features.sample(clusters, generator)
    best = kmeans(standardize_rows(rows.to(device)), clusters, generator, starts=STARTS)
    if len(chosen) == len(features):
        return best.assignment.cpu().numpy()
    return nearest_of_all(features, refine_over_all(features, best.centers)).numpy()


def refine_over_all(features: Features, centers: Tensor) -> Tensor:
    """Return the k-means centres of all standardised features, from those of a sample."""

    def directions() -> Iterator[Tensor]:
        return (standardize_rows(block.to(centers.device)) for block in features.blocks())

    start = features.distributed.broadcast_(centers.contiguous())
    return lloyd_blocks(directions, start, features.distributed.all_reduce)


def nearest_of_all(features: Features, centers: Tensor) -> Tensor:
    """Return which centre (N,) is nearest to each standardised row."""
    return features.map(lambda block: nearest(standardize_rows(block.to(centers.device)), centers)[0])
