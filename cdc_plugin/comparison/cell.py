"""One cell of a comparison: a method, a seed and a set of images become a record of figures, on disk and for good."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.comparison.datasets import Opened
from cdc_plugin.comparison.methods import Method, replace_shares
from cdc_plugin.comparison.train import TRAININGS, Outcome, TrainingSetup, fits_config
from cdc_plugin.config.resolve import ResolvedConfig
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.data.images import ImageSet, open_images
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.report_record import measure_head
from cdc_plugin.metrics import summary_hard, summary_outliers
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.training.features import extract_features, head_probabilities
from cdc_plugin.training.runtime import Runtime

VERSION = 1


@dataclass(frozen=True)
class Cell:
    """Which one: its record lies at ``path``, its model, where it is kept, in ``model``."""

    set: str
    method: Method
    seed: int
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"seed{self.seed}.json"

    @property
    def model(self) -> Path:
        return self.folder / f"seed{self.seed}"


def cell_of(out: Path, set_name: str, method: Method, seed: int) -> Cell:
    return Cell(set_name, method, seed, out / "cells" / slug(set_name) / slug(method.name))


def slug(name: str) -> str:
    """A name as a folder; those that need to be changed for it stay distinct."""
    plain = re.sub(r"[^\w.+-]+", "-", name).strip("-.")[:60]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def read_record(cell: Cell) -> dict[str, Any] | None:
    """The record of a finished cell, else None."""
    try:
        record = json.loads(cell.path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{cell.path} cannot be read ({error}); remove it, the cell is run again") from error
    return record if record.get("version") == VERSION else None


def run_cell(cell: Cell, opened: Opened, earlier: Cell | None, keep_model: bool) -> dict[str, Any]:
    """Train, measure and write the record; the model comes first, so that a record promises it."""
    began = time.monotonic()
    history: list[dict[str, float]] = []
    bench = bench_of(cell, opened, earlier, history)
    outcome = TRAININGS[cell.method.training](bench)
    seconds = time.monotonic() - began
    if earlier is not None:
        before = read_record(earlier)
        seconds += before["seconds"] if before else 0.0
    cell.folder.mkdir(parents=True, exist_ok=True)
    if keep_model and outcome.heads:
        _save(bench.backbone, outcome, cell)
    record = {
        "version": VERSION,
        "set": cell.set,
        "method": cell.method.name,
        "group": cell.method.group,
        "uses_labels": cell.method.uses_labels,
        "seed": cell.seed,
        "images": len(bench.images),
        "clusters": bench.config.clusters,
        "labels": bench.images.labels is not None,
        **measured(cell.method, outcome, bench, opened),
        "selected": next((epoch["selected"] for epoch in reversed(history) if "selected" in epoch), None),
        "seconds": round(seconds, 2),
        "history": history,
        "settings": asdict(bench.config),
    }
    text = json.dumps(record) + "\n"
    write_atomically(cell.path, lambda path: path.write_text(text, encoding="utf-8"))
    return record


def bench_of(cell: Cell, opened: Opened, earlier: Cell | None, history: list[dict[str, float]]) -> TrainingSetup:
    """All that a training is given, in copies of its own."""
    prepared = opened.prepared
    start, augment = opened.start(cell.seed)
    assert material.config.batch_size is not None
    settings = replace_shares(cell.method.settings, material.config.batch_size)
    backbone, heads, features = copy.deepcopy(material.backbone), material.loaded.heads, opened.features
    if earlier is not None:
        model = load_model(earlier.model).to(prepared.runtime.device)
        backbone, heads = model.backbone, (model.calibration_head,)
        backbone.to(memory_format=torch.channels_last)
        features = extract_features(backbone, prepared.images, prepared.runtime)
    head_clusters = tuple(int(head.clusters) for head in heads)  # type: ignore[arg-type]
    config = replace(opened.resolved(settings, cell.seed, head_clusters), augment=augment)
    frozen = config.freeze_backbone and bool(config.epochs)
    return TrainingSetup(
        config,
        backbone,
        tuple(copy.deepcopy(head).to(prepared.runtime.device) for head in heads),
        prepared.images,
        features,
        prepared.runtime.device,
        start if earlier is None and fits_config(start, config) else None,
        opened.views(config) if frozen else None,
        history.append,
    )


def measured(method: Method, outcome: Outcome, bench: TrainingSetup, opened: Opened) -> dict[str, Any]:
    """Figures of every row, and how well each tells images from elsewhere (max softmax, the paper's protocol)."""
    labels = bench.images.labels
    rows = torch.arange(len(bench.images)) if outcome.reported is None else outcome.reported
    truth = None if labels is None else labels[rows.numpy()]
    if outcome.assignment is not None:
        return {"rows": [{"label": method.rows[-1], "figures": _hard(outcome.assignment, truth, bench.config)}]}
    if outcome.probs is not None:
        figures = measure_head(outcome.probs[rows.numpy()].astype(np.float32), truth)
        return {"rows": [{"label": method.rows[-1], "figures": figures}]}
    features = _features(bench, bench.images)
    heads = outcome.heads[-len(method.rows) :]
    probs = [head_probabilities(head, features) for head in heads]
    found = [
        {"label": label, "figures": measure_head(p[rows.numpy()], truth)}
        for label, p in zip(method.rows, probs, strict=True)
    ]
    outside = []
    for source in opened.asked.outside:
        others = open_images(source, bench.backbone.input_size, labels=False, root=bench.config.data_root)
        strange = _features(bench, others)
        scores = {
            label: summary_outliers(p.max(axis=1), head_probabilities(head, strange).max(axis=1))
            for label, head, p in zip(method.rows, heads, probs, strict=True)
        }
        outside.append({"data": Path(str(source)).name, "images": len(others), "scores": scores})
    return {"rows": found, "outside": outside}


def _features(bench: TrainingSetup, images: ImageSet) -> Tensor:
    return extract_features(bench.backbone, images, Runtime(bench.device, bench.config.precision))


def _hard(assignment: Tensor, labels: NDArray[np.int64] | None, config: ResolvedConfig) -> dict[str, Any]:
    sizes = torch.bincount(assignment, minlength=config.clusters).tolist()
    figures: dict[str, Any] = {"cluster_sizes": sizes}
    if labels is not None:
        figures |= summary_hard(assignment.numpy(), labels, config.clusters)
    return figures


def _save(backbone: Backbone, outcome: Outcome, cell: Cell) -> None:
    cell.model.mkdir(exist_ok=True)
    first, last = (copy.deepcopy(head) for head in (outcome.heads[0], outcome.heads[-1]))
    provenance = {"tool": "cdc_plugin", "method": cell.method.name, "seed": cell.seed, "set": cell.set}
    Clusterer(backbone, first, last).save(cell.model, provenance)
