"""Train a run from where it stands: save after every epoch, stop when asked, roll back from a loss that is NaN."""

import contextlib
import dataclasses
from pathlib import Path

import torch
from torch import nn

from cdc_plugin.config.resolve import find_round
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.errors import OutputError, UserError, is_out_of_memory, option
from cdc_plugin.training.batches import (
    SNAPSHOT_EPOCHS,
    cached_view_features,
    cached_views,
    fetch_pixels,
    fresh_views,
    make_batches,
    neighbour_views,
    predict_snapshot,
    snapshot_rows,
)
from cdc_plugin.training.collapse import SLOW_DOWN, detect_new, refuse_dead
from cdc_plugin.training.features import head_probabilities
from cdc_plugin.training.progress import TrainingProgress, log
from cdc_plugin.training.refiner import NotFiniteError, Refiner, Stats
from cdc_plugin.training.review import begins_estimated, may_return, review_round
from cdc_plugin.training.run_folder import STATE, Run, read_state, save_run
from cdc_plugin.training.runtime import SINGLE, Distributed
from cdc_plugin.training.signals import Terminated, noticing_termination
from cdc_plugin.training.trackers import Tracking

LOST_CONNECTION = ("connection", "peer", "gloo", "nccl", "barrier", "timed out")


def train(run: Run, tracking: Tracking) -> None:
    """Run Algorithm 1; after every epoch the state is on disk before the next begins."""
    settings, runtime, images, model = run.settings, run.runtime, run.images, run.model
    frozen, main = settings.freeze_backbone, runtime.distributed.main
    make = fresh_views(settings, model.backbone, images, runtime)
    trained: nn.Module = model.backbone
    if frozen:  # only the features of the views are shared work; the main process trains the heads
        trained, runtime = nn.Identity(), dataclasses.replace(runtime, distributed=SINGLE)
    refiner = Refiner(trained, model.clustering_head, model.calibration_head, settings, runtime, images.count)
    if run.state is not None:
        refiner.restore(run.state["refiner"])
    else:
        refiner.estimates_sizes = runtime.distributed.broadcast_from_main(lambda: begins_estimated(settings, run.start))
        if refiner.estimates_sizes:
            log.info("the clusters are not to be of equal size: their sizes are estimated")
    seen = None  # features of the images that are predicted after the last epochs, where they stay the same
    if run.features is not None and not refiner.done:
        seen = run.features.take(snapshot_rows(images.count))
        if settings.frozen_views:
            rows = cached_view_features(settings, model.backbone, images, run.runtime)
            make = cached_views(rows, settings.clusters, runtime.device)
        else:
            make = neighbour_views(run.features, settings.clusters, runtime.device)
    if frozen and not main:
        return
    bar = TrainingProgress(refiner.epoch, settings.epochs, refiner.batches_per_epoch, settings.rounds)
    together = runtime.distributed

    def save() -> None:
        if main:
            save_run(run, refiner.state())

    def after_batch(stats: Stats) -> None:
        bar.after_batch(stats)
        if together.any(notice.asked):
            save()
            notice.end()
            raise Terminated  # another process was asked

    def after_epoch(stats: Stats) -> None:
        run.history.append(bar.record_epoch(stats))
        _, following = find_round(refiner.epoch - 1, settings.epochs, settings.rounds)
        if following - SNAPSHOT_EPOCHS < refiner.epoch < following:  # after the last, all images are seen
            head = model.calibration_head
            probs = None if seen is None else torch.from_numpy(head_probabilities(head, seen))
            clusters = predict_snapshot(model.backbone, head, images, runtime) if probs is None else probs.argmax(dim=1)
            run.snapshots.append(clusters)
        if refiner.epoch == following and (settings.rounds > 1 or may_return(run)):
            review_round(run, refiner)
            run.snapshots = run.snapshots if refiner.done else []
        save()
        bar.after_epoch(run.history[-1])  # only now: who reads of an epoch may rely on it
        for finding in detect_new(run.history, settings):
            log.warning("%s", finding.text)
        tracking.epoch(run.history[-1])  # a run that is killed in between makes up for it
        together.raise_together(lambda: refuse_dead(run.history, settings))

    save()
    together.raise_together(lambda: refuse_dead(run.history, settings))
    fetch = None if frozen else fetch_pixels(settings, images, runtime)
    batches = make_batches(make, images.count, settings.batch_size, settings.seed, fetch)
    with noticing_termination() as notice, contextlib.closing(bar):
        while not refiner.done:
            try:
                refiner.fit(batches, after_batch, after_epoch)
            except NotFiniteError:
                together.raise_together(lambda: roll_back(run, refiner))
                save()


def roll_back(run: Run, refiner: Refiner) -> None:
    """Return to the last good epoch with lower rates, once; the second time, end the run."""
    settings, epoch = run.settings, refiner.epoch + 1
    if refiner.slow_down < 1:
        slower = refiner.slow_down / 10
        raise UserError(
            f"the loss is NaN or infinite in epoch {epoch}, again, at {refiner.slow_down:g} of the rates; the "
            f"{epoch - 1} epochs before it are kept in {run.folder}; start a new run with "
            f"lr_backbone={settings.lr_backbone * slower:g} lr_heads={settings.lr_heads * slower:g}, or "
            f"{option('freeze_backbone')}"
        )
    distributed = SINGLE if settings.freeze_backbone else run.runtime.distributed  # frozen: the main one trains alone
    state = distributed.broadcast_from_main(lambda: read_state(run.folder))
    if state is None:
        raise UserError(f"the loss is NaN or infinite, and the state in {run.folder} is gone; start a new run")
    refiner.restore(state["refiner"])
    refiner.slow_down, run.setback = SLOW_DOWN, epoch
    log.warning(
        "the loss is NaN or infinite in epoch %d: back to epoch %d, rates times %g", epoch, refiner.epoch, SLOW_DOWN
    )


def explain_error(
    error: BaseException, config: RefineConfig, folder: Path, distributed: Distributed, resumed: bool = False
) -> BaseException:
    """Return an error that the user can do something about in plain words; any other one as it is."""
    if isinstance(error, (UserError, OSError)):
        return error
    text = str(error).lower()
    if is_out_of_memory(error):
        smaller = max(2, (config.sub_batch_size or 128) // 2)
        return UserError(
            f"out of memory; finished epochs are kept in {folder}; start a new run in another folder with "
            f"sub_batch_size={smaller}, with a smaller batch_size, or with {option('freeze_backbone')}"
        )
    if config.compile and type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        reason = (str(error).splitlines() or [""])[0][:150]
        return UserError(f"the backbone cannot be compiled here ({reason}); leave compile=true out")
    if distributed.size > 1 and any(words in text for words in LOST_CONNECTION):
        return UserError(
            f"another process of this run has ended; finished epochs are kept in {folder}: start it again with "
            f"{option('resume')}, or let torchrun do so with --max-restarts"
        )
    if resumed:  # what a state holds is taken as it comes; nothing tells a damaged one from a mistake of ours
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:150]
        return OutputError(
            f"cannot go on from {folder / STATE} ({reason}); if it is damaged or of another version, start again with "
            f"{option('overwrite')}"
        )
    return error
