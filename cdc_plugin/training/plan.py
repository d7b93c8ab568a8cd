"""What a run would do, for ``--dry-run``: the inputs are looked at, nothing is computed and no result is written."""

from __future__ import annotations

import dataclasses

from cdc_plugin.checkpoints.infer.resolve import adopt_native_size
from cdc_plugin.config.schema import RefineConfig, batch_sizes, resolve, steps_per_epoch
from cdc_plugin.data.images import survey_images
from cdc_plugin.models.initialise import choose_clusters, choose_init
from cdc_plugin.training.device import choose_device
from cdc_plugin.training.inputs import check_request, open_network, refuse_few


def plan(config: RefineConfig) -> tuple[RefineConfig, list[str]]:
    """What `run` would do, as resolved settings and words; of the images it reads a few only."""
    check_request(config, resume=False)
    loaded = open_network(config, None)
    config = dataclasses.replace(config, clusters=choose_clusters(config.clusters, loaded.heads))
    backbone = loaded.backbone
    assert config.clusters is not None
    init = choose_init(config.init, loaded.heads, config.clusters)
    adopt_native_size(backbone, config.data, config.data_root)
    images = survey_images(config.data, backbone.input_size, labels=config.labels, root=config.data_root)
    refuse_few(images.count, images.source, config.clusters)
    resolved = resolve(config, images.count, backbone.input_size)
    resolved = dataclasses.replace(resolved, init=init)
    sizes = batch_sizes(images.count, resolved.batch_size or 1)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    lines = [
        f"images: {images.count} from {images.source}"
        + (f", {len(images.skipped)} of {images.looked_at} looked at are unreadable" if images.skipped else "")
        + (", with labels for the report" if images.labels else ", no labels"),
        f"checkpoint: {loaded.origin.writer}, {loaded.origin.network}",
        f"backbone: {parameters:,} parameters, {backbone.feature_dim} features, input {backbone.input_size} px"
        + (f"; inferred: {', '.join(backbone.inferred)}" if backbone.inferred else ""),
        f"training: {resolved.epochs} epochs of {len(sizes)} batches of about {sizes[0]} images, "
        f"{steps_per_epoch(images.count, resolved)} steps an epoch, on {choose_device(config.device)}",
        f"results: {resolved.out or 'a new folder below cdc-runs'}",
    ]
    return resolved, lines
