"""Run the self-labeling stage as a straight line, from checkpoint and images to the result folder: read `run` first."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cdc_plugin.config.load import to_yaml
from cdc_plugin.config.resolve import batch_sizes
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.evaluation.finish import finish_run
from cdc_plugin.evaluation.quality import SNAPSHOT_EPOCHS, snapshot
from cdc_plugin.evaluation.report_record import Report, measure, old_record
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.training.batches import cached_view_features, cached_views, fresh_views, make_batches
from cdc_plugin.training.collapse import detect_new, refuse_dead
from cdc_plugin.training.distributed import SINGLE, init_distributed, was_restarted
from cdc_plugin.training.features import head_probabilities
from cdc_plugin.training.prepare import check_request, initialise, prepare
from cdc_plugin.training.progress import TrainingProgress, log, log_to, show_progress, write_history
from cdc_plugin.training.recovery import explain_error, roll_back
from cdc_plugin.training.refiner import NotFiniteError, Refiner
from cdc_plugin.training.request import configure
from cdc_plugin.training.resume import resume_run
from cdc_plugin.training.run_folder import (
    CONFIG,
    HISTORY,
    LOG,
    Run,
    clear_results,
    collect_state,
    leave_nothing_behind,
    prepare_folder,
    read_state,
    stored_request,
    write_state,
)
from cdc_plugin.training.runtime import Runtime, choose_device
from cdc_plugin.training.signals import Terminated, noticing_termination
from cdc_plugin.training.trackers import Tracking, open_trackers


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
    module = backbone if isinstance(backbone, nn.Module) else None
    given_data = None if isinstance(data, (str, Path)) else data
    flags = {
        **overrides,
        "backbone": f"<{type(backbone).__name__}>" if module is not None else backbone,
        "data": f"<{type(data).__name__}>" if given_data is not None else data,
        "clusters": clusters,
        "out": out,
        "seed": seed,
    }
    return run(configure(recipe, flags), module=module, data=given_data, resume=resume, overwrite=overwrite)


def run(
    request: RefineConfig,
    *,
    module: nn.Module | None = None,
    data: Any = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Report:
    """Read, initialise, train, predict, report.

    Every process of ``torchrun`` comes here and returns the same report; the main one alone writes.
    """
    began, threads = time.monotonic(), torch.get_num_threads()
    with init_distributed() as distributed:
        distributed.raise_together(lambda: check_request(request, resume))
        if was_restarted():  # the same command again, after a fault
            resume, overwrite = True, False
        name = Path(request.data).stem if request.data else "run"
        folder = distributed.broadcast_from_main(lambda: prepare_folder(request.out, name, resume, overwrite))
        try:
            state = distributed.broadcast_from_main(lambda: read_state(folder)) if resume else None
            if resume and state is None:
                request = distributed.broadcast_from_main(lambda: stored_request(request, folder))
                distributed.raise_together(lambda: check_request(request, resume=False))
            runtime = Runtime(choose_device(request.device), request.precision, distributed, show_progress)
            with log_to(folder / LOG) if distributed.main else contextlib.nullcontext():
                if state is None:
                    current = begin_run(request, folder, module, data, runtime)
                else:
                    current = resume_run(request, folder, state, module, data, runtime)
                track = current.settings.track if distributed.main else []
                with open_trackers(track, folder, current.settings, current.history) as tracking:
                    train(current, tracking)
                    return finish_run(current, time.monotonic() - began, tracking)
        except (RuntimeError, MemoryError) as error:
            raise explain_error(error, request, folder, distributed) from error
        finally:
            torch.set_num_threads(threads)
            if distributed.main:
                leave_nothing_behind(folder)


def begin_run(request: RefineConfig, folder: Path, module: nn.Module | None, data: Any, runtime: Runtime) -> Run:
    """Read backbone and images and initialise both heads, from feature prototypes (Sec. 3.3) or an old model's head."""
    prepared = prepare(request, module, data, runtime)
    heads, settings = initialise(prepared)
    settings = runtime.distributed.broadcast_from_main(lambda: settings)
    if runtime.distributed.main:
        clear_results(folder)  # only now: a mistake in the inputs must not cost an earlier run's results
        write_atomically(folder / CONFIG, lambda path: path.write_text(to_yaml(settings), encoding="utf-8"))
    images, features, partition = prepared.images, prepared.features, heads.partition.cpu()
    clustering, calibration = (head_probabilities(head, features) for head in (heads.clustering, heads.calibration))
    before = measure(clustering, calibration, partition.numpy(), images.labels)
    old = old_record(prepared.old, calibration, prepared.loaded, images)
    model = Clusterer(prepared.backbone, heads.clustering, heads.calibration)
    return Run(settings, folder, runtime, images, model, before, start=partition, old=old)


def train(current: Run, tracking: Tracking) -> None:
    """Run Algorithm 1; after every epoch the state is on disk before the next begins."""
    settings, runtime, images, model = current.settings, current.runtime, current.images, current.model
    frozen, main, count = settings.freeze_backbone, runtime.distributed.main, len(images)
    make = fresh_views(settings, model.backbone, images, runtime)
    # With a frozen backbone only the features of the views are shared work; the main process trains the heads.
    alone = Runtime(runtime.device, runtime.precision, SINGLE, runtime.progress)
    trained, together = (nn.Identity(), alone) if frozen else (model.backbone, runtime)
    refiner = Refiner(trained, model.clustering_head, model.calibration_head, settings, together, count)
    if current.state is not None:
        refiner.restore(current.state["refiner"])
    if frozen and refiner.epoch < settings.epochs:
        make = cached_views(cached_view_features(settings, model.backbone, images, runtime), runtime.device)
    if frozen and not main:
        return
    bar = TrainingProgress(refiner.epoch, settings.epochs, len(batch_sizes(count, settings.batch_size)))

    def save() -> None:
        if main:
            write_state(current.folder, collect_state(current, refiner))
            write_history(current.folder / HISTORY, current.history)

    def after_batch(stats: dict[str, float]) -> None:
        bar.after_batch(stats)
        if together.distributed.any(notice.asked):
            save()
            notice.end()
            raise Terminated  # another process was asked

    def after_epoch(stats: dict[str, float]) -> None:
        current.history.append(bar.after_epoch(stats))
        for finding in detect_new(current.history, settings):
            log.warning("%s", finding.text)
        if settings.epochs - SNAPSHOT_EPOCHS < refiner.epoch < settings.epochs:  # after the last, all images are seen
            current.snapshots.append(snapshot(model, images, runtime))
        save()
        tracking.epoch(current.history[-1])  # only now: a run that is killed in between makes up for it
        together.distributed.raise_together(lambda: refuse_dead(current.history, settings))

    if current.state is None:
        save()
    elif main:  # a run that was killed right after its last state has one line fewer there
        write_history(current.folder / HISTORY, current.history)
    together.distributed.raise_together(lambda: refuse_dead(current.history, settings))
    batches = make_batches(make, count, settings.batch_size, settings.seed)
    with noticing_termination() as notice, contextlib.closing(bar):
        while refiner.epoch < settings.epochs:
            try:
                refiner.fit(batches, after_batch, after_epoch)
            except NotFiniteError:
                together.distributed.raise_together(lambda: roll_back(current, refiner))
                save()
