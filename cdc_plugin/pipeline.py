"""One run, from checkpoint and images to the result folder, as a straight line: read `run` first."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cdc_plugin.batches import FINAL, QUALITY, batches_of, cached_views, fresh_views, training_views, view_features
from cdc_plugin.checkpoints.architectures import build
from cdc_plugin.checkpoints.formats import Loaded
from cdc_plugin.clusterer import Clusterer
from cdc_plugin.config import RefineConfig, batch_sizes, load_config, resolve, steps_an_epoch, to_yaml
from cdc_plugin.core.outliers import fit_prototypes
from cdc_plugin.data.images import ImageSet
from cdc_plugin.engine import Refiner
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation import (
    Report,
    head_probabilities,
    kmeans_assignment,
    measure,
    measure_head,
    predict,
    trusted_samples,
)
from cdc_plugin.heads import build_head
from cdc_plugin.inputs import check_request, configure, open_data
from cdc_plugin.model import Backbone
from cdc_plugin.preparation import gather, initialise
from cdc_plugin.quality import WATCHED_EPOCHS, Evidence, assess, see_anew, watch
from cdc_plugin.report.of_run import findings_of_run
from cdc_plugin.report.page import write_page
from cdc_plugin.results import (
    CACHE,
    CONFIG,
    HISTORY,
    LOG,
    PAGE,
    PREDICTIONS,
    REPORT,
    clear_results,
    leave_nothing_behind,
    prepare_folder,
    read_state,
    write_state,
)
from cdc_plugin.runtime import choose_device, generator, write_atomically
from cdc_plugin.tables import outlier_columns, prediction_table, write_table
from cdc_plugin.trackers import Tracking, make_trackers, open_all
from cdc_plugin.tracking import TrainingProgress, log, log_to, progress, write_history


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
    start: torch.Tensor | None = None  # (N,) k-means on the features that the run began with
    old: dict[str, Any] | None = None  # the model that is retrofitted: its figures, and (N,) its assignment
    last_epochs: list[torch.Tensor] = dataclasses.field(default_factory=list)  # clusters of some images, see `watch`
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
    config = configure(recipe, flags)
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
    check_request(config, resume)
    folder = prepare_folder(config.out, _run_name(config), resume, overwrite)
    try:
        state = read_state(folder) if resume else None
        if state is None:
            check_request(config, resume=False)
        with log_to(folder / LOG):
            if state is None:
                current = start(config, folder, module, data)
            else:
                current = restart(config, folder, state, module, data)
            with open_all(current.config.track, folder, current.config, current.history) as track:
                train(current, track)
                return finish(current, time.monotonic() - began, track)
    finally:
        leave_nothing_behind(folder)


def start(config: RefineConfig, folder: Path, module: nn.Module | None, data: Any) -> Run:
    """Backbone and images in, both heads initialised: from feature prototypes (Sec. 3.3) or an old model's head."""
    material = gather(config, module, data, folder / CACHE)
    heads, chosen = initialise(material)
    config, backbone, images, features = material.config, material.backbone, material.images, material.features
    # What the user gave is kept to the digit, so that the same command can resume the run.
    for name in ("mean", "std"):
        if getattr(config, name) is None or name in config.presumed:
            config = dataclasses.replace(config, **{name: getattr(backbone, name).tolist()})
    config = dataclasses.replace(config, augment=chosen, presumed=[], track=config.track or [])
    clear_results(folder)  # only now: a mistake in the inputs must not cost an earlier run's results
    write_atomically(folder / CONFIG, lambda path: path.write_text(to_yaml(config), encoding="utf-8"))
    clustering, calibration = (head_probabilities(head, features) for head in (heads.clustering, heads.calibration))
    partition = heads.partition.cpu()
    before = measure(clustering, calibration, partition.numpy(), images.labels)
    model = Clusterer(backbone, heads.clustering, heads.calibration)
    record = _old_record(material.old, calibration, material.loaded, images)
    return Run(config, folder, material.device, images, model, before, [], partition, record)


def _old_record(old: Any, initial: Any, loaded: Loaded, images: ImageSet) -> dict[str, Any] | None:
    """What the report says of the model that is retrofitted, and its assignment to compare the final one with."""
    if old is None:
        return None
    figures = measure_head(old, images.labels)
    figures |= {"writer": loaded.origin.writer, "clusters": old.shape[1]}
    figures["agreement_before"] = float((initial.argmax(axis=1) == old.argmax(axis=1)).mean())
    return {"figures": figures, "assignment": torch.from_numpy(old.argmax(axis=1))}


def restart(config: RefineConfig, folder: Path, state: dict[str, Any], module: nn.Module | None, data: Any) -> Run:
    """The same run as after its last finished epoch; the checkpoint it began with is not needed any more."""
    stored = load_config(folder / CONFIG)
    track = stored.track if config.track is None else config.track
    make_trackers(track)  # refuses those that are not installed here
    given, config = config, dataclasses.replace(stored, device=config.device, track=track)
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
    images = open_data(config, backbone, folder / CACHE, data)
    _refuse_other_settings(given, stored, len(images), folder)
    if images.digest != state["digest"]:
        raise UserError(f"the images of {config.data} are not those that {folder} was begun with")
    # Runs that an earlier release began have the MLP head and say nothing of it.
    spec = state.get("heads", {"hidden": config.hidden, "clusters": config.clusters})
    heads = [build_head(spec, backbone.feature_dim, str(folder)) for _ in range(2)]
    log.info("going on after epoch %d", state["refiner"]["epoch"])
    model = Clusterer(backbone, heads[0], heads[1])
    if config.freeze_backbone:
        backbone.module.load_state_dict(state["frozen"])
    kept = (state["before"], state["history"], state.get("start"), state.get("old"), state.get("last_epochs", []))
    return Run(config, folder, device, images, model, *kept, state)


def train(current: Run, track: Tracking) -> None:
    """Algorithm 1; after every epoch the state is on disk before the next begins."""
    config, model = current.config, current.model
    epochs, frozen = config.epochs or 0, config.freeze_backbone
    trained = nn.Identity() if frozen else model.backbone
    steps = epochs * steps_an_epoch(len(current.images), config)
    heads, images = (model.clustering_head, model.calibration_head), len(current.images)
    refiner = Refiner(trained, *heads, config, current.device, images, steps)
    if current.state is not None:
        refiner.restore(current.state["refiner"])
    make = fresh_views(config, model.backbone, current.images, current.device)
    if frozen and refiner.epoch < epochs:
        make = cached_views(view_features(config, model.backbone, current.images, current.device))

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
                "heads": model.calibration_head.spec,
                "before": current.before,
                "start": current.start,
                "old": current.old,
                "last_epochs": current.last_epochs,
                "history": current.history,
                "digest": current.images.digest,
            },
        )
        write_history(current.folder / HISTORY, current.history)

    batches = len(batch_sizes(len(current.images), config.batch_size or 1))
    bar = TrainingProgress(refiner.epoch, epochs, batches)

    def after_epoch(stats: dict[str, float]) -> None:
        current.history.append(bar.after_epoch(stats))
        if refiner.epoch > epochs - WATCHED_EPOCHS:
            current.last_epochs.append(watch(model, current.images, current.device, config.precision))
        save()
        track.epoch(current.history[-1])  # only now: a run that is killed in between makes up for it

    if current.state is None:
        save()
    try:
        refiner.fit(batches_of(make, len(current.images), config), bar.after_batch, after_epoch)
    finally:
        bar.close()


def finish(current: Run, seconds: float, track: Tracking) -> Report:
    """Predict with the calibration head, compare with where the run began, write everything; the page comes last."""
    config, images, model, folder = current.config, current.images, current.model, current.folder
    assert config.clusters is not None
    clustering, calibration, features = predict(model, images, current.device, config.precision, progress)
    assignment = torch.from_numpy(calibration.argmax(axis=1))
    again = kmeans_assignment(features.to(current.device), config.clusters, generator(config.seed, FINAL))
    model.prototypes = fit_prototypes(features, assignment, config.clusters)
    views = training_views(config, model.backbone)
    seen, anew = see_anew(model, images, views, current.device, config.precision, generator(config.seed, QUALITY))
    evidence = Evidence(
        torch.from_numpy(clustering),
        torch.from_numpy(calibration),
        features,
        torch.from_numpy(again),
        seen,
        anew,
        current.start,
        current.last_epochs,
    )
    card = assess(evidence)
    metrics: dict[str, Any] = {
        "images": len(images),
        "clusters": config.clusters,
        "epochs": config.epochs,
        "seed": config.seed,
        "data": images.source,
        "labels": images.labels is not None,
        "units": "fractions of 1; ECE has 15 equal-width bins",
        "before": current.before,
        "after": measure(clustering, calibration, again, images.labels),
        "label_free": card,
        "skipped": [{"image": name, "reason": reason} for name, reason in images.skipped],
        "seconds": round(seconds, 1),
    }
    if current.old is not None:
        same = calibration.argmax(axis=1) == current.old["assignment"].numpy()
        metrics["old_model"] = {**current.old["figures"], "agreement_after": float(same.mean())}
    model.save(folder, _provenance(config, images, card))
    more = {"trusted": trusted_samples(calibration), **outlier_columns(model.prototypes, features)}
    table = prediction_table(images.names, clustering, calibration, more)
    write_table(folder / PREDICTIONS, table)
    text = json.dumps(metrics, indent=2) + "\n"
    write_atomically(folder / REPORT, lambda path: path.write_text(text, encoding="utf-8"))
    findings = findings_of_run(config, folder, metrics, table, calibration, images, current.history)
    write_page(folder / PAGE, findings)
    track.finish(metrics)
    log.info("finished in %.0f s: %s", seconds, folder)
    return Report(metrics, table, folder)


def _provenance(config: RefineConfig, images: ImageSet, card: dict[str, Any]) -> dict[str, Any]:
    """Where a model comes from, and what was said of it, for its model.json."""
    return {
        "tool": "cdc_plugin",
        "backbone": config.backbone,
        "data": images.source,
        "data_digest": images.digest,
        "epochs": config.epochs,
        "seed": config.seed,
        "expected_accuracy": round(card["expected_accuracy"], 4),
        "warnings": [warning["text"] for warning in card["warnings"]],
    }


def _refuse_other_settings(given: RefineConfig, stored: RefineConfig, images: int, folder: Path) -> None:
    """Going on with other settings would give a run that no command describes."""
    default = RefineConfig()
    names = [
        item.name
        for item in dataclasses.fields(RefineConfig)
        if item.name not in ("out", "device", "augment", "presumed", "track")
    ]
    names = [name for name in names if name not in given.presumed]
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
