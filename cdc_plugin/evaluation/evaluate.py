"""Any clustering model on any images, as it is: figures, and the files that tell of them. Read `evaluate` first.

Nothing is trained or changed, and ground truth is for the report only.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cdc_plugin.checkpoints.infer.resolve import adopt_native_size, resolve_input
from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.data.images import ImageSet, describe_source, open_images, storage_size
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.models import EvaluatedModel, distinct_names, open_model
from cdc_plugin.evaluation.outputs import (
    ModelOutputs,
    ask_kmeans,
    measure_answers,
    outlier_reference,
    quality_card,
    run_model,
    score_outside,
)
from cdc_plugin.evaluation.prediction_table import build_prediction_table, compute_outlier_columns, write_table
from cdc_plugin.evaluation.report_record import SCHEMA_VERSION, Report, start_record, trusted_samples
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.report.models_page import compared_model, comparison_facts, comparison_title, write_comparison
from cdc_plugin.report.run_page import page_of_evaluation, write_page
from cdc_plugin.training.progress import log, show_progress
from cdc_plugin.training.run_folder import PAGE, PREDICTIONS, REPORT, evaluation_folder
from cdc_plugin.training.runtime import choose_device


@dataclass(frozen=True)
class Task:
    """What every model of an evaluation is shown.

    Args:
        root: where named data sets lie.
        clusters: the most clusters of any of the models; so many images there must be.
    """

    data: Any
    ood: tuple[Any, ...]
    root: str | None
    labels: bool
    clusters: int
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
        data: as for ``refine``; left out, the images that the model was refined on.
        ood: one or several sets of images that belong to none of the clusters, to see whether the model can tell.
        out: folder for the files; a new one below ``cdc-runs`` if left out.
        head, format, arch: for checkpoints of others, where the file does not tell.
        labels: False ignores class sub-folders and label arrays.
    """
    subject = open_model(model, format=format, arch=arch, head=head)
    given = {"--format": format, "--arch": arch, "--head": head}
    needless = [f"{name} {value}" for name, value in given.items() if value is not None]
    if needless and not subject.foreign:
        raise UserError(f"{subject.path or 'the model'} states its own network and heads; leave {needless[0]} out")
    task = _task([subject], data, ood, labels, device)
    with evaluation_folder(out, f"{subject.name}-evaluation", overwrite) as folder:
        return assess(subject, task, folder)


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
    """Evaluate several models on the same images: each in a sub-folder of its name, and one page of all.

    Args:
        data: left out, the images of the first model for which it is known what it was refined on.
        names: what to call the models, one name each.
        head, format, arch: for those of the models that are checkpoints of others.
    """
    if len(models) < 2:
        raise UserError("a comparison takes at least two models; name another one")
    if names and (len(names) != len(models) or len(set(names)) < len(names)):
        raise UserError(f"{len(models)} models take as many different names; found {', '.join(names)}")
    if any(name in ("", "..") or Path(name).name != name for name in names):
        raise UserError(f"the names of models are used for folders and have no slash; found {', '.join(names)}")
    subjects = [open_model(model, format=format, arch=arch, head=head) for model in models]
    chosen = names or distinct_names(subjects)
    subjects = [replace(subject, name=name) for subject, name in zip(subjects, chosen, strict=True)]
    task = _task(subjects, data, ood, labels, device)
    with evaluation_folder(out, "comparison", overwrite) as folder:
        reports = [assess(subject, task, folder / subject.name) for subject in subjects]
        found = [report.metrics for report in reports]
        record = {
            "schema_version": SCHEMA_VERSION,
            "kind": "model_comparison",
            "data": found[0]["data"],
            "models": found,
        }
        _write_json(folder / REPORT, record)
        columns = [compared_model(each) for each in found]
        write_comparison(folder / PAGE, comparison_title(found), comparison_facts(found), columns)
        return reports


def assess(subject: EvaluatedModel, task: Task, folder: Path) -> Report:
    """Show one model the images, measure its answers, and write the three files."""
    began = time.monotonic()
    images, outside = _open_inputs(subject, task)
    model, device = subject.model, task.device
    model.backbone = resolve_input(model.backbone, images)
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    log.info("%s: %s, %s; %d images", subject.name, subject.writer, subject.network, len(images))

    run = subject.run if subject.run is not None and subject.run.digest == images.digest else None
    # What a run measured with labels is not shown beside what is measured without them.
    earlier = run.report if run is not None and run.report.get("labels") == (images.labels is not None) else {}
    answers = run_model(subject, images, device)
    kmeans = ask_kmeans(subject, answers, device)
    # A run also knows how stable its last epochs were, so its own card is the better one.
    card = run.report.get("label_free", {}) if run is not None else {}
    if "warnings" not in card:
        card = quality_card(subject, answers, kmeans, images, device)
    metrics = start_record("evaluation", images, model.clusters) | {
        "model": {
            "name": subject.name,
            "path": subject.path,
            "options": list(subject.options),
            "writer": subject.writer,
            "network": subject.network,
            "heads": subject.heads,
            "input_size": model.backbone.input_size,
            "mean": model.backbone.mean.tolist(),
            "std": model.backbone.std.tolist(),
        },
        "before": earlier.get("before"),
        "after": measure_answers(answers, kmeans, images.labels),
        "old_model": earlier.get("old_model"),
        "label_free": card,
        "outside": _outside(subject, answers, None if run is not None else model.prototypes, outside, device),
        "seconds": round(time.monotonic() - began, 1),
    }
    more = {"trusted": trusted_samples(answers.calibration)}
    if model.prototypes is not None:
        more |= compute_outlier_columns(model.prototypes, answers.features)
    table = build_prediction_table(images.names, answers.clustering, answers.calibration, more)
    page = page_of_evaluation(
        metrics,
        table,
        answers.calibration,
        images,
        history=run.history if run is not None else [],
        settings=run.settings if run is not None else None,
        command=_command(subject, task),
    )
    folder.mkdir(exist_ok=True)
    write_table(folder / PREDICTIONS, table)
    _write_json(folder / REPORT, metrics)
    write_page(folder / PAGE, page)
    return Report(metrics, table, folder)


def _outside(
    subject: EvaluatedModel,
    inside: ModelOutputs,
    prototypes: Prototypes | None,
    sets: list[ImageSet],
    device: torch.device,
) -> list[dict[str, Any]]:
    """How well the model tells each outside set from the images."""
    if not sets:
        return []
    by = outlier_reference(inside, prototypes)
    found = []
    for images in sets:
        scores = score_outside(inside, run_model(subject, images, device), by)
        found.append({"data": images.source, "images": len(images), "scores": scores})
    return found


def _task(subjects: list[EvaluatedModel], data: Any, ood: Any, labels: bool, device: str) -> Task:
    """Return what is asked for; images that are not named are those of the first run among the models."""
    root = None
    if data is None:
        config = next((subject.run.config for subject in subjects if subject.run is not None), None)
        if config is None or config.data is None or config.data.startswith("<"):
            whose = subjects[0].path or "the model"
            raise UserError(f"{whose} does not say which images it was made from; name some with --data")
        data, root, labels = config.data, config.data_root, labels and config.labels
    most = max(subject.model.clusters for subject in subjects)
    sets = tuple(ood) if isinstance(ood, list | tuple) else (ood,)
    return Task(data, sets, root, labels, most, choose_device(device))


def _open_inputs(subject: EvaluatedModel, task: Task) -> tuple[ImageSet, list[ImageSet]]:
    """Return the images and the outside sets; every path is looked at before the first image is read."""
    backbone = subject.model.backbone
    adopt_native_size(backbone, task.data, task.root)
    side = storage_size(backbone.input_size)
    sources = [describe_source(source, side, task.root) for source in (task.data, *task.ood)]
    images, *outside = (
        open_images(source, backbone.input_size, labels=task.labels, progress=show_progress) for source in sources
    )
    for found in (images, *outside):
        for name, reason in found.skipped:
            log.warning("skipped %s: %s", name, reason)
    if len(images) < task.clusters:
        raise UserError(
            f"{images.source} has {len(images)} readable images, too few to evaluate {task.clusters} clusters; "
            "add images, or sort these with cdc-predict"
        )
    return images, outside


def _command(subject: EvaluatedModel, task: Task) -> str | None:
    """Return what to type to get this report again; None where something was given in Python."""
    sources = (task.data, *task.ood)
    if subject.path is None or not all(isinstance(source, str | Path) for source in sources):
        return None
    words = ["cdc-evaluate", "--model", subject.path, *subject.options, "--data", str(task.data)]
    words += ["--ood", *map(str, task.ood)] if task.ood else []
    words += [] if task.labels else ["--no-labels"]
    return shlex.join(words)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(file, lambda path: path.write_text(text, encoding="utf-8"))
