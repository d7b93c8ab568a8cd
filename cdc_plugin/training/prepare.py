"""What comes before training: inputs opened and checked, features, initial heads, an augmentation that suits them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cdc_plugin.checkpoints.infer.resolve import resolve_input
from cdc_plugin.checkpoints.load import Loaded
from cdc_plugin.config.schema import AugmentConfig, RefineConfig, resolve
from cdc_plugin.core.losses import calibrations
from cdc_plugin.core.random_streams import AUGMENTATION, INITIALISATION, generator
from cdc_plugin.data.images import ImageSet, Progress
from cdc_plugin.data.row_file import RowFile
from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.initialise import InitialHeads, build_initial_heads, choose_clusters, choose_init
from cdc_plugin.training.batches import training_views, view_features
from cdc_plugin.training.choose_augmentation import choose_augmentation
from cdc_plugin.training.device import choose_device
from cdc_plugin.training.distributed import SINGLE, Distributed
from cdc_plugin.training.features import (
    Features,
    features_key,
    find_rows,
    head_probabilities,
    keep_rows,
    nearest_of_all,
    refine_over_all,
    shared_features,
)
from cdc_plugin.training.inputs import open_data, open_network
from cdc_plugin.training.progress import log, progress

Extract = Callable[[Backbone, ImageSet, torch.device, str, Progress | None, Distributed], Features]


@dataclass(frozen=True)
class Material:
    """Checked inputs: the backbone is on the device, every number of ``config`` that needs the data is there.

    Args:
        features: (N, D) of the plain views.
        old: (N, C') probabilities of the old model's head, where the checkpoint has one.
    """

    config: RefineConfig
    loaded: Loaded
    backbone: Backbone
    images: ImageSet
    device: torch.device
    features: Features
    old: NDArray[np.float32] | None


def gather(
    config: RefineConfig,
    module: nn.Module | None,
    data: Any,
    extract: Extract = shared_features,
    distributed: Distributed = SINGLE,
) -> Material:
    """Open the checkpoint and the images, and take the features; mistakes are refused before that."""
    device = choose_device(config.device)
    config, loaded, backbone, images = distributed.raise_together(lambda: _opened(config, module, data, distributed))
    if distributed.size > 1:
        same = ", bit for bit as one with sync_batchnorm=true" if distributed.exact else ""
        log.info("%d processes train together%s", distributed.size, same)
    backbone.place(device, config.compile, not config.freeze_backbone)
    log.info("%s: %s", loaded.origin.writer, loaded.origin.network)
    features = extract(backbone, images, device, config.precision, progress, distributed)
    if not features.map(lambda block: block.isfinite().all(dim=1)).all():
        raise UserError("the backbone gives features that are not finite: is this the right checkpoint?")
    old = head_probabilities(loaded.heads[-1].to(device), features) if loaded.heads else None
    return Material(config, loaded, backbone, images, device, features, old)


def _opened(
    config: RefineConfig, module: nn.Module | None, data: Any, distributed: Distributed
) -> tuple[RefineConfig, Loaded, Backbone, ImageSet]:
    loaded = open_network(config, module)
    config = dataclasses.replace(config, clusters=choose_clusters(config.clusters, loaded.heads))
    backbone = loaded.backbone
    assert config.clusters is not None
    init = choose_init(config.init, loaded.heads, config.clusters)
    images = open_data(config, backbone, data)
    backbone = resolve_input(backbone, images)
    config = dataclasses.replace(with_numbers(config, images, backbone), init=init)
    training_views(config, backbone)  # refuses a wrong augmentation before any work is done
    check_shares(config, distributed)
    return config, loaded, backbone, images


def check_shares(config: RefineConfig, distributed: Distributed) -> None:
    """Refuse more processes than a sub-batch can be plan_shards_of to."""
    assert config.sub_batch_size is not None
    if not config.freeze_backbone and config.sub_batch_size < 2 * distributed.size:
        raise UserError(
            f"sub_batch_size={config.sub_batch_size} gives {distributed.size} processes less than two images each; "
            f"take fewer processes, or sub_batch_size={4 * distributed.size} and a batch_size to match"
        )


def with_numbers(config: RefineConfig, images: ImageSet, backbone: Backbone) -> RefineConfig:
    """The config with a number in place of every None that can be told now."""
    config = resolve(config, len(images), backbone.input_size)
    if config.calibration_strength is None:
        config = dataclasses.replace(config, calibration_strength=calibrations.get(config.calibration).strength)
    return config


def initialise(material: Material) -> tuple[InitialHeads, AugmentConfig]:
    """Both heads, from feature prototypes (Sec. 3.3), an old model's head or chance; and the augmentation."""
    config, device = material.config, material.device
    assert config.init is not None
    assert config.clusters is not None
    source = {"keep": "the old model's heads", "random": "chance"}.get(config.init, "prototypes")
    count, features = len(material.features), material.features
    log.info("initialising %d clusters by %s, on the features of %d images", config.clusters, source, count)
    randomness = generator(config.seed, INITIALISATION)
    rows, chosen = features.sample(config.clusters, randomness)
    if float(rows.std(dim=0).max()) < 1e-6:
        log.warning("the features of all images are the same: the backbone has collapsed")
    whole, old = len(chosen) == count, None if material.old is None else material.old[chosen.numpy()]
    refine = None if whole else refine_over_all(features)
    heads = build_initial_heads(
        config.init, material.loaded.heads, rows.to(device), old, config.clusters, config.hidden, randomness, refine
    )
    if not whole:
        assert heads.centers is not None
        heads = dataclasses.replace(heads, partition=nearest_of_all(features, heads.centers))
    randomness = generator(config.seed, AUGMENTATION)
    augment, agreements = choose_augmentation(
        config.augment, material.backbone, heads.clustering, material.images, device, randomness
    )
    if agreements:
        log.info(
            "augmentation chosen by agreement of clusters (%s): flip %s, crop_scale %g",
            ", ".join(f"{name}: {share:.0%}" for name, share in agreements.items()),
            augment.flip,
            augment.crop_scale,
        )
    return heads, augment


def frozen_views(
    config: RefineConfig, backbone: Backbone, images: ImageSet, device: torch.device, distributed: Distributed
) -> Tensor | RowFile:
    """Features of the views of a frozen backbone; all processes compute them, the main one keeps and has them."""
    shape = (len(images), 1 + 2 * config.frozen_views, backbone.feature_dim)
    arithmetic = f"in pieces of {config.sub_batch_size}" if distributed.exact else ""
    key = features_key(backbone, images, device, config.precision, f"{config.augment} {config.seed} {arithmetic}")
    found = find_rows(key, shape) if distributed.main else None
    if distributed.broadcast_from_main(lambda: found is not None):
        return torch.empty(0, *shape[1:]) if found is None else found
    rows = view_features(config, backbone, images, device, distributed)
    if distributed.main:
        return keep_rows(key, shape, rows)
    for _ in rows:
        pass
    return torch.empty(0, *shape[1:])
