"""One run, from checkpoint and images to the result folder, as a straight line: read `run` first."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cdc_plugin.augmentation import choose_augmentation
from cdc_plugin.checkpoints.architectures import build
from cdc_plugin.checkpoints.formats import load_backbone
from cdc_plugin.checkpoints.probe import settle
from cdc_plugin.clusterer import Clusterer, load_model, view_settings
from cdc_plugin.config import RefineConfig, batch_sizes, load_config, resolve, split_sizes, to_yaml
from cdc_plugin.core.prototypes import prototype_head
from cdc_plugin.core.selection import selections
from cdc_plugin.data.images import ImageSet, native_size, open_images
from cdc_plugin.data.views import make_views
from cdc_plugin.engine import Refiner, Views
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation import (
    Report,
    extract_features,
    head_probabilities,
    kmeans_assignment,
    label_free,
    measure,
    predict,
    prediction_table,
    trusted_samples,
    write_table,
)
from cdc_plugin.model import Backbone, ClusterHead
from cdc_plugin.results import (
    CACHE,
    CONFIG,
    HISTORY,
    LOG,
    PREDICTIONS,
    REPORT,
    prepare_folder,
    read_state,
    write_state,
)
from cdc_plugin.runtime import choose_device, generator, write_atomically
from cdc_plugin.tracking import TrainingProgress, log, log_to, progress, write_history

# Purposes of random numbers: generator(seed, PURPOSE, ...) gives each its own stream. Training uses 2.
ORDER, INITIALISATION, VIEWS, AUGMENTATION, FINAL = 1, 3, 4, 5, 6


@dataclasses.dataclass
class Run:
    """What a run knows between its steps."""

    config: RefineConfig
    folder: Path
    device: torch.device
    images: ImageSet
    model: Clusterer
    before: dict[str, Any]
    history: list[dict[str, float]]
    state: dict[str, Any] | None = None


def refine(
    backbone: str | Path | nn.Module,
    data: Any,
    clusters: int | None = None,
    recipe: str | Path | None = None,
    out: str | Path | None = None,
    seed: int | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    **overrides: Any,
) -> Report:
    """Refine a pretrained backbone into calibrated clusters, without labels.

    Args:
        backbone: a checkpoint, a result folder, or a `cdc_plugin.Backbone` around a module of your own.
        data: a folder, .npz or .npy file, data set name, uint8 array, or map-style torch data set.
        clusters: how many; may come from the recipe instead.
        recipe: name of a shipped recipe or path of a YAML file.
        out: result folder; a new one below ``cdc-runs`` if left out.
        overrides: any other field of `RefineConfig`, such as ``epochs=30`` or ``augment={"flip": False}``.
    """
    given_module = backbone if isinstance(backbone, nn.Module) else None
    given_data = None if isinstance(data, (str, Path)) else data
    flags = {
        **overrides,
        "backbone": f"<{type(backbone).__name__}>" if given_module is not None else backbone,
        "data": f"<{type(data).__name__}>" if given_data is not None else data,
        "clusters": clusters,
        "out": out,
        "seed": seed,
    }
    config = load_config(recipe, flags)
    return run(config, module=given_module, data=given_data, resume=resume, overwrite=overwrite)


def run(
    config: RefineConfig,
    *,
    module: nn.Module | None = None,
    data: Any = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Report:
    """The whole stage: read, initialise, train, predict, report."""
    began = time.monotonic()
    _check_request(config, resume)
    folder = prepare_folder(config.out, _run_name(config), resume, overwrite)
    state = read_state(folder) if resume else None
    if state is None:
        _check_request(config, resume=False)
    with log_to(folder / LOG):
        current = start(config, folder, module, data) if state is None else restart(config, folder, state, module, data)
        train(current)
        return finish(current, time.monotonic() - began)


def start(config: RefineConfig, folder: Path, module: nn.Module | None, data: Any) -> Run:
    """Backbone and images in, both heads initialised from feature prototypes (Sec. 3.3)."""
    device = choose_device(config.device)
    backbone = _open_backbone(config, module)
    images = _open_data(config, backbone, folder, data)
    if "mean" in backbone.assumed or any(name.startswith("stem") for name in backbone.assumed):
        settlement = settle(backbone, images.batch(_spread(len(images), 2048)))
        log.info("%s", settlement.reason)
        backbone = settlement.backbone
    config = resolve(config, len(images), backbone.input_size)
    assert config.clusters is not None
    backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    log.info("initialising %d clusters from the features of %d images", config.clusters, len(images))
    features = extract_features(backbone, images, device, config.precision, progress)
    if not torch.isfinite(features).all():
        raise UserError("the backbone gives features that are not finite: is this the right checkpoint?")
    if float(features.std(dim=0).max()) < 1e-6:
        log.warning("the features of all images are the same: the backbone has collapsed")
    weights = prototype_head(
        features.to(device), config.clusters, config.hidden, generator(config.seed, INITIALISATION)
    )
    heads = [ClusterHead(backbone.feature_dim, config.hidden, config.clusters) for _ in range(2)]
    for head in heads:
        head.initialize(weights)
        head.to(device)
    chosen, agreements = choose_augmentation(
        config.augment, backbone, heads[0], images, device, generator(config.seed, AUGMENTATION)
    )
    if agreements:
        log.info(
            "augmentation chosen by agreement of clusters (%s): flip %s, crop_scale %g",
            ", ".join(f"{name}: {share:.0%}" for name, share in agreements.items()),
            chosen.flip,
            chosen.crop_scale,
        )
    # What the user gave is kept to the digit, so that the same command can resume the run.
    mean, std = config.mean or backbone.mean.tolist(), config.std or backbone.std.tolist()
    config = dataclasses.replace(config, augment=chosen, mean=mean, std=std)
    write_atomically(folder / CONFIG, lambda path: path.write_text(to_yaml(config), encoding="utf-8"))
    initial = head_probabilities(heads[0], features)
    before = measure(initial, initial, weights.partition.cpu().numpy(), images.labels)
    return Run(config, folder, device, images, Clusterer(backbone, *heads), before, [])


def restart(config: RefineConfig, folder: Path, state: dict[str, Any], module: nn.Module | None, data: Any) -> Run:
    """The same run as after its last finished epoch; the checkpoint it began with is not needed any more."""
    stored = load_config(folder / CONFIG)
    given, config = config, dataclasses.replace(stored, device=config.device)
    record = state["backbone"]
    if record["spec"] is not None:
        network, _ = build(record["spec"])
    elif isinstance(module, Backbone):
        network = module.module
    else:
        raise UserError(f"{folder} was begun with a module of your own; pass it again to go on")
    backbone = Backbone(network, **record)
    device = choose_device(config.device)
    backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = _open_data(config, backbone, folder, data)
    _refuse_other_settings(given, stored, len(images), folder)
    if images.digest != state["digest"]:
        raise UserError(f"the images of {config.data} are not those that {folder} was begun with")
    assert config.clusters is not None
    heads = [ClusterHead(backbone.feature_dim, config.hidden, config.clusters) for _ in range(2)]
    log.info("going on after epoch %d", state["refiner"]["epoch"])
    model = Clusterer(backbone, *heads)
    if config.freeze_backbone:
        backbone.module.load_state_dict(state["frozen"])
    return Run(config, folder, device, images, model, state["before"], state["history"], state)


def train(current: Run) -> None:
    """Algorithm 1; after every epoch the state is on disk before the next begins."""
    config, model = current.config, current.model
    sizes = batch_sizes(len(current.images), config.batch_size or 1)
    steps = sum(split_sizes(size, config.sub_batch_size or 1) for size in sizes)
    epochs = config.epochs or 0
    frozen = config.freeze_backbone
    trained = nn.Identity() if frozen else model.backbone
    refiner = Refiner(trained, model.clustering_head, model.calibration_head, config, current.device, steps * epochs)
    if current.state is not None:
        refiner.restore(current.state["refiner"])
    views_of = _cached_views(current) if frozen and refiner.epoch < epochs else _fresh_views(current)

    def batches(epoch: int) -> Iterator[Views]:
        order = torch.randperm(len(current.images), generator=generator(config.seed, ORDER, epoch))
        for number, chosen in enumerate(order.split(sizes)):
            yield views_of(chosen, generator(config.seed, VIEWS, epoch, number))

    def save() -> None:
        backbone = model.backbone
        write_state(
            current.folder,
            {
                "version": 1,
                "refiner": refiner.state(),
                "frozen": backbone.module.state_dict() if frozen else None,
                "backbone": {
                    "feature_dim": backbone.feature_dim,
                    "mean": backbone.mean.tolist(),
                    "std": backbone.std.tolist(),
                    "input_size": backbone.input_size,
                    "spec": backbone.spec,
                },
                "before": current.before,
                "history": current.history,
                "digest": current.images.digest,
            },
        )
        write_history(current.folder / HISTORY, current.history)

    bar = TrainingProgress(refiner.epoch, epochs, len(sizes))

    def after_epoch(stats: dict[str, float]) -> None:
        current.history.append(bar.after_epoch(stats))
        save()

    if current.state is None:
        save()
    try:
        refiner.fit(batches, bar.after_batch, after_epoch)
    finally:
        bar.close()


def finish(current: Run, seconds: float) -> Report:
    """Predict with the calibration head, compare with where the run began, write everything."""
    config, images = current.config, current.images
    assert config.clusters is not None
    clustering, calibration, features = predict(current.model, images, current.device, config.precision, progress)
    again = kmeans_assignment(features.to(current.device), config.clusters, generator(config.seed, FINAL))
    trusted = trusted_samples(calibration)
    metrics = {
        "images": len(images),
        "clusters": config.clusters,
        "epochs": config.epochs,
        "seed": config.seed,
        "data": images.source,
        "labels": images.labels is not None,
        "units": "fractions of 1; ECE has 15 equal-width bins",
        "before": current.before,
        "after": measure(clustering, calibration, again, images.labels),
        "label_free": label_free(clustering, calibration, trusted),
        "skipped": [{"image": name, "reason": reason} for name, reason in images.skipped],
        "seconds": round(seconds, 1),
    }
    folder = current.folder
    provenance = {
        "tool": "cdc_plugin",
        "backbone": config.backbone,
        "data": images.source,
        "data_digest": images.digest,
        "epochs": config.epochs,
        "seed": config.seed,
    }
    current.model.save(folder, provenance)
    table = prediction_table(images.names, clustering, calibration, trusted)
    write_table(folder / PREDICTIONS, table)
    text = json.dumps(metrics, indent=2) + "\n"
    write_atomically(folder / REPORT, lambda path: path.write_text(text, encoding="utf-8"))
    log.info("finished in %.0f s: %s", seconds, folder)
    return Report(metrics, table, folder)


def _fresh_views(current: Run) -> Callable[[Tensor, torch.Generator], Views]:
    augment = current.config.augment
    settings = view_settings(
        current.model.backbone,
        flip=augment.flip,
        crop_scale=augment.crop_scale,
        operations=augment.operations,
        cutout=augment.cutout,
        excluded=tuple(augment.exclude),
    )

    def make(chosen: Tensor, randomness: torch.Generator) -> Views:
        pixels = current.images.batch(chosen)
        if current.device.type == "cuda":
            pixels = pixels.pin_memory()
        pixels = pixels.to(current.device, non_blocking=True)
        return Views(*make_views(pixels, settings, randomness))

    return make


@torch.no_grad()
def _cached_views(current: Run) -> Callable[[Tensor, torch.Generator], Views]:
    """Features of a fixed number of weak and strong views, computed once by the frozen backbone."""
    count, device = current.config.frozen_views, current.device
    backbone, make = current.model.backbone, _fresh_views(current)
    backbone.eval()
    plain: list[Tensor] = []
    weak: list[list[Tensor]] = [[] for _ in range(count)]
    strong: list[list[Tensor]] = [[] for _ in range(count)]
    parts = torch.arange(len(current.images)).split(256)
    for number, part in enumerate(progress(parts, len(parts), "features of views")):
        for view in range(count):
            views = make(part, generator(current.config.seed, VIEWS, -1 - view, number))
            if view == 0:
                plain.append(backbone(views.plain))
            weak[view].append(backbone(views.weak))
            strong[view].append(backbone(views.strong))
    all_plain = torch.cat(plain)
    all_weak = torch.stack([torch.cat(rows) for rows in weak])  # (views, N, D)
    all_strong = torch.stack([torch.cat(rows) for rows in strong])

    def pick(chosen: Tensor, randomness: torch.Generator) -> Views:
        which = torch.randint(count, (2, len(chosen)), generator=randomness).to(device)
        rows = chosen.to(device)
        return Views(all_plain[rows], all_weak[which[0], rows], all_strong[which[1], rows])

    return pick


def _open_backbone(config: RefineConfig, module: nn.Module | None) -> Backbone:
    if module is None:
        assert config.backbone is not None
        backbone = load_backbone(config.backbone, config.format, config.arch)
    elif isinstance(module, Backbone):
        backbone = module
    else:
        raise UserError(
            "a module of your own must say what it takes: wrap it as "
            "cdc_plugin.Backbone(module, feature_dim, mean, std, input_size)"
        )
    stated = {name for name in ("mean", "std", "input_size") if getattr(config, name) is not None}
    return Backbone(
        backbone.module,
        backbone.feature_dim,
        config.mean or backbone.mean.tolist(),
        config.std or backbone.std.tolist(),
        config.input_size or backbone.input_size,
        backbone.spec,
        assumed=[name for name in backbone.assumed if name not in stated],
    )


def _open_data(config: RefineConfig, backbone: Backbone, folder: Path | None, data: Any) -> ImageSet:
    source = config.data if data is None else data
    if "input_size" in backbone.assumed:
        size = native_size(source)
        if size is not None and size <= 96:
            backbone.input_size = size
    images = open_images(
        source,
        backbone.input_size,
        labels=config.labels,
        root=config.data_root,
        cache=None if folder is None else folder / CACHE,
        progress=progress,
    )
    for name, reason in images.skipped:
        log.warning("skipped %s: %s", name, reason)
    assert config.clusters is not None
    if len(images) < max(config.clusters, 4):
        raise UserError(
            f"{images.source} has {len(images)} readable images, too few for {config.clusters} clusters; "
            "add images or take fewer --clusters"
        )
    return images


def _check_request(config: RefineConfig, resume: bool) -> None:
    wanted = [] if resume and config.out else ["backbone", "data", "clusters"]
    missing = [name for name in wanted if getattr(config, name) is None]
    if missing:
        raise UserError(f"missing --{', --'.join(missing)}; cdc-refine --help shows how a run is started")
    selections.get(config.selection)
    choose_device(config.device)


def _refuse_other_settings(given: RefineConfig, stored: RefineConfig, images: int, folder: Path) -> None:
    """Going on with other settings would give a run that no command describes."""
    default = RefineConfig()
    names = [item.name for item in dataclasses.fields(RefineConfig) if item.name not in ("out", "device", "augment")]
    asked = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(default, name)}
    # Sizes beyond the data were cut when the run began; the same command must be taken again.
    size = asked.get("input_size") or stored.input_size or 0
    wanted = resolve(dataclasses.replace(stored, **asked), images, size)
    for name in asked:
        if getattr(wanted, name) != getattr(stored, name):
            raise UserError(
                f"{folder} was begun with {name}={getattr(stored, name)}, now {name}={asked[name]} is asked for; "
                "resume without it, or start another run with its own --out"
            )


def _run_name(config: RefineConfig) -> str:
    name = Path(config.data or "run").stem if config.data and "<" not in config.data else "run"
    return name


def _spread(count: int, wanted: int) -> Tensor:
    """Up to ``wanted`` indices, evenly spread over all images."""
    return torch.linspace(0, count - 1, min(count, wanted)).long()


def plan(config: RefineConfig) -> tuple[RefineConfig, list[str]]:
    """What `run` would do, as resolved settings and words; reads the inputs and writes nothing."""
    _check_request(config, resume=False)
    backbone = _open_backbone(config, None)
    images = _open_data(config, backbone, None, None)
    resolved = resolve(config, len(images), backbone.input_size)
    sizes = batch_sizes(len(images), resolved.batch_size or 1)
    steps = sum(split_sizes(size, resolved.sub_batch_size or 1) for size in sizes)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    lines = [
        f"images: {len(images)} from {images.source}"
        + (f", {len(images.skipped)} unreadable" if images.skipped else "")
        + (", with labels for the report" if images.labels is not None else ", no labels"),
        f"backbone: {parameters:,} parameters, {backbone.feature_dim} features, input {backbone.input_size} px"
        + (f"; assumed: {', '.join(backbone.assumed)}" if backbone.assumed else ""),
        f"training: {resolved.epochs} epochs of {len(sizes)} batches of about {sizes[0]} images, "
        f"{steps} steps an epoch, on {choose_device(config.device)}",
        f"results: {resolved.out or 'a new folder below cdc-runs'}",
    ]
    return resolved, lines


def predict_file(
    model: str | Path, data: Any, out: Path, device: str = "auto"
) -> tuple[np.recarray, list[tuple[str, str]]]:
    """Write a CSV of predictions for new images; returns its rows and the images that could not be read."""
    clusterer = load_model(model)
    where = choose_device(device)
    clusterer.to(where, memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = open_images(data, clusterer.backbone.input_size, labels=False, progress=progress)
    clustering, calibration, _ = predict(clusterer, images, where, "float32", progress)
    table = prediction_table(images.names, clustering, calibration)
    write_table(out, table)
    return table, images.skipped
