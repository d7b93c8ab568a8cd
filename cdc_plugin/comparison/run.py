"""Run a comparison from the request to tables and a page: read `run_comparison` first."""

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from cdc_plugin.comparison.cell import Cell, read_record
from cdc_plugin.comparison.datasets import DatasetRequest
from cdc_plugin.comparison.export import records_csv, to_csv, to_latex, to_markdown
from cdc_plugin.comparison.grid import Grid, add_first_stages, run_grid
from cdc_plugin.comparison.methods import Method
from cdc_plugin.comparison.request import parse_methods, parse_seeds
from cdc_plugin.comparison.table import Row, collect
from cdc_plugin.comparison.verdict import judge_rows
from cdc_plugin.core.torch_defaults import torch_defaults
from cdc_plugin.data.atomic import read_json_object, write_text
from cdc_plugin.errors import COMMAND_LINE, ConfigError, OutputError, join_words, option
from cdc_plugin.evaluation.records import SCHEMA_VERSION, comparison_record
from cdc_plugin.report.grid_page import render_grid
from cdc_plugin.training.progress import CellProgress, log, log_to
from cdc_plugin.training.run_folder import COMPARISON, LOG, PAGE, REPORT, comparison_folder
from cdc_plugin.training.runtime import choose_device
from cdc_plugin.training.signals import add_hint


@dataclass(frozen=True)
class MethodComparison:
    """The result of a comparison: rows of the table, sentences on them, cells that failed and why."""

    rows: list[Row]
    verdicts: list[str]
    failures: dict[str, str]
    folder: Path


@torch_defaults()
def compare_methods(
    backbone: str | Path | nn.Module,
    data: Any,
    methods: str | Sequence[str],
    seeds: int | Sequence[int] = 3,
    clusters: int | None = None,
    out: str | Path | None = None,
    *,
    outside: Sequence[str] = (),
    jobs: int = 1,
    overwrite: bool = False,
    **overrides: Any,
) -> MethodComparison:
    """Run methods side by side on your own images and checkpoint; labels, if any, are used for the report only.

    Args:
        backbone, data, clusters: as for `cdc_plugin.refine`.
        methods: names as ``cdc-compare --list-methods`` prints them, in a list or separated by commas.
        seeds: how many, or which.
        out: result folder; the same call resumes what is in it.
        outside: images that belong to none of the clusters.
        overrides: any field of `RefineConfig`, for all methods.
    """
    module = backbone if isinstance(backbone, nn.Module) else None
    images = None if isinstance(data, (str, Path)) else data
    flags = {
        **overrides,
        "backbone": f"<{type(backbone).__name__}>" if module is not None else str(backbone),
        "data": f"<{type(data).__name__}>" if images is not None else str(data),
        "clusters": clusters,
    }
    name = Path(str(data)).stem if images is None else "images"
    request = DatasetRequest(name, flags=flags, outside=tuple(outside), module=module, images=images)
    chosen = parse_seeds(str(seeds)) if isinstance(seeds, int) else tuple(seeds)
    names = [methods] if isinstance(methods, str) else list(methods)
    return run_comparison([request], parse_methods(names), chosen, out, jobs=jobs, overwrite=overwrite)


def run_comparison(
    sets: Sequence[DatasetRequest],
    methods: Sequence[Method],
    seeds: Sequence[int],
    out: str | Path | None,
    *,
    jobs: int | None = None,
    keep_models: bool = False,
    overwrite: bool = False,
    title: str = "",
    columns: Sequence[str] = (),
    command: str | None = None,
) -> MethodComparison:
    """Check everything, run the cells that are not finished yet, write tables and page."""
    stages = add_first_stages(list(methods))
    configs = [request.build_config() for request in sets]
    for config in configs:
        if any(method.uses_labels for method in stages) and not config.labels:
            names = ", ".join(method.name for method in stages if method.uses_labels)
            raise ConfigError(f"{names} need labels, but labels are ignored; omit these methods or allow labels")
    with comparison_folder(out, f"compare-{sets[0].name}", overwrite) as folder:
        _record_request(folder, sets, overwrite)
        grid = Grid(tuple(sets), tuple(stages), tuple(seeds), folder, 1, keep_models)
        if not jobs:  # one process per core on a CPU, and one on a GPU, which they would share
            on_cpu = choose_device(configs[0].device).type == "cpu"
            jobs = min(len(grid.cells()), os.cpu_count() or 1) if on_cpu else 1
        grid = replace(grid, jobs=jobs)
        try:
            with log_to(folder / LOG):
                failures = _run_cells(grid)
        except KeyboardInterrupt as error:
            program, *typed = COMMAND_LINE.get() or ("this call and",)
            words = [*(word for word in typed if not word.startswith("--ov")), "--out", str(folder)]  # not --overwrite
            again = f"{program} {join_words(words) if typed else option('out', str(folder))}"
            add_hint(error, f"finished cells are kept, continue with: {again}")
            raise
        return write_results(grid, failures, title, columns, command)


def write_results(
    grid: Grid, failures: dict[str, str], title: str, columns: Sequence[str], command: str | None
) -> MethodComparison:
    """Write tables and page of all finished cells."""
    records = [record for cell in grid.cells() if (record := read_record(cell)) is not None]
    rows = collect(records, [method.name for method in grid.methods])
    judged = judge_rows(rows)
    verdicts = [
        f"{name}: {said}" if len(judged) > 1 else said for name, all_said in judged.items() for said in all_said
    ]
    shown = list(columns) or None
    text = {
        "table.csv": to_csv(rows),
        "table.md": to_markdown(rows, shown),
        "table.tex": to_latex(rows, shown),
        "cells.csv": records_csv(records),
        REPORT: json.dumps(comparison_record(rows, verdicts, failures)) + "\n",
    }
    for name, content in text.items():
        write_text(grid.folder / name, content)
    names = ", ".join(request.name for request in grid.sets)
    facts = [
        ("sets", names),
        ("methods", str(len(grid.methods))),
        ("seeds", ", ".join(map(str, grid.seeds))),
        ("finished cells", f"{len(records)} of {len(grid.cells())}"),
        *((f"failed: {name}", reason) for name, reason in failures.items()),
    ]
    noun = "sample" if records and all(record.get("noun") == "sample" for record in records) else "image"
    heading = title or f"{len(grid.methods)} methods on {names}"
    settings = (grid.folder / COMPARISON).read_text(encoding="utf-8")
    write_text(grid.folder / PAGE, render_grid(heading, facts, rows, judged, settings, command, noun))
    return MethodComparison(rows, verdicts, failures, grid.folder)


def _run_cells(grid: Grid) -> dict[str, str]:
    failures: dict[str, str] = {}
    cells = grid.cells()
    finished = sum(read_record(cell) is not None for cell in cells)
    log.info("%d cells, %d of them finished before; %d at a time; in %s", len(cells), finished, grid.jobs, grid.folder)
    progress = CellProgress(len(cells), finished)

    def after_cell(cell: Cell, record: dict[str, Any] | None, reason: str | None) -> None:
        name = f"{cell.set}, {cell.method.name}, seed {cell.seed}"
        if record is None:
            failures[name] = reason or "unknown"
            log.warning("%s failed: %s", name, reason)
            return
        figures = record["rows"][-1]["figures"]
        progress.after_cell(name, {key: figures.get(key) for key in ("ACC", "ECE", "CONF")}, record["seconds"])

    with contextlib.closing(progress):
        run_grid(grid, after_cell)
    return failures


def _record_request(folder: Path, sets: Sequence[DatasetRequest], overwrite: bool) -> None:
    """Write what the comparison runs on; refuse to mix cells of different settings in one table."""
    path = folder / COMPARISON
    records = {
        request.name: {
            "name": request.name,
            "recipe": request.recipe,
            **{key: value for key, value in sorted(request.flags.items()) if value is not None and key != "device"},
            "settings": list(request.overrides),
            "outside": list(request.outside),
        }
        for request in sets
    }
    if overwrite:
        for name in ("cells", "shared"):
            shutil.rmtree(folder / name, ignore_errors=True)
    elif path.is_file():
        try:
            earlier = {record["name"]: dict(record) for record in read_json_object(path)["sets"]}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise OutputError(f"{path} cannot be read ({error}); give another folder") from error
        for name in records.keys() & earlier.keys():
            before, now = earlier[name], records[name]
            if differing := [key for key in {**now, **before} if now.get(key) != before.get(key)]:
                raise OutputError(
                    f"{folder} was started with other settings for {name} ({', '.join(differing)}); choose another "
                    f"folder by {option('out', '...')}, or pass {option('overwrite')}"
                )
        records = {**earlier, **records}
    content = {"schema_version": SCHEMA_VERSION, "kind": "comparison_settings", "sets": list(records.values())}
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")
