"""Plan a run for ``--dry-run``: the inputs are looked at, nothing is computed and no result is written."""

from cdc_plugin.checkpoints.infer.resolve import adopt_native_size
from cdc_plugin.config.resolve import (
    ResolvedConfig,
    batch_sizes,
    choose_clusters,
    choose_init,
    resolve,
    steps_per_epoch,
)
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.images import survey_images
from cdc_plugin.training.prepare import check_request, collect_facts, open_network, refuse_few
from cdc_plugin.training.runtime import choose_device


def plan_run(request: RefineConfig) -> tuple[ResolvedConfig, list[str]]:
    """Return the settings that a run would use, and what it would do in words; reads a few of the images only."""
    check_request(request, resume=False)
    loaded = open_network(request, None)
    backbone, clusters = loaded.backbone, choose_clusters(request.clusters, loaded.head_clusters)
    choose_init(request.init, loaded.head_clusters, clusters)
    adopt_native_size(backbone, request.data, request.data_root)
    images = survey_images(request.data, backbone.input_size, labels=request.labels, root=request.data_root)
    refuse_few(images.count, images.source, clusters)
    settings = resolve(request, collect_facts(request, loaded, backbone, images.count))
    sizes = batch_sizes(images.count, settings.batch_size)
    steps = steps_per_epoch(images.count, settings.batch_size, settings.sub_batch_size)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    lines = [
        f"images: {images.count} from {images.source}"
        + (f", {len(images.skipped)} of {images.looked_at} looked at are unreadable" if images.skipped else "")
        + (", with labels for the report" if images.labels else ", no labels"),
        f"checkpoint: {loaded.origin.writer}, {loaded.origin.network}",
        f"backbone: {parameters:,} parameters, {backbone.feature_dim} features, input {backbone.input_size} px"
        + (f"; inferred: {', '.join(backbone.inferred)}" if backbone.inferred else ""),
        f"training: {settings.epochs} epochs of {len(sizes)} batches of about {sizes[0]} images, "
        f"{steps} steps per epoch, on {choose_device(request.device)}",
        f"results: {settings.out or 'a new folder below cdc-runs'}",
    ]
    return settings, lines
