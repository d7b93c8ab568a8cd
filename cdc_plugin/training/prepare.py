"""Do what comes before training: open and check the inputs, extract features, initialise the heads."""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.infer.resolve import adopt_native_size, resolve_input
from cdc_plugin.checkpoints.load import fit_size, load_checkpoint
from cdc_plugin.config.resolve import Facts, ResolvedConfig, choose_clusters, choose_init, resolve
from cdc_plugin.config.schema import INPUT_FACTS, RefineConfig
from cdc_plugin.core.cluster_count import Count
from cdc_plugin.core.losses import check_calibration
from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.core.random_streams import AUGMENTATION, INITIALISATION, generator
from cdc_plugin.core.selection import check_selection
from cdc_plugin.data.images import ImageSet, Survey, digest_image_list, open_images
from cdc_plugin.data.sources.base import spread_evenly
from cdc_plugin.data.sources.features import FeatureSource, describe_features
from cdc_plugin.errors import CheckpointError, ConfigError, DataError, option
from cdc_plugin.models.architectures import build, describe
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.blocks import recompute_blocks, train_last_blocks
from cdc_plugin.models.initialise import InitialHeads, build_initial_heads
from cdc_plugin.training.batches import CROP_SCALES, choose_augmentation, training_views
from cdc_plugin.training.count import find_number
from cdc_plugin.training.features import Features, head_probabilities, nearest_of_all, refine_over_all, shared_features
from cdc_plugin.training.progress import log
from cdc_plugin.training.runtime import Progress, Runtime, choose_device
from cdc_plugin.training.trackers import make_trackers

FITTED = 4096  # rows that the scale of features is taken from
Extract = Callable[[Backbone, ImageSet, Runtime], Features]


@dataclass(frozen=True)
class Prepared:
    """Checked inputs of a run; the backbone is on the device."""

    request: RefineConfig  # what was asked for, whose augmentation may still be open
    settings: ResolvedConfig
    loaded: Loaded
    backbone: Backbone
    images: ImageSet
    runtime: Runtime
    features: Features  # (N, D) of the plain views
    old: NDArray[np.float32] | None  # (N, C') probabilities of the old model's head, where the checkpoint has one
    count: Count | None = None  # how the number of clusters was found, where it was looked for


def check_request(request: RefineConfig, resume: bool) -> None:
    """Refuse a run that cannot begin, before anything is made or read."""
    required = [] if request.features or (resume and request.out) else ["backbone", "data"]
    missing = [option(name, "...") for name in required if getattr(request, name) is None]
    if missing:
        raise ConfigError(f"missing {' and '.join(missing)}; cdc-refine --help shows how a run is started")
    check_selection(request.selection)
    check_calibration(request.calibration, request.calibration_strength)
    choose_device(request.device)
    make_trackers(request.track)


def prepare(
    request: RefineConfig, module: nn.Module | None, data: Any, runtime: Runtime, extract: Extract = shared_features
) -> Prepared:
    """Open the checkpoint and the images, resolve the settings, and extract the features."""
    distributed = runtime.distributed

    def open_inputs() -> tuple[Loaded, Backbone, ImageSet, ResolvedConfig]:
        source = find_source(request, data)
        loaded = open_network(request, module, source)
        clusters = choose_clusters(least_clusters(request), loaded.head_clusters)
        choose_init(request.init, loaded.head_clusters, clusters)  # refuses before images are read
        images = open_data(request, loaded.backbone, source, clusters, runtime)
        backbone = resolve_input(loaded.backbone, images)
        asked = dataclasses.replace(request, clusters=clusters)
        settings = resolve(asked, collect_facts(request, loaded, backbone, len(images), distributed.size))
        training_views(settings.augment, backbone)  # refuses a wrong augmentation before any work is done
        check_processes(settings, distributed.size)
        return loaded, backbone, images, settings

    loaded, backbone, images, settings = distributed.raise_together(open_inputs)
    if distributed.size > 1:
        distributed.check_same_images(digest_image_list(images), len(images))
        log.info("%d processes train together", distributed.size)
    distributed.raise_together(lambda: restrict_training(backbone, settings))
    backbone.place(runtime.device, settings.compile, not settings.freeze_backbone)
    log.info("%s: %s", loaded.origin.writer, loaded.origin.network)
    features = extract(backbone, images, runtime)
    if not features.map(lambda block: block.isfinite().all(dim=1)).all():
        raise CheckpointError("the backbone gives features that are not finite: is this the right checkpoint?")
    count = None
    if request.clusters is None and request.clusters_between:
        count = find_number(features, request.clusters_between, settings.seed)
        log.info("%d clusters are found; the features do not exclude %d to %d", count.number, count.low, count.high)
        facts = collect_facts(request, loaded, backbone, len(images), distributed.size)
        settings = resolve(dataclasses.replace(request, clusters=count.number), facts)
    old = head_probabilities(loaded.heads[-1].to(runtime.device), features) if loaded.heads else None
    return Prepared(request, settings, loaded, backbone, images, runtime, features, old, count)


def least_clusters(request: RefineConfig) -> int | None:
    """Return how many clusters are asked for or, where their number is to be found, the fewest."""
    return request.clusters_between[0] if request.clusters is None and request.clusters_between else request.clusters


def restrict_training(backbone: Backbone, settings: ResolvedConfig) -> None:
    """Let training change as much of the backbone, in as little memory, as is asked for."""
    if settings.freeze_backbone:
        return
    if settings.train_blocks is not None:
        train_last_blocks(backbone.module, settings.train_blocks)
    if settings.recompute_blocks:
        recompute_blocks(backbone.module)


def collect_facts(
    request: RefineConfig, loaded: Loaded, backbone: Backbone, image_count: int, processes: int = 1
) -> Facts:
    """Return what the settings of a run depend on."""
    mean, std = backbone.mean.tolist(), backbone.std.tolist()
    strength = check_calibration(request.calibration).strength
    return Facts(image_count, int(backbone.input_size), mean, std, loaded.head_clusters, strength, processes)


def find_source(request: RefineConfig, data: Any) -> Any:
    """Return the images, or the features in their place, that were named or given."""
    data = (request.data or None) if data is None else data
    if not request.features or isinstance(data, FeatureSource):
        return data
    return describe_features(request.features, data, request.labels, request.data_root)


def fit_scaler(source: FeatureSource) -> Loaded:
    """Return the backbone of features, which brings their spaces to one scale."""
    spec = {"family": "features", "spaces": source.dims}
    scaler, width = build(spec)
    scaler.fit(torch.from_numpy(source[spread_evenly(len(source), FITTED)]))  # type: ignore[operator]
    backbone = Backbone(scaler, width, [0.0] * 3, [1.0] * 3, 1, spec)
    return Loaded(backbone, Origin("features", network=describe(spec)))


def check_source(backbone: Backbone, source: Any) -> None:
    """Refuse images for a model of features, features for a model of images, and features of other spaces."""
    if isinstance(source, FeatureSource) != backbone.takes_features:
        takes, found = describe(backbone.spec), "features" if isinstance(source, FeatureSource) else "images"
        hint = "leave the backbone out" if found == "features" else f"add {option('features', 'FILE')}"
        raise DataError(f"the network takes {takes if backbone.takes_features else 'images'}, found {found}; {hint}")
    if isinstance(source, FeatureSource) and source.dims != backbone.module.spaces:
        raise DataError(
            f"the model takes {describe(backbone.spec)}, {source.description} has {' + '.join(map(str, source.dims))}; "
            "give vectors of the same networks in the same order"
        )


def open_network(request: RefineConfig, module: nn.Module | None, source: Any = None) -> Loaded:
    """Return the network that was named or given, with the input convention that was stated."""
    if isinstance(source, FeatureSource) and module is None and request.backbone is None:
        return fit_scaler(source)
    if module is None:
        size = None if "input_size" in request.from_recipe else request.input_size
        choices = (request.arch, request.branch, request.head, request.clusters, request.partial_weights)
        wanted = Wanted(*choices, size, request.pool)
        loaded = load_checkpoint(request.backbone or "", request.format, wanted, request.trust_checkpoint)
        unclear = loaded.origin.why.get("head") if not loaded.heads else None
        if unclear and request.init == "keep":
            raise CheckpointError(f"{request.backbone} has {unclear}")
        if unclear:
            log.warning("%s; the run begins with prototypes", unclear)
        if loaded.matched < 1:
            log.warning("only %.1f %% of the backbone's weights are in the checkpoint", 100 * loaded.matched)
        for fact in ("network", "heads"):  # other networks with the same weights, which no image tells apart
            if fact in loaded.backbone.inferred:
                log.warning("%s: %s", fact, loaded.origin.why.get(fact, "assumed, as the run that wrote the file did"))
    elif isinstance(module, Backbone):
        # Training must not change what the caller still holds.
        loaded = fit_size(Loaded(copy.deepcopy(module), Origin("the caller")), request.input_size or module.input_size)
    else:
        raise ConfigError(
            "a module of your own must say what it takes: wrap it as "
            "cdc_plugin.Backbone(module, feature_dim, mean, std, input_size)"
        )
    backbone, recipe = loaded.backbone, request.from_recipe
    stated = {name: getattr(request, name) for name in INPUT_FACTS if getattr(request, name) is not None}
    # A recipe's word on the input yields to the checkpoint's own.
    stated = {name: value for name, value in stated.items() if name not in recipe or name in backbone.inferred}
    mean, std = stated.get("mean", backbone.mean.tolist()), stated.get("std", backbone.std.tolist())
    size, spec = backbone.input_size, backbone.spec
    if stated.get("input_size", size) != size:  # an equal one may know more, see `Side`
        size = stated["input_size"]
    inferred = [name for name in backbone.inferred if name not in set(stated) - set(recipe)]
    backbone = Backbone(backbone.module, backbone.feature_dim, mean, std, size, spec, inferred=inferred)
    return dataclasses.replace(loaded, backbone=backbone)


def open_data(request: RefineConfig, backbone: Backbone, data: Any, clusters: int, runtime: Runtime) -> ImageSet:
    """Return the images, squared to the size the backbone takes; refuse fewer than there are to be clusters."""
    source = find_source(request, data)
    check_source(backbone, source)
    adopt_native_size(backbone, source, request.data_root)
    images = read_images(source, backbone.input_size, request.data_root, runtime.progress, request.labels)
    refuse_few(images, clusters)
    return images


def read_images(source: Any, size: int, root: str | None, progress: Progress, labels: bool = False) -> ImageSet:
    """Return the images, squared to a size; log those that cannot be read, and what is odd about the others."""
    images = open_images(source, size, labels=labels, root=root, progress=progress)
    for name, reason in images.skipped:
        log.warning("skipped %s: %s", name if name.isprintable() else ascii(name), reason)
    for warning in images.warnings:
        log.warning("%s", warning["text"])
    return images


def refuse_few(images: ImageSet | Survey, clusters: int) -> None:
    """Refuse fewer images than clusters."""
    if images.count < max(clusters, 4):
        raise DataError(
            f"{images.source} has {images.count} readable {images.noun}s, too few for {clusters} clusters; "
            f"add {images.noun}s or ask for fewer clusters"
        )


def check_processes(settings: ResolvedConfig, processes: int) -> None:
    """Refuse more processes than a sub-batch can be shared by, and what several processes cannot do."""
    if processes > 1 and settings.sync_batchnorm and settings.compile:
        raise ConfigError("compiled networks cannot share BatchNorm over several processes; add sync_batchnorm=false")
    if not settings.freeze_backbone and settings.sub_batch_size < 2 * processes:
        raise ConfigError(
            f"sub_batch_size={settings.sub_batch_size} gives {processes} processes fewer than two images each; "
            f"take fewer processes, or sub_batch_size={4 * processes} and a batch_size to match"
        )


def initialise(prepared: Prepared) -> tuple[InitialHeads, ResolvedConfig]:
    """Return both heads, from prototypes (Sec. 3.3) or as asked for, and the settings with a fitting augmentation."""
    settings, features, device = prepared.settings, prepared.features, prepared.runtime.device
    sources = {"keep": "the old model's heads", "grow": "the old model's heads and new kinds", "random": "chance"}
    source, noun = sources.get(settings.init, "prototypes"), prepared.images.noun
    log.info(
        "initialising %d clusters by %s, on the features of %d %ss", settings.clusters, source, len(features), noun
    )
    randomness = generator(settings.seed, INITIALISATION)
    loaded = prepared.loaded
    heads = start_heads(
        settings.init, settings, features, randomness, device, loaded.heads, prepared.old, loaded.prototypes
    )
    randomness = generator(settings.seed, AUGMENTATION)
    asked = prepared.request.augment
    if settings.freeze_backbone and not settings.frozen_views:  # views serve the quality card alone
        asked = dataclasses.replace(asked, flip=bool(asked.flip), crop_scale=asked.crop_scale or CROP_SCALES[-1])
    augment, agreements = choose_augmentation(
        asked, prepared.backbone, heads.clustering, prepared.images, prepared.runtime, randomness
    )
    if agreements:
        shares = ", ".join(f"{name}: {share:.0%}" for name, share in agreements.items())
        chosen_words = f"flip {augment.flip}, crop_scale {augment.crop_scale:g}"
        log.info("augmentation chosen by agreement of clusters (%s): %s", shares, chosen_words)
    return heads, dataclasses.replace(settings, augment=augment)


def start_heads(
    init: str,
    settings: ResolvedConfig,
    features: Features,
    randomness: torch.Generator,
    device: torch.device,
    old_heads: tuple[nn.Module, ...] = (),
    old_probs: NDArray[np.float32] | None = None,
    prototypes: Prototypes | None = None,
    partition: torch.Tensor | None = None,
) -> InitialHeads:
    """Return both heads as `build_initial_heads` does, for any number of images; a partition is that of the sample."""
    rows, chosen = features.sample(settings.clusters, randomness)
    if float(rows.std(dim=0).max()) < 1e-6:
        log.warning("all features are the same: the backbone has collapsed")
    complete = len(chosen) == len(features)
    old = None if old_probs is None else old_probs[chosen.numpy()]
    refine = None if complete else partial(refine_over_all, features)
    clusters, hidden = settings.clusters, settings.hidden
    more = refine, prototypes, partition
    heads = build_initial_heads(init, old_heads, rows.to(device), old, clusters, hidden, randomness, *more)
    if not complete and heads.centers is not None:
        heads = dataclasses.replace(heads, partition=nearest_of_all(features, heads.centers))
    return heads
