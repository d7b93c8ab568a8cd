"""What the page of a finished ``cdc-refine`` run shows."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.config.load import to_yaml
from cdc_plugin.config.recipes import DEMO_BACKBONE
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.images import ImageSet
from cdc_plugin.report.page_data import PageData
from cdc_plugin.report.words import TITLES
from cdc_plugin.training.run_folder import CONFIG


def findings_of_run(
    config: RefineConfig,
    folder: Path,
    metrics: dict[str, Any],
    table: np.recarray,
    probs: NDArray[np.float32],
    images: ImageSet,
    history: list[dict[str, Any]],
) -> PageData:
    """``metrics`` is the content of report.json, ``probs`` (N, C) are those of the calibration head."""
    return PageData(
        title=f"{Path(images.source).name or images.source} in {metrics['clusters']} clusters",
        facts=_facts(config, metrics, images, history),
        rows=rows_of_run(metrics),
        diagrams=diagrams_of_run(metrics),
        label_free=metrics["label_free"],
        table=table,
        probs=probs,
        images=images,
        history=history,
        settings=to_yaml(config),
        command=_command(config, folder),
        old_model=metrics.get("old_model"),
    )


def rows_of_run(metrics: dict[str, Any]) -> list[tuple[str, dict[str, Any] | None, dict[str, Any] | None]]:
    """The before/after table: an old model stands before everything, where there was one."""
    before, after = metrics["before"], metrics["after"]
    rows = [(TITLES[key], figures, after.get(key)) for key, figures in before.items()]
    old = metrics.get("old_model")
    return rows if old is None else [(f"old model ({old['writer']})", old, None), *rows]


def diagrams_of_run(metrics: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Reliability of the old model, of the start and of both heads at the end."""
    old = metrics.get("old_model")
    shown = [("Old model", old)] if old is not None else []
    return [
        *shown,
        ("Calibration head, at the start", metrics["before"]["calibration_head"]),
        ("Clustering head, at the end", metrics["after"]["clustering_head"]),
        ("Calibration head, at the end", metrics["after"]["calibration_head"]),
    ]


def _facts(
    config: RefineConfig, metrics: dict[str, Any], images: ImageSet, history: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    # Of all epochs: a resumed run has computed some of them before.
    minutes, seconds = divmod(round(sum(epoch.get("seconds", 0) for epoch in history)), 60)
    unreadable = f", {len(images.skipped):,} could not be read" if images.skipped else ""
    labels = "for this report only" if metrics["labels"] else "none"
    backbone = "the embedded one of the demo" if config.backbone == str(DEMO_BACKBONE) else config.backbone
    return [
        ("images", f"{len(images):,} from {images.source}{unreadable}"),
        ("clusters", str(metrics["clusters"])),
        ("backbone", f"{backbone}{' (frozen)' if config.freeze_backbone else ''}"),
        ("training", f"{config.epochs} epochs, seed {config.seed}, {minutes} min {seconds:02d} s"),
        ("labels", labels),
    ]


def _command(config: RefineConfig, folder: Path) -> str | None:
    """The command that makes the same run; none for arrays and modules that only a Python program can give."""
    given = (config.backbone, config.data)
    if any(value is None or value.startswith("<") for value in given):
        return None
    return shlex.join(["cdc-refine", "--recipe", str(folder / CONFIG), "--out", f"{folder}-again"])
