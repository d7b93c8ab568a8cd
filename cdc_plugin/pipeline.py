"""Run the self-labeling stage as a straight line, from checkpoint and images to the result folder: read `run` first."""

import contextlib
import time
from pathlib import Path
from typing import Any

from torch import nn

from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.sources.features import describe_features, split_sources
from cdc_plugin.evaluation.outcome import begin_again, finish_run, measure_start
from cdc_plugin.evaluation.records import Report
from cdc_plugin.training.prepare import check_request, initialise, prepare
from cdc_plugin.training.progress import log_to, show_progress
from cdc_plugin.training.request import configure
from cdc_plugin.training.resume import explain_resume, resume_run
from cdc_plugin.training.review import find_other_number, has_helped, may_return, return_to_start
from cdc_plugin.training.run_folder import (
    LOG,
    begin_run_folder,
    leave_nothing_behind,
    prepare_folder,
    read_state,
    stored_request,
)
from cdc_plugin.training.runtime import Runtime, choose_device, init_distributed, restore_torch, was_restarted
from cdc_plugin.training.signals import add_hint, find_interruption
from cdc_plugin.training.trackers import open_trackers
from cdc_plugin.training.train import explain_error, train


def refine(
    backbone: str | Path | nn.Module | None = None,
    data: Any = None,
    clusters: int | str | None = None,
    recipe: str | Path | None = None,
    out: str | Path | None = None,
    seed: int | None = None,
    *,
    features: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    **overrides: Any,
) -> Report:
    """Refine a pretrained backbone into calibrated clusters, without labels.

    Args:
        backbone: a checkpoint, a result folder, or a `cdc_plugin.Backbone` around a module of your own.
        data: a folder, .npz or .npy file, data set name, uint8 array, or map-style torch data set.
        clusters: how many, "auto" or "auto:5-50"; may come from the recipe instead.
        recipe: name of a shipped recipe or path of a YAML file.
        out: result folder; a new one below ``cdc-runs`` if left out.
        features: vectors (N, D) in place of a backbone, as an array, a file or a list of such spaces side by side;
            ``data`` are then pictures for the report, if given at all.
        overrides: any other field of `RefineConfig`, such as ``epochs=30`` or ``augment={"flip": False}``.
    """
    module = backbone if isinstance(backbone, nn.Module) else None
    if features is not None:
        spaces = split_sources(features)
        overrides["features"] = [str(s) if isinstance(s, (str, Path)) else f"<{type(s).__name__}>" for s in spaces]
        data = describe_features(features, data, overrides.get("labels", True), overrides.get("data_root"))
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
    began = time.monotonic()
    with restore_torch(request.deterministic), init_distributed() as distributed:
        distributed.raise_together(lambda: check_request(request, resume))
        if was_restarted():  # the same command again, after a fault
            resume, overwrite = True, False
        name = Path((request.features or [request.data or "run"])[0]).stem
        folder = distributed.broadcast_from_main(lambda: prepare_folder(request.out, name, resume, overwrite))
        begun, state = False, None
        try:
            state = distributed.broadcast_from_main(lambda: read_state(folder)) if resume else None
            begun = state is not None
            if resume and state is None:
                request = distributed.broadcast_from_main(lambda: stored_request(request, folder))
                distributed.raise_together(lambda: check_request(request, resume=False))
            runtime = Runtime(choose_device(request.device), request.precision, distributed, show_progress)
            with log_to(folder / LOG) if distributed.main else contextlib.nullcontext():
                if state is None:
                    prepared = prepare(request, module, data, runtime)
                    heads, settings = initialise(prepared)
                    settings = distributed.broadcast_from_main(lambda: settings)
                    current = measure_start(prepared, heads, settings, folder)
                    if distributed.main:  # only now: a mistake in the inputs must not cost an earlier run's results
                        begin_run_folder(current, may_return(current))
                    begun = True
                else:
                    current = resume_run(request, folder, state, module, data, runtime)
                track = current.settings.track if distributed.main else []
                while True:
                    with open_trackers(track, folder, current.settings, current.history) as tracking:
                        train(current, tracking)
                        if not has_helped(current):
                            return_to_start(current)
                            train(current, tracking)
                        if (other := find_other_number(current)) is None:
                            report = finish_run(current, time.monotonic() - began)
                            tracking.finish(report.metrics)
                            return report
                    current = begin_again(current, other)
        except (KeyboardInterrupt, Exception) as error:
            if (interruption := find_interruption(error)) is not None:
                add_hint(interruption, explain_resume(request, folder if begun else None))
                raise
            raise explain_error(error, request, folder, distributed, resumed=state is not None) from error
        finally:
            if distributed.main:
                leave_nothing_behind(folder)
