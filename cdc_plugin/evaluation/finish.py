"""Finish a run: predict with the calibration head, compare with where the run began, write every result."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.core.random_streams import FINAL, QUALITY, generator
from cdc_plugin.data.atomic import write_text
from cdc_plugin.data.images import ImageSet
from cdc_plugin.evaluation.prediction_table import build_prediction_table, write_table
from cdc_plugin.evaluation.quality import Evidence, assess, predict_augmented, snapshot_rows
from cdc_plugin.evaluation.report_record import Report, describe_run, measure, run_record, trusted_samples
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.report.run_page import collect_page, render_page
from cdc_plugin.training.batches import training_views
from cdc_plugin.training.collapse import as_warnings, detect
from cdc_plugin.training.features import Features, head_probabilities, kmeans_of_all, private_features
from cdc_plugin.training.progress import log
from cdc_plugin.training.recovery import setback_warning
from cdc_plugin.training.run_folder import PAGE, PREDICTIONS, REPORT, Run
from cdc_plugin.training.runtime import Runtime
from cdc_plugin.training.trackers import Tracking


def finish_run(run: Run, seconds: float, tracking: Tracking) -> Report:
    """Predict all images, assess the clusters, and write model, table, report and, last of all, the page."""
    settings, runtime, images, model, folder = run.settings, run.runtime, run.images, run.model, run.folder
    if settings.freeze_backbone:
        for head in (model.clustering_head, model.calibration_head):  # the main process alone has trained them
            for tensor in head.to(runtime.device).state_dict().values():
                runtime.distributed.broadcast_(tensor)
    randomness = generator(settings.seed, FINAL)
    clustering, calibration, features = predict(model, images, runtime)
    assignment = torch.from_numpy(calibration.argmax(axis=1))
    partition = kmeans_of_all(features, settings.clusters, runtime.device, randomness)
    rows, sample = features.sample(settings.clusters, randomness)
    model.prototypes = fit_prototypes(rows, assignment[sample], settings.clusters)
    distance = features.map(model.prototypes.distance).numpy()
    views = training_views(settings.augment, model.backbone)
    seen, augmented = predict_augmented(model, images, views, runtime, generator(settings.seed, QUALITY))
    card = assess(
        Evidence(
            torch.from_numpy(clustering),
            torch.from_numpy(calibration),
            rows,
            torch.from_numpy(partition),
            seen,
            augmented,
            run.start,
            [*run.snapshots, assignment[snapshot_rows(len(images))]],
            sample,
        )
    )
    card["warnings"] += [*setback_warning(run.setback), *as_warnings(detect(run.history, settings))]
    old = None
    if run.old is not None:
        same = calibration.argmax(axis=1) == run.old["assignment"].numpy()
        old = {**run.old["figures"], "agreement_after": float(same.mean())}
    metrics = run_record(
        images,
        clusters=settings.clusters,
        epochs=settings.epochs,
        seed=settings.seed,
        before=run.before,
        after=measure(clustering, calibration, partition, images.labels),
        old_model=old,
        label_free=card,
        seconds=seconds,
    )
    more = {
        "trusted": trusted_samples(calibration),
        "distance": distance,
        "outlier": distance > model.prototypes.limit,
    }
    table = build_prediction_table(images.names, clustering, calibration, more)
    if runtime.distributed.main:
        model.save(folder, describe_origin(run, card))
        write_table(folder / PREDICTIONS, table)
        write_text(folder / REPORT, json.dumps(metrics, indent=2) + "\n")
        about = describe_run(settings, folder)
        page = collect_page(metrics, table, calibration, images, history=run.history, **about)
        write_text(folder / PAGE, render_page(page))
        tracking.finish(metrics)
        log.info("finished in %.0f s: %s", seconds, folder)
    return Report(metrics, table, folder)


def predict(
    model: Clusterer, images: ImageSet, runtime: Runtime
) -> tuple[NDArray[np.float32], NDArray[np.float32], Features]:
    """Return the probabilities (N, C) of the clustering and of the calibration head, and the features."""
    features = private_features(model.backbone, images, runtime)
    clustering = head_probabilities(model.clustering_head, features)
    return clustering, head_probabilities(model.calibration_head, features), features


def describe_origin(run: Run, card: dict[str, Any]) -> dict[str, Any]:
    """Return where a model comes from, and what was said of it, for its model.json."""
    return {
        "tool": "cdc_plugin",
        "backbone": run.settings.backbone,
        "data": run.images.source,
        "data_digest": run.images.digest,
        "epochs": run.settings.epochs,
        "seed": run.settings.seed,
        "expected_accuracy": round(card["expected_accuracy"], 4),
        "warnings": [warning["text"] for warning in card["warnings"]],
    }
