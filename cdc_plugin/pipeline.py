"""One run, from checkpoint and images to the result folder, as a straight line: read `run` first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cdc_plugin.config.load import load_config, to_yaml
from cdc_plugin.config.schema import RefineConfig, batch_sizes, steps_per_epoch
from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.core.random_streams import FINAL, QUALITY, generator
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.data.images import ImageSet
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.outputs import predict
from cdc_plugin.evaluation.prediction_table import build_prediction_table, write_table
from cdc_plugin.evaluation.quality import SNAPSHOT_EPOCHS, Evidence, assess, predict_augmented, watch, watched
from cdc_plugin.evaluation.report_record import Report, describe_run, measure, old_record, run_record, trusted_samples
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import build_head
from cdc_plugin.report.run_page import page_of_run, write_page
from cdc_plugin.training.batches import batches_of, cached_views, fresh_views, training_views
from cdc_plugin.training.collapse import as_warnings, findings, new_findings, refuse_dead
from cdc_plugin.training.device import choose_device
from cdc_plugin.training.distributed import SINGLE, Distributed, joined, restarted, settled
from cdc_plugin.training.features import head_probabilities, kmeans_of_all
from cdc_plugin.training.inputs import check_request, configure, open_data
from cdc_plugin.training.prepare import check_shares, frozen_views, gather, initialise
from cdc_plugin.training.progress import TrainingProgress, log, log_to, progress, write_history
from cdc_plugin.training.recovery import check_resume_settings, explain_error, roll_back, setback_warning
from cdc_plugin.training.refiner import NotFiniteError, Refiner
from cdc_plugin.training.run_folder import (
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
    stored_config,
    write_state,
)
from cdc_plugin.training.run_state import Run, provenance, state_of
from cdc_plugin.training.signals import Terminated, noticing_termination
from cdc_plugin.training.trackers import Tracking, make_trackers, open_all


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
    """The whole stage: read, initialise, train, predict, report.

    Every process of ``torchrun`` comes here and returns the same report; the main one alone writes.
    """
    began, threads = time.monotonic(), torch.get_num_threads()
    check_request(config, resume)
    with joined() as distributed:
        if restarted():  # the same command again, after a fault
            resume, overwrite = True, False
        folder = distributed.broadcast_from_main(
            lambda: prepare_folder(config.out, _run_name(config), resume, overwrite)
        )
        try:
            state = distributed.broadcast_from_main(lambda: read_state(folder)) if resume else None
            if state is None:
                config = stored_config(config, folder) if resume else config
                check_request(config, resume=False)
            with log_to(folder / LOG) if distributed.main else contextlib.nullcontext():
                if state is None:
                    current = start(config, folder, module, data, distributed)
                else:
                    current = restart(config, folder, state, module, data, distributed)
                with open_all(_trackers(current), folder, current.config, current.history) as track:
                    train(current, track)
                    return finish(current, time.monotonic() - began, track)
        except (RuntimeError, MemoryError) as error:
            raise explain_error(error, config, folder, distributed) from error
        finally:
            torch.set_num_threads(threads)
            if distributed.main:
                leave_nothing_behind(folder)


def start(config: RefineConfig, folder: Path, module: nn.Module | None, data: Any, distributed: Distributed) -> Run:
    """Backbone and images in, both heads initialised: from feature prototypes (Sec. 3.3) or an old model's head."""
    distributed = settled(distributed, config, choose_device(config.device))
    material = gather(config, module, data, distributed=distributed)
    heads, chosen = initialise(material)
    config, backbone, images, features = material.config, material.backbone, material.images, material.features
    # What the user gave is kept to the digit, so that the same command can resume the run.
    for name in ("mean", "std"):
        if getattr(config, name) is None or name in config.from_recipe:
            config = dataclasses.replace(config, **{name: getattr(backbone, name).tolist()})
    config = dataclasses.replace(config, augment=chosen, from_recipe=[], track=config.track or [])
    config = distributed.broadcast_from_main(lambda: config)
    if distributed.main:
        clear_results(folder)  # only now: a mistake in the inputs must not cost an earlier run's results
        write_atomically(folder / CONFIG, lambda path: path.write_text(to_yaml(config), encoding="utf-8"))
    clustering, calibration = (head_probabilities(head, features) for head in (heads.clustering, heads.calibration))
    partition = heads.partition.cpu()
    before = measure(clustering, calibration, partition.numpy(), images.labels)
    model = Clusterer(backbone, heads.clustering, heads.calibration)
    record = old_record(material.old, calibration, material.loaded, images)
    return Run(config, folder, material.device, images, model, before, [], partition, record, distributed=distributed)


def restart(
    config: RefineConfig,
    folder: Path,
    state: dict[str, Any],
    module: nn.Module | None,
    data: Any,
    distributed: Distributed,
) -> Run:
    """The same run as after its last finished epoch; the checkpoint it began with is not needed any more."""
    stored = distributed.broadcast_from_main(lambda: load_config(folder / CONFIG))
    track = stored.track if config.track is None else config.track
    make_trackers(track)  # refuses those that are not installed here
    given = config
    config = dataclasses.replace(stored, device=given.device, track=track, on_collapse=given.on_collapse)
    record = state["backbone"]
    if record["spec"] is not None:
        network, _ = build(record["spec"])
    elif isinstance(module, Backbone):
        network = module.module
    else:
        raise UserError(f"{folder} was begun with a module of your own; pass it again to go on")
    backbone = Backbone(network, **record)
    device = choose_device(config.device)
    distributed = settled(distributed, config, device)
    backbone.place(device, config.compile, not config.freeze_backbone)

    def opened() -> ImageSet:
        check_shares(config, distributed)
        images = open_data(config, backbone, data)
        check_resume_settings(given, stored, len(images), folder)
        if images.digest != state["digest"]:
            raise UserError(f"the images of {config.data} are not those that {folder} was begun with")
        return images

    images = distributed.raise_together(opened)
    # Runs that an earlier release began have the MLP head and say nothing of it.
    spec = state.get("heads", {"hidden": config.hidden, "clusters": config.clusters})
    heads = [build_head(spec, backbone.feature_dim, str(folder)) for _ in range(2)]
    log.info("going on after epoch %d", state["refiner"]["epoch"])
    model = Clusterer(backbone, heads[0], heads[1])
    if config.freeze_backbone:
        backbone.module.load_state_dict(state["frozen"])
    kept: dict[str, Any] = {name: state.get(name) for name in ("before", "history", "start", "old", "setback")}
    last_epochs = state.get("last_epochs", [])
    return Run(
        config, folder, device, images, model, **kept, last_epochs=last_epochs, state=state, distributed=distributed
    )


def train(current: Run, track: Tracking) -> None:
    """Algorithm 1; after every epoch the state is on disk before the next begins."""
    config, model, distributed, images = current.config, current.model, current.distributed, current.images
    epochs, frozen = config.epochs or 0, config.freeze_backbone
    steps = epochs * steps_per_epoch(len(images), config)
    make = fresh_views(config, model.backbone, images, current.device, distributed)
    # With a frozen backbone only the features of the views are shared work; the heads are the main process's.
    trained, together = (nn.Identity(), SINGLE) if frozen else (model.backbone, distributed)
    heads = (model.clustering_head, model.calibration_head)
    refiner = Refiner(trained, *heads, config, current.device, len(images), steps, together)
    if current.state is not None:
        refiner.restore(current.state["refiner"])
    if frozen and refiner.epoch < epochs:
        rows = frozen_views(config, model.backbone, images, current.device, distributed)
        make = cached_views(rows, current.device)
    if frozen and not distributed.main:
        return
    bar = TrainingProgress(refiner.epoch, epochs, len(batch_sizes(len(images), config.batch_size or 1)))

    def save() -> None:
        if distributed.main:
            write_state(current.folder, state_of(current, refiner))
            write_history(current.folder / HISTORY, current.history)

    def after_batch(stats: dict[str, float]) -> None:
        bar.after_batch(stats)
        if together.any(notice.asked):
            save()
            notice.end()
            raise Terminated  # another process was asked

    def after_epoch(stats: dict[str, float]) -> None:
        current.history.append(bar.after_epoch(stats))
        for finding in new_findings(current.history, config):
            log.warning("%s", finding.text)
        if epochs - SNAPSHOT_EPOCHS < refiner.epoch < epochs:  # after the last one, all images are looked at anyway
            current.last_epochs.append(watch(model, images, current.device, config.precision))
        save()
        track.epoch(current.history[-1])  # only now: a run that is killed in between makes up for it
        refuse_dead(current.history, config)

    if current.state is None:
        save()
    elif distributed.main:  # a run that was killed right after its last state has a line less there
        write_history(current.folder / HISTORY, current.history)
    refuse_dead(current.history, config)
    with noticing_termination() as notice, contextlib.closing(bar):
        while refiner.epoch < epochs:
            try:
                refiner.fit(batches_of(make, len(images), config), after_batch, after_epoch)
            except NotFiniteError:
                roll_back(current, refiner)
                save()


def finish(current: Run, seconds: float, track: Tracking) -> Report:
    """Predict with the calibration head, compare with where the run began, write everything; the page comes last."""
    config, images, model, folder = current.config, current.images, current.model, current.folder
    assert config.clusters is not None
    distributed, randomness = current.distributed, generator(config.seed, FINAL)
    if config.freeze_backbone:
        for head in (model.clustering_head, model.calibration_head):  # the main process alone has trained them
            for tensor in head.to(current.device).state_dict().values():
                distributed.broadcast_(tensor)
    clustering, calibration, features = predict(model, images, current.device, config.precision, progress, distributed)
    assignment = torch.from_numpy(calibration.argmax(axis=1))
    again = kmeans_of_all(features, config.clusters, current.device, randomness)
    rows, chosen = features.sample(config.clusters, randomness)
    model.prototypes = fit_prototypes(rows, assignment[chosen], config.clusters)
    distance = features.map(model.prototypes.distance).numpy()
    views = training_views(config, model.backbone)
    seen, anew = predict_augmented(
        model, images, views, current.device, config.precision, generator(config.seed, QUALITY)
    )
    evidence = Evidence(
        torch.from_numpy(clustering),
        torch.from_numpy(calibration),
        rows,
        torch.from_numpy(again),
        seen,
        anew,
        current.start,
        [*current.last_epochs, assignment[watched(len(images))]],
        chosen,
    )
    card = assess(evidence)
    card["warnings"] += [*setback_warning(current.setback), *as_warnings(findings(current.history, config))]
    old = None
    if current.old is not None:
        same = calibration.argmax(axis=1) == current.old["assignment"].numpy()
        old = {**current.old["figures"], "agreement_after": float(same.mean())}
    metrics = run_record(
        images,
        clusters=config.clusters,
        epochs=config.epochs or 0,
        seed=config.seed,
        before=current.before,
        after=measure(clustering, calibration, again, images.labels),
        old_model=old,
        label_free=card,
        seconds=seconds,
    )
    outlier = distance > model.prototypes.limit
    more = {"trusted": trusted_samples(calibration), "distance": distance, "outlier": outlier}
    table = build_prediction_table(images.names, clustering, calibration, more)
    if not distributed.main:
        return Report(metrics, table, folder)
    model.save(folder, provenance(config, images, card))
    write_table(folder / PREDICTIONS, table)
    text = json.dumps(metrics, indent=2) + "\n"
    write_atomically(folder / REPORT, lambda path: path.write_text(text, encoding="utf-8"))
    about = describe_run(config, folder)
    write_page(folder / PAGE, page_of_run(metrics, table, calibration, images, current.history, **about))
    track.finish(metrics)
    log.info("finished in %.0f s: %s", seconds, folder)
    return Report(metrics, table, folder)


def _trackers(current: Run) -> list[str]:
    return (current.config.track or []) if current.distributed.main else []


def _run_name(config: RefineConfig) -> str:
    name = Path(config.data or "run").stem if config.data and "<" not in config.data else "run"
    return name
