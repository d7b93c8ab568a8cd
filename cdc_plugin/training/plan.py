"""Plan a run for ``--dry-run``: the inputs are looked at, its cost is tried out, and no result is written."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable

import torch

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
from cdc_plugin.core.random_streams import generator
from cdc_plugin.data.images import survey_images
from cdc_plugin.data.views import channels_last
from cdc_plugin.errors import option
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.heads import ClusterHead
from cdc_plugin.training.features import SAMPLE, images_per_pass
from cdc_plugin.training.prepare import (
    check_request,
    check_source,
    collect_facts,
    find_source,
    least_clusters,
    open_network,
    refuse_few,
    restrict_training,
)
from cdc_plugin.training.refiner import NotFiniteError, Refiner
from cdc_plugin.training.runtime import Runtime, choose_device
from cdc_plugin.training.steps import Views

DEAR = 1800  # seconds of passes from which fine-tuning should not be the first thing to try
SEARCHED = "clusters: looked for between {} and {} once the features are known; the rest is for the fewest"
REPORT = 0.3  # GB that the end of a run takes


def plan_run(request: RefineConfig) -> tuple[ResolvedConfig, list[str]]:
    """Return the settings that a run would use, and what it would do in words; reads a few of the images only."""
    check_request(request, resume=False)
    source = find_source(request, None)
    loaded = open_network(request, None, source)
    backbone, clusters = loaded.backbone, choose_clusters(least_clusters(request), loaded.head_clusters)
    choose_init(request.init, loaded.head_clusters, clusters)
    check_source(backbone, source)
    adopt_native_size(backbone, source, request.data_root)
    images = survey_images(source, backbone.input_size, labels=request.labels, root=request.data_root)
    refuse_few(images, clusters)
    asked = dataclasses.replace(request, clusters=clusters)
    settings = resolve(asked, collect_facts(request, loaded, backbone, images.count))
    restrict_training(backbone, settings)
    sizes = batch_sizes(images.count, settings.batch_size)
    steps = steps_per_epoch(images.count, settings.batch_size, settings.sub_batch_size)
    epochs = f"{settings.epochs} epochs"
    if settings.rounds > 1:
        epochs = f"at most {epochs} in {settings.rounds} rounds, each"
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    lines = [
        f"{images.noun}s: {images.count} from {images.source}"
        + (f", {len(images.skipped)} of {images.looked_at} looked at are unreadable" if images.skipped else "")
        + (", with labels for the report" if images.labels else ", no labels"),
        *([images.left_aside] if images.left_aside else []),
        f"checkpoint: {loaded.origin.writer}, {loaded.origin.network}",
        f"backbone: {parameters:,} parameters, {backbone.feature_dim} features"
        + ("" if backbone.takes_features else f", input {backbone.input_size} px")
        + (f"; inferred: {', '.join(backbone.inferred)}" if backbone.inferred else ""),
        *(
            [SEARCHED.format(*request.clusters_between)]
            if request.clusters is None and request.clusters_between
            else []
        ),
        f"training: {epochs} of {len(sizes)} batches of about {sizes[0]} {images.noun}s, "
        f"{steps} steps per epoch, on {choose_device(request.device)}",
        *estimate_cost(settings, backbone, images.count),
        f"results: {settings.out or 'a new folder below cdc-runs'}",
    ]
    return settings, lines


def estimate_cost(settings: ResolvedConfig, backbone: Backbone, image_count: int) -> list[str]:
    """Return in words what time and memory a run takes here, by a pass of the network and a batch of the heads."""
    device, size = choose_device(settings.device), settings.input_size
    runtime = Runtime(device, settings.precision)
    passes, seconds, frozen = 0.0, 0.0, 1.1 + 2 * settings.frozen_views
    if not backbone.takes_features:
        pixels = torch.rand(images_per_pass(size, device), 3, size, size, device=device)
        backbone.place(device, compiled=False, trained=False)
        per_image = _time(lambda: _pass(backbone.eval(), pixels, runtime)) / len(pixels)
        # A step on three of four images costs three times their pass, less where the first blocks stay as they are;
        # start, reviews and end see all of them once.
        weights = [(each.numel(), each.requires_grad) for each in backbone.parameters()]
        share = sum(size for size, moves in weights if moves) / max(1, sum(size for size, _ in weights))
        trained = settings.epochs * (1 + (1 + 2 * share + settings.recompute_blocks) * 0.75) + settings.rounds + 1
        passes = frozen if settings.freeze_backbone else trained
        seconds = passes * image_count * per_image
    rows = torch.randn(settings.batch_size, backbone.feature_dim, device=device)
    first, second = (ClusterHead(backbone.feature_dim, settings.hidden, settings.clusters) for _ in range(2))
    refiner = Refiner(torch.nn.Identity(), first, second, settings, runtime, len(rows))
    views, randomness = Views(rows, rows, rows, torch.arange(len(rows))), generator(settings.seed)
    batches = settings.epochs * len(batch_sizes(image_count, settings.batch_size))

    def learn() -> None:
        with contextlib.suppress(NotFiniteError):  # on random rows; training itself rolls back, and says so
            refiner.train_batch(views, randomness)

    learning = batches * _time(learn) if batches else 0.0
    network = f"{seconds / 60:.1f} min for {passes:.1f} passes of all images and " if passes else ""
    lines = [f"time: about {network}{learning / 60:.1f} min for the heads; reading and decoding are not counted"]
    if not settings.freeze_backbone and seconds > DEAR and passes > 4 * frozen:
        minutes = frozen * seconds / passes / 60
        lines.append(
            f"advice: try {option('freeze_backbone')} first, about {minutes:.0f} min, then train_blocks=2; to train "
            "all of so large a network is worth its time only where their clusters are wrong"
        )
    if settings.freeze_backbone and sys.platform == "linux":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        # What k-means holds of its sample, probabilities, tables and names, and the report; all else lies on disk.
        sample = 16 * min(image_count, SAMPLE) * (backbone.feature_dim + settings.hidden)
        grown = (sample + image_count * (12 * settings.clusters + 500)) / 1024**3 + REPORT
        lines.append(f"memory: about {peak + grown:.1f} GB")
    return lines


def _pass(backbone: Backbone, pixels: torch.Tensor, runtime: Runtime) -> None:
    with torch.no_grad(), runtime.autocast():
        backbone(channels_last(pixels)).sum().item()


def _time(work: Callable[[], object]) -> float:
    """Return the seconds that work takes once it is warm."""
    work()
    began = time.monotonic()
    work()
    return time.monotonic() - began
