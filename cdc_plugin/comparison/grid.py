"""Run all cells of a comparison: in order, in parallel if asked for, and never twice."""

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cdc_plugin.comparison.cell import Cell, build_cell, read_record, run_cell, slugify
from cdc_plugin.comparison.datasets import DatasetRequest, OpenedDataset, open_dataset
from cdc_plugin.comparison.methods import Method, find_method
from cdc_plugin.comparison.train import PLAIN_ONLY
from cdc_plugin.data.images import open_images
from cdc_plugin.data.sources import describe_source
from cdc_plugin.data.sources.base import ImageSource
from cdc_plugin.data.sources.features import FeatureSource, describe_features
from cdc_plugin.data.views import storage_size
from cdc_plugin.errors import ConfigError, OutputError, UserError, option
from cdc_plugin.training.progress import log
from cdc_plugin.training.signals import end_with_parent

SHARED = "shared"


@dataclass(frozen=True)
class Grid:
    """Sets x methods x seeds."""

    sets: tuple[DatasetRequest, ...]
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    folder: Path
    jobs: int = 1  # parallel processes; 1 runs the cells in this one
    keep_models: bool = False  # of every cell, not only until another has continued it

    def cells(self) -> list[Cell]:
        """Return the cells in the order they run: seed by seed, so that an early table has every method in it."""
        return [
            build_cell(self.folder, request.name, method, seed)
            for request in self.sets
            for seed in self.seeds
            for method in self.methods
        ]

    def find_earlier(self, cell: Cell) -> Cell | None:
        """Return the cell whose model this one continues."""
        if cell.method.after is None:
            return None
        return build_cell(self.folder, cell.set, find_method(cell.method.after), cell.seed)


def add_first_stages(methods: list[Method]) -> list[Method]:
    """Return each method once and in order, preceded by the one that it continues."""
    ordered: dict[str, Method] = {}
    for method in methods:
        if method.after is not None:
            for first in add_first_stages([find_method(method.after)]):
                ordered.setdefault(first.name, first)
        ordered.setdefault(method.name, method)
    return list(ordered.values())


def run_grid(grid: Grid, after_cell: Callable[[Cell, dict[str, Any] | None, str | None], None]) -> None:
    """Run what is not finished yet. ``after_cell`` gets each cell with its record, or with the reason it failed.

    A cell that fails does not end the grid; those that continue it fail too.
    """
    _memory.clear()
    waiting = [cell for cell in grid.cells() if not _is_finished(grid, cell)]
    for request in grid.sets:
        if any(cell.set == request.name for cell in waiting):
            opened = _prepare_shared(grid, request, waiting)
            left_out = [cell for cell in waiting if cell.set == request.name and cell.method.uses_labels]
            if left_out and opened.prepared.images.labels is None:
                methods = ", ".join(dict.fromkeys(cell.method.name for cell in left_out))
                log.warning("%s has no labels, so %s are left out", request.name, methods)
                waiting = [cell for cell in waiting if cell not in left_out]
    failed: set[Path] = set()
    run = _run_in_turn if grid.jobs <= 1 else _run_in_parallel
    for cell, reason in run(grid, waiting, failed):
        if reason is not None:
            failed.add(cell.path)
        after_cell(cell, read_record(cell), reason)
    if not failed:  # remove what was kept for later cells only
        for path in (grid.folder / SHARED).glob("*/views-*.pt"):
            path.unlink(missing_ok=True)
        for cell in [] if grid.keep_models else grid.cells():
            shutil.rmtree(cell.model, ignore_errors=True)


def _is_finished(grid: Grid, cell: Cell) -> bool:
    """Return whether its record exists, and its model if an unfinished cell continues it."""
    if read_record(cell) is None:
        return False
    later = [c for c in grid.cells() if c.method.after == cell.method.name and (c.set, c.seed) == (cell.set, cell.seed)]
    return cell.model.is_dir() or all(read_record(c) is not None for c in later)


def _prepare_shared(grid: Grid, request: DatasetRequest, waiting: list[Cell]) -> OpenedDataset:
    """Compute what the cells of a set share before any process needs it: features and initial heads."""
    log.info("%s: features and initial heads, common to all methods", request.name)
    opened = _open_cached(grid.folder, request)
    settings, side = opened.prepared.settings, opened.prepared.backbone.input_size
    for source in request.outside:  # a mistyped name fails now, not after hours
        if opened.prepared.backbone.takes_features:
            described: ImageSource | FeatureSource = describe_features(source, labels=False)
        else:
            described = describe_source(source, storage_size(side), settings.data_root, labels=False)
        open_images(described, side, labels=False, limit=1)
        if described.digest == opened.prepared.images.digest:
            raise ConfigError(f"{option('ood', source)}: these are the images of {request.name} itself; name others")
    ours = [cell for cell in waiting if cell.set == request.name]
    for seed in sorted({cell.seed for cell in ours}):
        _, augment = opened.load_start(seed)
        if settings.freeze_backbone and any(cell.method.training not in PLAIN_ONLY for cell in ours):
            opened.load_views(augment)
    return opened


_memory: dict[tuple[Path, str], OpenedDataset] = {}


def _open_cached(folder: Path, request: DatasetRequest) -> OpenedDataset:
    """Return the set as this process has opened it; one is kept at a time."""
    key = (folder, request.name)
    if key not in _memory:
        _memory.clear()
        _memory[key] = open_dataset(request, folder / SHARED / slugify(request.name))
    return _memory[key]


def _try_cell(grid: Grid, cell: Cell) -> str | None:
    """Run one cell; return why it failed, if for a reason that a user can fix."""
    request = next(request for request in grid.sets if request.name == cell.set)
    needed = any(later.after == cell.method.name for later in grid.methods)
    try:
        run_cell(cell, _open_cached(grid.folder, request), grid.find_earlier(cell), grid.keep_models or needed)
    except UserError as error:
        return str(error)
    return None


def _run_in_turn(grid: Grid, waiting: list[Cell], failed: set[Path]) -> Iterator[tuple[Cell, str | None]]:
    for cell in waiting:
        yield cell, _explain_missing(grid, cell, failed) or _try_cell(grid, cell)


def _explain_missing(grid: Grid, cell: Cell, failed: set[Path]) -> str | None:
    """Return why a cell cannot run if the one it continues has failed."""
    earlier = grid.find_earlier(cell)
    return f"{earlier.method.name}, which it continues, failed" if earlier and earlier.path in failed else None


def _run_in_parallel(grid: Grid, waiting: list[Cell], failed: set[Path]) -> Iterator[tuple[Cell, str | None]]:
    """Run cells in separate processes, each as soon as the one it continues is done."""
    threads = max(1, (os.cpu_count() or 1) // grid.jobs)
    todo, running = list(waiting), dict[Future[str | None], Cell]()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(grid.jobs, context, _begin_worker, (threads,)) as pool:
        try:
            while todo or running:
                busy = {cell.path for cell in [*todo, *running.values()]}
                for cell in list(todo):
                    earlier = grid.find_earlier(cell)
                    if reason := _explain_missing(grid, cell, failed):
                        todo.remove(cell)
                        yield cell, reason
                    elif len(running) < grid.jobs and (earlier is None or earlier.path not in busy):
                        todo.remove(cell)
                        running[pool.submit(_try_cell, grid, cell)] = cell
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            names = ", ".join(f"{cell.method.name} (seed {cell.seed})" for cell in running.values())
            raise OutputError(
                f"a process was killed while running {names or 'a cell'} (out of memory?); finished cells are kept: "
                f"run it again with {option('jobs', max(1, grid.jobs - 1))}"
            ) from error
        except BaseException:
            # The user has interrupted: do not wait for running cells.
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _begin_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    end_with_parent()
