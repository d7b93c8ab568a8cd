"""Predictions of a model, and what can be said of them with and without labels."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdc_plugin.checkpoints.load import Loaded
from cdc_plugin.config.load import to_yaml
from cdc_plugin.config.recipes import DEMO_BACKBONE
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.images import ImageSet
from cdc_plugin.metrics import summary, summary_hard, summary_unlabelled
from cdc_plugin.metrics.over_seeds import Row
from cdc_plugin.training.run_folder import CONFIG

SCHEMA_VERSION = 1  # of every JSON file that the commands write: raised when a key changes its name or meaning


@dataclass(frozen=True)
class Report:
    """The outcome of a run: ``metrics`` is the content of report.json, ``predictions`` that of the CSV.

    ``predictions`` is a record array: ``report.predictions["cluster"]``, or ``pandas.DataFrame(...)`` of it.
    """

    metrics: dict[str, Any]
    predictions: np.recarray
    folder: Path | None = field(default=None)


def start_record(kind: str, images: ImageSet, clusters: int) -> dict[str, Any]:
    """Return the part of report.json that every kind of report has; report/report.schema.json describes all of it.

    Args:
        kind: "refinement" or "evaluation".
    """
    labels = images.labels
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "images": len(images),
        "clusters": clusters,
        "classes": None if labels is None else len(np.unique(labels)),
        "data": images.source,
        "labels": labels is not None,
        "units": "fractions of 1; ECE has 15 equal-width bins",
        "skipped": [{"image": name, "reason": reason} for name, reason in images.skipped],
    }


def run_record(
    images: ImageSet,
    *,
    clusters: int,
    epochs: int,
    seed: int,
    before: dict[str, Any],
    after: dict[str, Any],
    old_model: dict[str, Any] | None,
    label_free: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """Return the content of the report.json of a refinement.

    Args:
        before, after: of `measure`, at the start and at the end of the run.
        old_model: figures of the model that was retrofitted, where there was one.
        label_free: the quality card.
    """
    return start_record("refinement", images, clusters) | {
        "epochs": epochs,
        "seed": seed,
        "before": before,
        "after": after,
        "old_model": old_model,
        "label_free": label_free,
        "seconds": round(seconds, 1),
    }


def describe_run(config: RefineConfig, folder: Path) -> dict[str, Any]:
    """Return what the page says of a run beside its figures: backbone, settings, and the command that repeats it.

    There is no command for arrays and modules that only a Python program can give.
    """
    backbone = "the embedded one of the demo" if config.backbone == str(DEMO_BACKBONE) else config.backbone
    in_python = any(value is None or value.startswith("<") for value in (config.backbone, config.data))
    words = ["cdc-refine", "--recipe", str(folder / CONFIG), "--out", f"{folder}-again"]
    return {
        "backbone": f"{backbone}{' (frozen)' if config.freeze_backbone else ''}",
        "settings": to_yaml(config),
        "command": None if in_python else shlex.join(words),
    }


def comparison_record(rows: Sequence[Row], verdicts: Sequence[str], failures: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the report.json of a comparison of methods.

    A column such as ``AUROC textures`` holds a name that the user has chosen: the record has that name as a value.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "method_comparison",
        "rows": [asdict(row) | _values_record(row) for row in rows],
        "verdicts": list(verdicts),
        "failures": [{"cell": cell, "reason": reason} for cell, reason in failures.items()],
    }


def _values_record(row: Row) -> dict[str, Any]:
    outside: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for column, value in row.values.items():
        metric, _, data = column.partition(" ")
        (outside.setdefault(data, {}) if data else own)[metric] = None if value is None else asdict(value)
    return {"values": own, "outside": [{"data": data, "values": values} for data, values in outside.items()]}


def measure(
    clustering: NDArray[np.float32],
    calibration: NDArray[np.float32],
    kmeans_labels: NDArray[np.int64],
    labels: NDArray[np.int64] | None,
) -> dict[str, dict[str, Any]]:
    """Figures of k-means and both heads: ACC, NMI, ARI and ECE with labels; confidence and sizes always."""
    clusters = calibration.shape[1]
    found: dict[str, dict[str, Any]] = {}
    sizes = np.bincount(kmeans_labels, minlength=clusters)
    found["kmeans"] = {"cluster_sizes": sizes.tolist()}
    if labels is not None:
        found["kmeans"] |= {**summary_hard(kmeans_labels, labels, clusters), "ECE": None}
    found["clustering_head"] = measure_head(clustering, labels)
    found["calibration_head"] = measure_head(calibration, labels)
    return found


def measure_head(probs: NDArray[np.float32], labels: NDArray[np.int64] | None) -> dict[str, Any]:
    """Every figure of one head's probabilities (N, C); without labels those of `summary_unlabelled`."""
    return summary_unlabelled(probs) if labels is None else summary(probs, labels)


def old_record(old: Any, initial: Any, loaded: Loaded, images: ImageSet) -> dict[str, Any] | None:
    """Return the figures of the model that is retrofitted, and its assignment to compare the final one with."""
    if old is None:
        return None
    figures = measure_head(old, images.labels)
    figures |= {"writer": loaded.origin.writer, "clusters": old.shape[1]}
    figures["agreement_before"] = float((initial.argmax(axis=1) == old.argmax(axis=1)).mean())
    return {"figures": figures, "assignment": torch.from_numpy(old.argmax(axis=1))}
