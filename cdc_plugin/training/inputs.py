"""The two inputs of a run, checked before anything is computed: the backbone and the images."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.solo_learn.args import read_run_defaults
from cdc_plugin.checkpoints.infer.resolve import adopt_native_size
from cdc_plugin.checkpoints.load import load_checkpoint
from cdc_plugin.config.load import load_config
from cdc_plugin.config.schema import INPUT_FACTS, RefineConfig
from cdc_plugin.core.losses import check_calibration
from cdc_plugin.core.selection import check_selection
from cdc_plugin.data.images import ImageSet, open_images
from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training.device import choose_device
from cdc_plugin.training.progress import log, progress
from cdc_plugin.training.trackers import make_trackers


def configure(
    recipe: str | Path | None = None, flags: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> RefineConfig:
    """Load the settings of a run; what the pretraining run says of its data stands beneath what the user says."""
    return load_config(
        recipe, flags, overrides, lambda config: read_run_defaults(config.backbone) if config.backbone else {}
    )


def open_network(config: RefineConfig, module: nn.Module | None) -> Loaded:
    """The network that the config names or the caller gave, with the input convention that the config states."""
    if module is None:
        assert config.backbone is not None
        wanted = Wanted(config.arch, config.branch, config.head, config.clusters, config.partial_weights)
        loaded = load_checkpoint(config.backbone, config.format, wanted, config.trust_checkpoint)
        unclear = loaded.origin.why.get("head") if not loaded.heads else None
        if unclear and config.init == "keep":
            raise UserError(f"{config.backbone} has {unclear}")
        if unclear:
            log.warning("%s; the run begins with prototypes", unclear)
        if loaded.matched < 1:
            log.warning("only %.1f %% of the backbone's weights are in the checkpoint", 100 * loaded.matched)
    elif isinstance(module, Backbone):
        # Training must not change what the caller still holds.
        loaded = Loaded(copy.deepcopy(module), Origin("the caller"))
    else:
        raise UserError(
            "a module of your own must say what it takes: wrap it as "
            "cdc_plugin.Backbone(module, feature_dim, mean, std, input_size)"
        )
    given = {name: getattr(config, name) for name in INPUT_FACTS if getattr(config, name) is not None}
    given = {name: value for name, value in given.items() if not _yields(name, config, loaded.backbone)}
    stated = set(given) - set(config.from_recipe)
    backbone = loaded.backbone
    backbone = Backbone(
        backbone.module,
        backbone.feature_dim,
        given.get("mean", backbone.mean.tolist()),
        given.get("std", backbone.std.tolist()),
        given.get("input_size", backbone.input_size),
        backbone.spec,
        inferred=[name for name in backbone.inferred if name not in stated],
    )
    return dataclasses.replace(loaded, backbone=backbone)


def _yields(name: str, config: RefineConfig, backbone: Backbone) -> bool:
    """Whether a recipe's word on the input gives way to the checkpoint's own."""
    return name in config.from_recipe and name not in backbone.inferred


def open_data(config: RefineConfig, backbone: Backbone, data: Any) -> ImageSet:
    """The images, squared to the size the backbone takes; unreadable ones are logged."""
    source = config.data if data is None else data
    adopt_native_size(backbone, source, config.data_root)
    images = open_images(
        source,
        backbone.input_size,
        labels=config.labels,
        root=config.data_root,
        progress=progress,
    )
    for name, reason in images.skipped:
        log.warning("skipped %s: %s", name, reason)
    assert config.clusters is not None
    refuse_few(len(images), images.source, config.clusters)
    return images


def refuse_few(images: int, source: str, clusters: int) -> None:
    if images < max(clusters, 4):
        raise UserError(
            f"{source} has {images} readable images, too few for {clusters} clusters; "
            "add images or take fewer --clusters"
        )


def check_request(config: RefineConfig, resume: bool) -> None:
    """Refuse a run that cannot begin, before anything is made or read."""
    wanted = [] if resume and config.out else ["backbone", "data"]
    missing = [name for name in wanted if getattr(config, name) is None]
    if missing:
        raise UserError(f"missing --{', --'.join(missing)}; cdc-refine --help shows how a run is started")
    check_selection(config.selection)
    check_calibration(config.calibration, config.calibration_strength)
    choose_device(config.device)
    make_trackers(config.track)
