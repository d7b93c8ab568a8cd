"""Evaluate any clustering model on any images, as it is; ground truth is for the report only. Read `evaluate` first."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdc_plugin.checkpoints.infer.resolve import adopt_native_size, resolve_input
from cdc_plugin.core.mahalanobis import Prototypes, fit_prototypes
from cdc_plugin.core.random_streams import AUGMENTATION, FINAL, QUALITY, generator
from cdc_plugin.core.torch_defaults import torch_defaults
from cdc_plugin.data.atomic import write_text
from cdc_plugin.data.images import ImageSet, describe_source, storage_size
from cdc_plugin.data.sources.features import describe_features
from cdc_plugin.errors import CheckpointError, ConfigError, DataError, UserError, join_words, option
from cdc_plugin.evaluation.models import EvaluatedModel, distinct_names, open_model
from cdc_plugin.evaluation.quality import Evidence, assess, find_trusted, name_samples
from cdc_plugin.evaluation.records import (
    SCHEMA_VERSION,
    Report,
    build_prediction_table,
    compute_outlier_columns,
    measure,
    start_record,
    write_tables,
)
from cdc_plugin.metrics import summary_outliers
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.report.models_page import render_comparison
from cdc_plugin.report.run_page import collect_page, render_page
from cdc_plugin.training.batches import choose_augmentation, predict_augmented
from cdc_plugin.training.features import extract_features, head_probabilities, kmeans_assignment
from cdc_plugin.training.prepare import check_source, read_images
from cdc_plugin.training.progress import log, show_progress
from cdc_plugin.training.run_folder import HISTORY, PAGE, PREDICTIONS, REPORT, evaluation_folder
from cdc_plugin.training.runtime import Runtime, choose_device

# Small models trained by the losses of SCAN and SeCu were 25 to 29 points too confident on 5,000 Fashion-MNIST images.
UNCALIBRATED = {
    "kind": "uncalibrated",
    "text": "This model has no calibration head, so its confidence is uncalibrated. Networks trained on their own "
    "pseudo-labels are usually far too confident; cdc-refine with --init keep calibrates the model.",
}


@dataclass(frozen=True)
class Task:
    """The images that every model of an evaluation is run on."""

    data: Any
    ood: tuple[Any, ...]
    root: str | None  # folder of named data sets
    labels: bool
    clusters: int  # the largest number of clusters of any model; at least as many images are needed
    device: torch.device


@dataclass(frozen=True)
class ModelOutputs:
    """Features (N, D) on the CPU, and the probabilities (N, C) of each head by its key in report.json."""

    features: Tensor
    heads: dict[str, NDArray[np.float32]]

    @property
    def clustering(self) -> NDArray[np.float32]:
        return next(iter(self.heads.values()))

    @property
    def calibration(self) -> NDArray[np.float32]:
        """Return the probabilities of the head that predicts; it comes last."""
        return list(self.heads.values())[-1]


@torch_defaults()
def evaluate(
    model: str | Path | Clusterer,
    data: Any = None,
    ood: Any = (),
    out: str | Path | None = None,
    *,
    features: Any = None,
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
        features: vectors in place of images, for models that were refined on some; as for ``refine``.
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
    task = _build_task([evaluated], data, features, ood, labels, device)
    with evaluation_folder(out, f"{evaluated.name}-evaluation", overwrite) as folder:
        return _evaluate_one(evaluated, task, folder)


@torch_defaults()
def compare(
    models: Sequence[str | Path | Clusterer],
    data: Any = None,
    ood: Any = (),
    out: str | Path | None = None,
    *,
    features: Any = None,
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
    task = _build_task(opened, data, features, ood, labels, device)
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
    """Evaluate one model; what a stranger wrote beside it in the place of its run's figures is left out."""
    try:
        return _measure_one(evaluated, task, folder)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        run = evaluated.run
        if isinstance(error, UserError) or run is None or not (run.report or run.history):
            raise
        log.warning(
            "%s: its %s or %s is not as cdc-refine writes it; both are left out", evaluated.name, REPORT, HISTORY
        )
        return _measure_one(replace(evaluated, run=replace(run, report={}, history=[])), task, folder)


def _measure_one(evaluated: EvaluatedModel, task: Task, folder: Path) -> Report:
    """Run one model on the images, measure its outputs, and write the three files."""
    began = time.monotonic()
    images, outside = _open_inputs(evaluated, task)
    model, device = evaluated.model, task.device
    model.backbone = resolve_input(model.backbone, images)
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    about = evaluated.name, evaluated.writer, evaluated.network
    log.info("%s: %s, %s; %d %ss", *about, len(images), images.noun)

    run = evaluated.run if evaluated.run is not None and evaluated.run.digest == images.digest else None
    # What a run measured with labels is not shown beside what is measured without them.
    earlier = run.report if run is not None and run.report.get("labels") == (images.labels is not None) else {}
    outputs = run_model(evaluated, images, device)
    randomness = generator(evaluated.config.seed, FINAL)
    kmeans = kmeans_assignment(outputs.features.to(device), model.clusters, randomness)
    figures = measure(outputs.clustering, outputs.calibration, kmeans, images.labels)
    # A run also measured how stable its last epochs were, so its own card is the better one.
    card = run.report.get("label_free", {}) if run is not None else {}
    if "warnings" not in card:
        card = quality_card(evaluated, outputs, kmeans, images, device)
        name_samples(card, images.noun)
    scores = []
    if outside:
        own = measure_inside(outputs, None if run is not None else model.prototypes)
        for other in outside:
            found = score_outside(outputs, run_model(evaluated, other, device), *own)
            scores.append({"data": other.source, "images": len(other), "scores": found})
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
        "after": {key: figures.get(key, figures["calibration_head"]) for key in ("kmeans", *outputs.heads)},
        "old_model": earlier.get("old_model"),
        "label_free": card,
        "outside": scores,
        "seconds": round(time.monotonic() - began, 1),
    }
    columns = {"trusted": find_trusted(outputs.calibration)}
    if model.prototypes is not None:
        columns |= compute_outlier_columns(model.prototypes, outputs.features)
    table = build_prediction_table(images.names, outputs.clustering, outputs.calibration, columns)
    history, settings = (run.history, run.settings) if run is not None else ([], None)
    facts: dict[str, Any] = {"history": history, "settings": settings, "command": _command(evaluated, task)}
    page = collect_page(metrics, table, outputs.calibration, images, **facts)
    folder.mkdir(exist_ok=True)
    write_tables(folder / PREDICTIONS, [table])
    write_text(folder / REPORT, json.dumps(metrics, indent=2) + "\n")
    write_text(folder / PAGE, render_page(page))
    return Report(metrics, table, folder)


def run_model(evaluated: EvaluatedModel, images: ImageSet, device: torch.device) -> ModelOutputs:
    """Run a model on every image; a model with one head has one entry."""
    model = evaluated.model
    features = extract_features(model.backbone, images, Runtime(device, progress=show_progress))
    if not torch.isfinite(features).all():
        raise CheckpointError(
            f"{evaluated.path or 'the model'} gives features that are not finite: is this the right file?"
        )
    if evaluated.heads == 1:
        return ModelOutputs(features, {"model": head_probabilities(model.calibration_head, features)})
    heads = {"clustering_head": model.clustering_head, "calibration_head": model.calibration_head}
    return ModelOutputs(features, {key: head_probabilities(head, features) for key, head in heads.items()})


def quality_card(
    evaluated: EvaluatedModel, outputs: ModelOutputs, kmeans: NDArray[np.int64], images: ImageSet, device: torch.device
) -> dict[str, Any]:
    """Return the label-free card, as at the end of a run; with one head, there is no agreement of heads."""
    config, model = evaluated.config, evaluated.model
    backbone, head, runtime = model.backbone, model.calibration_head, Runtime(device)
    randomness = generator(config.seed, AUGMENTATION)
    augment, _ = choose_augmentation(config.augment, backbone, head, images, runtime, randomness)
    seen, augmented = predict_augmented(backbone, head, images, augment, runtime, generator(config.seed, QUALITY))
    clustering, calibration, partition = map(torch.from_numpy, (outputs.clustering, outputs.calibration, kmeans))
    card = assess(Evidence(clustering, calibration, outputs.features, partition, seen, augmented))
    if evaluated.heads > 1:
        return card
    warnings = [UNCALIBRATED, *card["warnings"]]
    return card | {"heads_agree": None, "clustering_confidence": None, "warnings": warnings}


def measure_inside(outputs: ModelOutputs, prototypes: Prototypes | None) -> tuple[Tensor, list[Prototypes]]:
    """Return the distances (N,) of the images from the given prototypes, which saw none of them; and these prototypes.

    Without, each half is measured by prototypes of the other: an image seems closer than it is to those fitted on it.
    """
    if prototypes is not None:
        return prototypes.distance(outputs.features), [prototypes]
    features, clusters = outputs.features, outputs.calibration.shape[1]
    assignment = torch.from_numpy(outputs.calibration.argmax(axis=1))
    half = torch.arange(len(features)) % 2 == 0
    fitted = [fit_prototypes(features[part], assignment[part], clusters) for part in (half, ~half)]
    return torch.where(half, fitted[1].distance(features), fitted[0].distance(features)), fitted


def score_outside(
    inside: ModelOutputs, outside: ModelOutputs, distance: Tensor, prototypes: list[Prototypes]
) -> dict[str, dict[str, float | None]]:
    """Return how well outside images are recognised: by each head's confidence (the paper's protocol), by distance."""
    scores = {key: (inside.heads[key].max(axis=1), outside.heads[key].max(axis=1)) for key in inside.heads}
    far = torch.stack([each.distance(outside.features) for each in prototypes]).mean(dim=0)
    scores["distance"] = (-distance.numpy(), -far.numpy())
    return {key: summary_outliers(*pair) for key, pair in scores.items()}


def _build_task(
    evaluated_models: list[EvaluatedModel], data: Any, features: Any, ood: Any, labels: bool, device: str
) -> Task:
    """Return the task; images that are not named are those of the first run among the models."""
    root = None
    if data is None and features is None:
        config = next((evaluated.run.config for evaluated in evaluated_models if evaluated.run is not None), None)
        inputs = None if config is None else config.features or (config.data,)
        if config is None or inputs is None or any(name is None or name.startswith("<") for name in inputs):
            whose = evaluated_models[0].path or "the model"
            raise ConfigError(f"{whose} does not say which images it was made from; add {option('data', 'FOLDER')}")
        data, features, root = config.data or None, config.features, config.data_root
        labels = labels and config.labels
    if features is not None:
        data = describe_features(features, data, labels, root)
    most = max(evaluated.model.clusters for evaluated in evaluated_models)
    sets = tuple(ood) if isinstance(ood, list | tuple) else (ood,)
    if features is not None:
        sets = tuple(describe_features(other, labels=False) for other in sets)
    return Task(data, sets, root, labels, most, choose_device(device))


def _open_inputs(evaluated: EvaluatedModel, task: Task) -> tuple[ImageSet, list[ImageSet]]:
    """Return the images and the outside sets; every path is checked before the first image is read."""
    backbone = evaluated.model.backbone
    for source in (task.data, *task.ood):
        check_source(backbone, source)
    adopt_native_size(backbone, task.data, task.root)
    side = storage_size(backbone.input_size)
    wanted = [(task.data, task.labels), *((other, False) for other in task.ood)]
    sources = [
        source if backbone.takes_features else describe_source(source, side, task.root, labels)
        for source, labels in wanted
    ]
    sets = (read_images(source, backbone.input_size, task.root, show_progress, task.labels) for source in sources)
    images, *outside = sets
    if len(images) < task.clusters:
        raise DataError(
            f"{images.source} has {len(images)} readable {images.noun}s, too few to evaluate {task.clusters} clusters; "
            "add some, or sort these with cdc-predict"
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
    return join_words(words)
