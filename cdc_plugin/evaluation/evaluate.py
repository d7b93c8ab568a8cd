"""Evaluate any clustering model on any images, as it is. Read `evaluate` first.

Nothing is trained or changed, and ground truth is for the report only.
"""

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cdc_plugin.checkpoints.infer.resolve import adopt_native_size, resolve_input
from cdc_plugin.data.atomic import write_text
from cdc_plugin.data.images import ImageSet, describe_source, open_images, storage_size
from cdc_plugin.errors import ConfigError, DataError, option
from cdc_plugin.evaluation.models import EvaluatedModel, distinct_names, open_model
from cdc_plugin.evaluation.outputs import (
    cluster_by_kmeans,
    measure_outputs,
    outlier_reference,
    quality_card,
    run_model,
    score_outside,
)
from cdc_plugin.evaluation.quality import find_trusted
from cdc_plugin.evaluation.records import (
    SCHEMA_VERSION,
    Report,
    build_prediction_table,
    compute_outlier_columns,
    start_record,
    write_table,
)
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.report.models_page import render_comparison
from cdc_plugin.report.run_page import collect_page, render_page
from cdc_plugin.training.progress import log, show_progress
from cdc_plugin.training.run_folder import PAGE, PREDICTIONS, REPORT, evaluation_folder
from cdc_plugin.training.runtime import choose_device


@dataclass(frozen=True)
class Task:
    """The images that every model of an evaluation is run on."""

    data: Any
    ood: tuple[Any, ...]
    root: str | None  # folder of named data sets
    labels: bool
    clusters: int  # the largest number of clusters of any model; at least as many images are needed
    device: torch.device


def evaluate(
    model: str | Path | Clusterer,
    data: Any = None,
    ood: Any = (),
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    head: int | None = None,
    format: str | None = None,
    arch: str | None = None,
    labels: bool = True,
    device: str = "auto",
) -> Report:
    """Write report.html, report.json and predictions.csv of a model as it is.

    Args:
        model: a result folder of ``cdc-refine``, a checkpoint of SCAN, SeCu and others, or a `Clusterer`.
        data: as for ``refine``; if left out, the images that the model was refined on.
        ood: one or several sets of images that belong to none of the clusters, to see whether the model notices.
        out: folder for the files; a new one below ``cdc-runs`` if left out.
        head, format, arch: for checkpoints of other frameworks, where the file does not say.
        labels: False ignores class sub-folders and label arrays.
    """
    evaluated = open_model(model, format=format, arch=arch, head=head)
    hints = {"format": format, "arch": arch, "head": head}
    needless = [option(name, value) for name, value in hints.items() if value is not None]
    if needless and not evaluated.foreign:
        raise ConfigError(f"{evaluated.path or 'the model'} states its own network and heads; leave {needless[0]} out")
    task = _build_task([evaluated], data, ood, labels, device)
    with evaluation_folder(out, f"{evaluated.name}-evaluation", overwrite) as folder:
        return _evaluate_one(evaluated, task, folder)


def compare(
    models: Sequence[str | Path | Clusterer],
    data: Any = None,
    ood: Any = (),
    out: str | Path | None = None,
    *,
    names: Sequence[str] = (),
    overwrite: bool = False,
    head: int | None = None,
    format: str | None = None,
    arch: str | None = None,
    labels: bool = True,
    device: str = "auto",
) -> list[Report]:
    """Evaluate several models on the same images: each in a sub-folder of its name, plus one page that compares them.

    Args:
        data: if left out, the images of the first model that states what it was refined on.
        names: a name for each model.
        head, format, arch: for those models that are checkpoints of other frameworks.
    """
    if len(models) < 2:
        raise ConfigError("a comparison needs at least two models; name another one")
    if names and (len(names) != len(models) or len(set(names)) < len(names)):
        raise ConfigError(f"{len(models)} models need as many different names; found {', '.join(names)}")
    if any(name in ("", "..") or Path(name).name != name for name in names):
        raise ConfigError(f"names of models become folders and cannot contain a slash; found {', '.join(names)}")
    opened = [open_model(model, format=format, arch=arch, head=head) for model in models]
    chosen = names or distinct_names(opened)
    opened = [replace(evaluated, name=name) for evaluated, name in zip(opened, chosen, strict=True)]
    task = _build_task(opened, data, ood, labels, device)
    with evaluation_folder(out, "comparison", overwrite) as folder:
        reports = [_evaluate_one(evaluated, task, folder / evaluated.name) for evaluated in opened]
        metrics = [report.metrics for report in reports]
        record = {
            "schema_version": SCHEMA_VERSION,
            "kind": "model_comparison",
            "data": metrics[0]["data"],
            "models": metrics,
        }
        write_text(folder / REPORT, json.dumps(record, indent=2) + "\n")
        write_text(folder / PAGE, render_comparison(metrics))
        return reports


def _evaluate_one(evaluated: EvaluatedModel, task: Task, folder: Path) -> Report:
    """Run one model on the images, measure its outputs, and write the three files."""
    began = time.monotonic()
    images, outside = _open_inputs(evaluated, task)
    model, device = evaluated.model, task.device
    model.backbone = resolve_input(model.backbone, images)
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    log.info("%s: %s, %s; %d images", evaluated.name, evaluated.writer, evaluated.network, len(images))

    run = evaluated.run if evaluated.run is not None and evaluated.run.digest == images.digest else None
    # What a run measured with labels is not shown beside what is measured without them.
    earlier = run.report if run is not None and run.report.get("labels") == (images.labels is not None) else {}
    outputs = run_model(evaluated, images, device)
    kmeans = cluster_by_kmeans(evaluated, outputs, device)
    # A run also measured how stable its last epochs were, so its own card is the better one.
    card = run.report.get("label_free", {}) if run is not None else {}
    if "warnings" not in card:
        card = quality_card(evaluated, outputs, kmeans, images, device)
    scores = []
    if outside:
        reference = outlier_reference(outputs, None if run is not None else model.prototypes)
        for other in outside:
            figures = score_outside(outputs, run_model(evaluated, other, device), reference)
            scores.append({"data": other.source, "images": len(other), "scores": figures})
    metrics = start_record("evaluation", images, model.clusters) | {
        "model": {
            "name": evaluated.name,
            "path": evaluated.path,
            "options": list(evaluated.options),
            "writer": evaluated.writer,
            "network": evaluated.network,
            "heads": evaluated.heads,
            "input_size": model.backbone.input_size,
            "mean": model.backbone.mean.tolist(),
            "std": model.backbone.std.tolist(),
        },
        "before": earlier.get("before"),
        "after": measure_outputs(outputs, kmeans, images.labels),
        "old_model": earlier.get("old_model"),
        "label_free": card,
        "outside": scores,
        "seconds": round(time.monotonic() - began, 1),
    }
    columns = {"trusted": find_trusted(outputs.calibration)}
    if model.prototypes is not None:
        columns |= compute_outlier_columns(model.prototypes, outputs.features)
    table = build_prediction_table(images.names, outputs.clustering, outputs.calibration, columns)
    page = collect_page(
        metrics,
        table,
        outputs.calibration,
        images,
        history=run.history if run is not None else [],
        settings=run.settings if run is not None else None,
        command=_command(evaluated, task),
    )
    folder.mkdir(exist_ok=True)
    write_table(folder / PREDICTIONS, table)
    write_text(folder / REPORT, json.dumps(metrics, indent=2) + "\n")
    write_text(folder / PAGE, render_page(page))
    return Report(metrics, table, folder)


def _build_task(evaluated_models: list[EvaluatedModel], data: Any, ood: Any, labels: bool, device: str) -> Task:
    """Return the task; images that are not named are those of the first run among the models."""
    root = None
    if data is None:
        config = next((evaluated.run.config for evaluated in evaluated_models if evaluated.run is not None), None)
        if config is None or config.data is None or config.data.startswith("<"):
            whose = evaluated_models[0].path or "the model"
            raise ConfigError(f"{whose} does not say which images it was made from; add {option('data', 'FOLDER')}")
        data, root, labels = config.data, config.data_root, labels and config.labels
    most = max(evaluated.model.clusters for evaluated in evaluated_models)
    sets = tuple(ood) if isinstance(ood, list | tuple) else (ood,)
    return Task(data, sets, root, labels, most, choose_device(device))


def _open_inputs(evaluated: EvaluatedModel, task: Task) -> tuple[ImageSet, list[ImageSet]]:
    """Return the images and the outside sets; every path is checked before the first image is read."""
    backbone = evaluated.model.backbone
    adopt_native_size(backbone, task.data, task.root)
    side = storage_size(backbone.input_size)
    sources = [describe_source(source, side, task.root) for source in (task.data, *task.ood)]
    images, *outside = (
        open_images(source, backbone.input_size, labels=task.labels, progress=show_progress) for source in sources
    )
    for name, reason in [skipped for image_set in (images, *outside) for skipped in image_set.skipped]:
        log.warning("skipped %s: %s", name, reason)
    if len(images) < task.clusters:
        raise DataError(
            f"{images.source} has {len(images)} readable images, too few to evaluate {task.clusters} clusters; "
            "add images, or sort these with cdc-predict"
        )
    return images, outside


def _command(evaluated: EvaluatedModel, task: Task) -> str | None:
    """Return what to type to get this report again; None if the model or images were passed as Python objects."""
    sources = (task.data, *task.ood)
    if evaluated.path is None or not all(isinstance(source, str | Path) for source in sources):
        return None
    words = ["cdc-evaluate", "--model", evaluated.path, *evaluated.options, "--data", str(task.data)]
    words += ["--ood", *map(str, task.ood)] if task.ood else []
    words += [] if task.labels else ["--no-labels"]
    return shlex.join(words)
