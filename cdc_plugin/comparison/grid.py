"""All cells of a comparison: in order, side by side where cores permit, and never twice."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cdc_plugin.comparison.cell import Cell, cell_of, read_record, run_cell, slug
from cdc_plugin.comparison.datasets import Opened, SetOfImages, open_set
from cdc_plugin.comparison.methods import Method, find_method
from cdc_plugin.data.images import open_images
from cdc_plugin.errors import UserError
from cdc_plugin.training.progress import log

SHARED = "shared"


@dataclass(frozen=True)
class Grid:
    """Sets x methods x seeds.

    Args:
        jobs: processes side by side; 1 runs the cells in this one.
        keep_models: leave the model of every cell, not only while another goes on with it.
    """

    sets: tuple[SetOfImages, ...]
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    folder: Path
    jobs: int = 1
    keep_models: bool = False

    def cells(self) -> list[Cell]:
        """In the order they are run: seed by seed, so that an early table has every method in it."""
        return [
            cell_of(self.folder, asked.name, method, seed)
            for asked in self.sets
            for seed in self.seeds
            for method in self.methods
        ]

    def asked(self, cell: Cell) -> SetOfImages:
        return next(asked for asked in self.sets if asked.name == cell.set)

    def earlier(self, cell: Cell) -> Cell | None:
        """The cell whose model this one goes on with."""
        if cell.method.after is None:
            return None
        return cell_of(self.folder, cell.set, find_method(cell.method.after), cell.seed)


def with_first_stages(methods: list[Method]) -> list[Method]:
    """Each method once and in order, with the one that it goes on with before it."""
    found: dict[str, Method] = {}
    for method in methods:
        if method.after is not None:
            for first in with_first_stages([find_method(method.after)]):
                found.setdefault(first.name, first)
        found.setdefault(method.name, method)
    return list(found.values())


def run_grid(grid: Grid, after_cell: Callable[[Cell, dict[str, Any] | None, str | None], None]) -> None:
    """Run what is not finished yet. ``after_cell`` gets each cell with its record, or with why it failed.

    A cell that fails does not end the grid; those that go on with it fail with it.
    """
    _memory.clear()
    waiting = [cell for cell in grid.cells() if not _finished(grid, cell)]
    for asked in grid.sets:
        if any(cell.set == asked.name for cell in waiting):
            opened = _open_for_all(grid, asked, waiting)
            if opened.prepared.images.labels is None:
                waiting = _without_references(asked.name, waiting)
    failed: set[Path] = set()
    for cell, reason in _in_turn(grid, waiting, failed) if grid.jobs <= 1 else _side_by_side(grid, waiting, failed):
        if reason is not None:
            failed.add(cell.path)
        after_cell(cell, read_record(cell), reason)
    if not failed:
        _tidy_up(grid)


def _finished(grid: Grid, cell: Cell) -> bool:
    """Whether there is nothing to do: its record is there, and its model where somebody waits for that."""
    if read_record(cell) is None:
        return False
    later = [c for c in grid.cells() if c.method.after == cell.method.name and (c.set, c.seed) == (cell.set, cell.seed)]
    return cell.model.is_dir() or all(read_record(c) is not None for c in later)


def _without_references(name: str, waiting: list[Cell]) -> list[Cell]:
    """The cells that need no labels, of a set that has none."""
    left_out = [cell for cell in waiting if cell.set == name and cell.method.uses_labels]
    if left_out:
        methods = ", ".join(dict.fromkeys(cell.method.name for cell in left_out))
        log.warning("%s has no labels, so %s are left out", name, methods)
    return [cell for cell in waiting if cell not in left_out]


def _open_for_all(grid: Grid, asked: SetOfImages, waiting: list[Cell]) -> Opened:
    """Compute what the cells of a set share before any process needs it: features and initial heads."""
    log.info("%s: features and initial heads, common to all methods", asked.name)
    opened = _opened(grid.folder, asked)
    for source in asked.outside:  # a mistyped name is told now, not after hours
        open_images(
            source, opened.prepared.backbone.input_size, labels=False, root=opened.prepared.settings.data_root, limit=1
        )
    for seed in sorted({cell.seed for cell in waiting if cell.set == asked.name}):
        _, augment = opened.start(seed)
        if opened.prepared.settings.freeze_backbone:
            opened.views(opened.frozen_views_config(seed, augment))
    return opened


_memory: dict[tuple[Path, str], Opened] = {}


def _opened(folder: Path, asked: SetOfImages) -> Opened:
    """The set as this process has opened it; one is kept at a time."""
    key = (folder, asked.name)
    if key not in _memory:
        _memory.clear()
        _memory[key] = open_set(asked, folder / SHARED / slug(asked.name))
    return _memory[key]


def _work(folder: Path, asked: SetOfImages, cell: Cell, earlier: Cell | None, keep_model: bool) -> str | None:
    """Run one cell; returns why it failed, if it did for a reason that a user can mend."""
    try:
        run_cell(cell, _opened(folder, asked), earlier, keep_model)
    except UserError as error:
        return str(error)
    return None


def _arguments(grid: Grid, cell: Cell) -> tuple[Path, SetOfImages, Cell, Cell | None, bool]:
    needed = any(later.after == cell.method.name for later in grid.methods)
    return grid.folder, grid.asked(cell), cell, grid.earlier(cell), grid.keep_models or needed


def _in_turn(grid: Grid, waiting: list[Cell], failed: set[Path]) -> Iterator[tuple[Cell, str | None]]:
    for cell in waiting:
        earlier = grid.earlier(cell)
        if earlier is not None and earlier.path in failed:
            yield cell, f"{earlier.method.name} failed, which it goes on with"
        else:
            yield cell, _work(*_arguments(grid, cell))


def _side_by_side(grid: Grid, waiting: list[Cell], failed: set[Path]) -> Iterator[tuple[Cell, str | None]]:
    """Cells in processes of their own, each as soon as the one it goes on with is done."""
    threads = max(1, (os.cpu_count() or 1) // grid.jobs)
    todo, running = list(waiting), dict[Future[str | None], Cell]()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(grid.jobs, context, _begin_worker, (threads,)) as pool:
        try:
            while todo or running:
                busy = {cell.path for cell in [*todo, *running.values()]}
                for cell in list(todo):
                    earlier = grid.earlier(cell)
                    if earlier is not None and earlier.path in failed:
                        todo.remove(cell)
                        yield cell, f"{earlier.method.name} failed, which it goes on with"
                    elif len(running) < grid.jobs and (earlier is None or earlier.path not in busy):
                        todo.remove(cell)
                        running[pool.submit(_work, *_arguments(grid, cell))] = cell
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            names = ", ".join(f"{cell.method.name} (seed {cell.seed})" for cell in running.values())
            raise UserError(
                f"a process was killed while running {names or 'a cell'} (out of memory?); finished cells are kept: "
                f"run the same command again with --jobs {max(1, grid.jobs - 1)}"
            ) from error
        except BaseException:
            # Nobody waits for cells that are under way when the user has had enough.
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _begin_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides

    def follow_the_first_process() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow_the_first_process, daemon=True).start()


def _tidy_up(grid: Grid) -> None:
    """Take away what was kept for later cells only: models, and cached views, which can be large."""
    for path in (grid.folder / SHARED).glob("*/views-seed*.pt"):
        path.unlink(missing_ok=True)
    if not grid.keep_models:
        for cell in grid.cells():
            shutil.rmtree(cell.model, ignore_errors=True)
