"""Do what comes before training: open and check the inputs, extract features, initialise the heads."""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.infer.resolve import adopt_native_size, resolve_input
from cdc_plugin.checkpoints.load import load_checkpoint
from cdc_plugin.config.resolve import Facts, ResolvedConfig, choose_clusters, choose_init, resolve
from cdc_plugin.config.schema import INPUT_FACTS, RefineConfig
from cdc_plugin.core.losses import check_calibration
from cdc_plugin.core.random_streams import AUGMENTATION, INITIALISATION, generator
from cdc_plugin.core.selection import check_selection
from cdc_plugin.data.images import ImageSet, digest_image_list, open_images
from cdc_plugin.errors import CheckpointError, ConfigError, DataError, option
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.initialise import InitialHeads, build_initial_heads
from cdc_plugin.training.batches import choose_augmentation, training_views
from cdc_plugin.training.features import Features, head_probabilities, nearest_of_all, refine_over_all, shared_features
from cdc_plugin.training.progress import log
from cdc_plugin.training.runtime import Progress, Runtime, choose_device
from cdc_plugin.training.trackers import make_trackers

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


def check_request(request: RefineConfig, resume: bool) -> None:
    """Refuse a run that cannot begin, before anything is made or read."""
    required = [] if resume and request.out else ["backbone", "data"]
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
        loaded = open_network(request, module)
        clusters = choose_clusters(request.clusters, loaded.head_clusters)
        choose_init(request.init, loaded.head_clusters, clusters)  # refuses before images are read
        images = open_data(request, loaded.backbone, data, clusters, runtime)
        backbone = resolve_input(loaded.backbone, images)
        settings = resolve(request, collect_facts(request, loaded, backbone, len(images), distributed.size))
        training_views(settings.augment, backbone)  # refuses a wrong augmentation before any work is done
        check_processes(settings, distributed.size)
        return loaded, backbone, images, settings

    loaded, backbone, images, settings = distributed.raise_together(open_inputs)
    if distributed.size > 1:
        distributed.check_same_images(digest_image_list(images), len(images))
        log.info("%d processes train together", distributed.size)
    backbone.place(runtime.device, settings.compile, not settings.freeze_backbone)
    log.info("%s: %s", loaded.origin.writer, loaded.origin.network)
    features = extract(backbone, images, runtime)
    if not features.map(lambda block: block.isfinite().all(dim=1)).all():
        raise CheckpointError("the backbone gives features that are not finite: is this the right checkpoint?")
    old = head_probabilities(loaded.heads[-1].to(runtime.device), features) if loaded.heads else None
    return Prepared(request, settings, loaded, backbone, images, runtime, features, old)


def collect_facts(
    request: RefineConfig, loaded: Loaded, backbone: Backbone, image_count: int, processes: int = 1
) -> Facts:
    """Return what the settings of a run depend on."""
    mean, std = backbone.mean.tolist(), backbone.std.tolist()
    strength = check_calibration(request.calibration).strength
    return Facts(image_count, backbone.input_size, mean, std, loaded.head_clusters, strength, processes)


def open_network(request: RefineConfig, module: nn.Module | None) -> Loaded:
    """Return the network that was named or given, with the input convention that was stated."""
    if module is None:
        wanted = Wanted(request.arch, request.branch, request.head, request.clusters, request.partial_weights)
        loaded = load_checkpoint(request.backbone or "", request.format, wanted, request.trust_checkpoint)
        unclear = loaded.origin.why.get("head") if not loaded.heads else None
        if unclear and request.init == "keep":
            raise CheckpointError(f"{request.backbone} has {unclear}")
        if unclear:
            log.warning("%s; the run begins with prototypes", unclear)
        if loaded.matched < 1:
            log.warning("only %.1f %% of the backbone's weights are in the checkpoint", 100 * loaded.matched)
    elif isinstance(module, Backbone):
        # Training must not change what the caller still holds.
        loaded = Loaded(copy.deepcopy(module), Origin("the caller"))
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
    size, spec = stated.get("input_size", backbone.input_size), backbone.spec
    inferred = [name for name in backbone.inferred if name not in set(stated) - set(recipe)]
    backbone = Backbone(backbone.module, backbone.feature_dim, mean, std, size, spec, inferred=inferred)
    return dataclasses.replace(loaded, backbone=backbone)


def open_data(request: RefineConfig, backbone: Backbone, data: Any, clusters: int, runtime: Runtime) -> ImageSet:
    """Return the images, squared to the size the backbone takes; refuse fewer than there are to be clusters."""
    source = request.data if data is None else data
    adopt_native_size(backbone, source, request.data_root)
    images = read_images(source, backbone.input_size, request.data_root, runtime.progress, request.labels)
    refuse_few(len(images), images.source, clusters)
    return images


def read_images(source: Any, size: int, root: str | None, progress: Progress, labels: bool = False) -> ImageSet:
    """Return the images, squared to a size; log those that cannot be read."""
    images = open_images(source, size, labels=labels, root=root, progress=progress)
    for name, reason in images.skipped:
        log.warning("skipped %s: %s", name, reason)
    return images


def refuse_few(image_count: int, source: str, clusters: int) -> None:
    """Refuse fewer images than clusters."""
    if image_count < max(clusters, 4):
        raise DataError(
            f"{source} has {image_count} readable images, too few for {clusters} clusters; "
            "add images or ask for fewer clusters"
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
    source = {"keep": "the old model's heads", "random": "chance"}.get(settings.init, "prototypes")
    log.info("initialising %d clusters by %s, on the features of %d images", settings.clusters, source, len(features))
    randomness = generator(settings.seed, INITIALISATION)
    rows, chosen = features.sample(settings.clusters, randomness)
    if float(rows.std(dim=0).max()) < 1e-6:
        log.warning("the features of all images are the same: the backbone has collapsed")
    complete = len(chosen) == len(features)
    old = None if prepared.old is None else prepared.old[chosen.numpy()]
    refine = None if complete else partial(refine_over_all, features)
    heads = build_initial_heads(
        settings.init,
        prepared.loaded.heads,
        rows.to(device),
        old,
        settings.clusters,
        settings.hidden,
        randomness,
        refine,
    )
    if not complete and heads.centers is not None:
        heads = dataclasses.replace(heads, partition=nearest_of_all(features, heads.centers))
    randomness = generator(settings.seed, AUGMENTATION)
    augment, agreements = choose_augmentation(
        prepared.request.augment, prepared.backbone, heads.clustering, prepared.images, prepared.runtime, randomness
    )
    if agreements:
        shares = ", ".join(f"{name}: {share:.0%}" for name, share in agreements.items())
        chosen_words = f"flip {augment.flip}, crop_scale {augment.crop_scale:g}"
        log.info("augmentation chosen by agreement of clusters (%s): %s", shares, chosen_words)
    return heads, dataclasses.replace(settings, augment=augment)
