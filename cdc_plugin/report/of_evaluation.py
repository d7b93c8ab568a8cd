"""What the pages of ``cdc-evaluate`` show: one model as it is, or several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.data.images import ImageSet
from cdc_plugin.evaluation.models import EvaluatedModel, RunRecord
from cdc_plugin.report.of_run import diagrams_of_run, rows_of_run
from cdc_plugin.report.page_data import ComparedModel, PageData
from cdc_plugin.report.words import TITLES


def findings_of_evaluation(
    subject: EvaluatedModel,
    run: RunRecord | None,
    metrics: dict[str, Any],
    table: np.recarray,
    probs: NDArray[np.float32],
    images: ImageSet,
    command: str | None,
) -> PageData:
    """``metrics`` is the content of report.json, ``run`` the record of the run that refined it on these images."""
    after = metrics["after"]
    if metrics["before"]:
        rows, diagrams = rows_of_run(metrics), diagrams_of_run(metrics)
    else:
        rows = [(TITLES[key], None, figures) for key, figures in after.items()]
        diagrams = [(TITLES[key], figures) for key, figures in after.items() if key != "kmeans"]
    return PageData(
        title=f"{Path(images.source).name} in {metrics['clusters']} clusters",
        facts=_facts(subject, metrics),
        rows=rows,
        diagrams=diagrams,
        label_free=metrics["label_free"],
        table=table,
        probs=probs,
        images=images,
        history=run.history if run is not None else [],
        settings=run.settings if run is not None else None,
        command=command,
        outside=metrics["outside"],
        old_model=metrics["old_model"],
    )


def compared_model(metrics: dict[str, Any]) -> ComparedModel:
    """One column of the side-by-side page, from the content of the model's own report.json."""
    return ComparedModel(
        name=metrics["model"]["name"],
        writer=metrics["model"]["writer"],
        clusters=metrics["clusters"],
        heads=[(TITLES[key], figures) for key, figures in metrics["after"].items() if key != "kmeans"],
        label_free=metrics["label_free"],
        outside=metrics["outside"],
    )


def comparison_title(metrics: list[dict[str, Any]]) -> str:
    return f"{Path(metrics[0]['data']).name}: {', '.join(each['model']['name'] for each in metrics)}"


def comparison_facts(metrics: list[dict[str, Any]]) -> list[tuple[str, str]]:
    first = metrics[0]
    labels = f"{first['classes']} classes, for this report only" if first["labels"] else "none"
    models = [(each["model"]["name"], each["model"]["path"] or "given in Python") for each in metrics]
    return [("images", f"{first['images']:,} from {first['data']}"), ("labels", labels), *models]


def _facts(subject: EvaluatedModel, metrics: dict[str, Any]) -> list[tuple[str, str]]:
    backbone = subject.model.backbone
    mean, std = (" ".join(f"{value:.3g}" for value in values.tolist()) for values in (backbone.mean, backbone.std))
    classes, skipped = metrics["classes"], len(metrics["skipped"])
    unreadable = f", {skipped:,} could not be read" if skipped else ""
    return [
        ("images", f"{metrics['images']:,} from {metrics['data']}{unreadable}"),
        ("clusters", str(metrics["clusters"])),
        ("model", f"{subject.path or 'given in Python'} ({subject.writer})"),
        ("network", f"{subject.network}; input {backbone.input_size} px, mean {mean}, std {std}"),
        ("labels", "none" if classes is None else f"{classes} classes, for this report only"),
    ]
