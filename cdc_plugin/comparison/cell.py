"""Run one cell of a comparison: a method, a seed and a set of images become a record of figures on disk."""

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
from torch import nn

from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.comparison.datasets import OpenedDataset
from cdc_plugin.comparison.methods import Method, replace_shares
from cdc_plugin.comparison.train import PLAIN_ONLY, TRAININGS, Outcome, TrainingSetup
from cdc_plugin.data.atomic import read_json_object, write_text
from cdc_plugin.data.images import open_images
from cdc_plugin.data.sources.features import describe_features
from cdc_plugin.errors import OutputError
from cdc_plugin.evaluation.records import SCHEMA_VERSION, measure_head
from cdc_plugin.metrics import summary_hard, summary_outliers
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.training.features import extract_features, head_probabilities
from cdc_plugin.training.runtime import Runtime


@dataclass(frozen=True)
class Cell:
    """One run of the grid: its record lies at ``path``, its model, if kept, in ``model``."""

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


def build_cell(out: Path, set_name: str, method: Method, seed: int) -> Cell:
    """Return the cell of a method and a seed on a set, in its folder below ``out``."""
    return Cell(set_name, method, seed, out / "cells" / slugify(set_name) / slugify(method.name))


def slugify(name: str) -> str:
    """Return a name as a folder; names that have to be changed stay distinct.

    >>> slugify("cdc"), slugify("cdc:hidden=256")
    ('cdc', 'cdc-hidden-256-b96bfa')
    """
    plain = re.sub(r"[^\w.+-]+", "-", name).strip("-.")[:60]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def read_record(cell: Cell) -> dict[str, Any] | None:
    """Return the record of a finished cell, else None."""
    if not cell.path.exists():
        return None
    try:
        record = read_json_object(cell.path)
    except (OSError, ValueError) as error:
        raise OutputError(f"{cell.path} cannot be read ({error}); remove it, and the cell runs again") from error
    return record if record.get("schema_version") == SCHEMA_VERSION else None


def run_cell(cell: Cell, opened: OpenedDataset, earlier: Cell | None, keep_model: bool) -> dict[str, Any]:
    """Train, measure and write the record; the model is written first, so that a record implies it."""
    began = time.monotonic()
    history: list[dict[str, float]] = []
    setup = _build_setup(cell, opened, earlier, history)
    on_gpu = setup.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # of the cell before
        torch.cuda.reset_peak_memory_stats(setup.device)
    outcome = TRAININGS[cell.method.training](setup)
    seconds = time.monotonic() - began
    memory = torch.cuda.max_memory_reserved(setup.device) / 2**20 if on_gpu else None
    if earlier is not None and (earlier_record := read_record(earlier)):
        seconds += earlier_record["seconds"]
    cell.folder.mkdir(parents=True, exist_ok=True)
    if keep_model and outcome.heads:
        cell.model.mkdir(exist_ok=True)
        first, last = (copy.deepcopy(head) for head in (outcome.heads[0], outcome.heads[-1]))
        provenance = {"tool": "cdc_plugin", "method": cell.method.name, "seed": cell.seed, "set": cell.set}
        Clusterer(setup.backbone, first, last).save(cell.model, provenance)
    record = {
        "schema_version": SCHEMA_VERSION,
        "kind": "comparison_cell",
        "set": cell.set,
        "method": cell.method.name,
        "group": cell.method.group,
        "uses_labels": cell.method.uses_labels,
        "seed": cell.seed,
        "images": len(setup.images),
        "noun": setup.images.noun,
        "clusters": setup.config.clusters,
        "labels": setup.images.labels is not None,
        "rows": _measure(cell.method.rows, outcome, setup, opened.request.outside),
        "selected": next((epoch["selected"] for epoch in reversed(history) if "selected" in epoch), None),
        "seconds": round(seconds, 2),
        "parameters": _count_parameters(setup.backbone, outcome) if outcome.heads else None,
        "gpu_memory": memory,
        "history": history,
        "settings": asdict(setup.config),
    }
    write_text(cell.path, json.dumps(record) + "\n")
    return record


def _build_setup(
    cell: Cell, opened: OpenedDataset, earlier: Cell | None, history: list[dict[str, float]]
) -> TrainingSetup:
    """Return all that a training is given, in copies of its own."""
    prepared = opened.prepared
    device = prepared.runtime.device
    start, augment = opened.load_start(cell.seed)
    settings = replace_shares(cell.method.settings, prepared.settings.batch_size, prepared.settings.mini_clusters)
    backbone, heads = copy.deepcopy(prepared.backbone), prepared.loaded.heads
    if earlier is None:
        features = prepared.features.map(lambda block: block)
    else:
        model = load_model(earlier.model).to(device)
        backbone, heads = model.backbone, (model.calibration_head,)
        backbone.to(memory_format=torch.channels_last)
        features = extract_features(backbone, prepared.images, prepared.runtime)
    head_clusters = tuple(int(head.clusters) for head in heads)  # type: ignore[arg-type]
    config = replace(opened.resolve_settings(settings, cell.seed, head_clusters), augment=augment)
    frozen = config.freeze_backbone and bool(config.epochs) and cell.method.training not in PLAIN_ONLY
    shared = start.clustering  # built for every method with this seed
    fits = (shared.layers[0][2], shared.clusters) == (config.hidden, config.clusters)  # type: ignore[index]
    begin = start if earlier is None and config.init == "prototypes" and fits else None
    own_heads = tuple(copy.deepcopy(head).to(device) for head in heads)
    views = opened.load_views(augment) if frozen else None
    images, note = prepared.images, history.append
    return TrainingSetup(config, backbone, own_heads, images, features, device, begin, views, note)


def _count_parameters(backbone: nn.Module, outcome: Outcome) -> int:
    return sum(weight.numel() for weight in nn.ModuleList([backbone, *outcome.heads]).parameters())


def _measure(
    names: tuple[str, ...], outcome: Outcome, setup: TrainingSetup, outside: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return the figures of every row, and how well each detects outside images (max softmax, as in the paper)."""
    chosen = slice(None) if outcome.reported is None else outcome.reported.numpy()
    truth = None if setup.images.labels is None else setup.images.labels[chosen]
    if outcome.assignment is not None:
        clusters = max(setup.config.clusters, int(outcome.assignment.max()) + 1)  # some find the number themselves
        figures: dict[str, Any] = {"cluster_sizes": torch.bincount(outcome.assignment, minlength=clusters).tolist()}
        if truth is not None:
            figures |= summary_hard(outcome.assignment.numpy(), truth, clusters)
    elif outcome.probs is not None:
        figures = measure_head(outcome.probs[chosen].astype(np.float32), truth)
    if not outcome.heads:
        return [{"label": names[-1], "figures": figures, "outside": []}]

    runtime, heads = Runtime(setup.device, setup.config.precision), outcome.heads[-len(names) :]
    features = extract_features(setup.backbone, setup.images, runtime)
    probs = [head_probabilities(head, features) for head in heads]
    rows: list[dict[str, Any]] = [
        {"label": name, "figures": measure_head(p[chosen], truth), "outside": []}
        for name, p in zip(names, probs, strict=True)
    ]
    for name in outside:
        source = describe_features(name, labels=False) if setup.backbone.takes_features else name
        images = open_images(source, setup.backbone.input_size, labels=False, root=setup.config.data_root)
        outside_features = extract_features(setup.backbone, images, runtime)
        for row, head, p in zip(rows, heads, probs, strict=True):
            scores = summary_outliers(p.max(axis=1), head_probabilities(head, outside_features).max(axis=1))
            row["outside"].append({"data": Path(str(name)).name, "images": len(images), "scores": scores})
    return rows
