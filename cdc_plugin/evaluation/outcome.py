"""Measure a run where it begins and where it ends, and write every result."""

import json
from pathlib import Path
from typing import Any

import torch

from cdc_plugin.config.resolve import ResolvedConfig
from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.core.random_streams import FINAL, QUALITY, generator
from cdc_plugin.data.atomic import write_text
from cdc_plugin.evaluation.quality import Evidence, assess, find_trusted
from cdc_plugin.evaluation.records import (
    Report,
    build_prediction_table,
    describe_run,
    measure,
    measure_head,
    start_record,
    write_tables,
)
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.initialise import InitialHeads
from cdc_plugin.report.run_page import collect_page, render_page
from cdc_plugin.training.batches import predict_augmented, snapshot_rows
from cdc_plugin.training.collapse import as_warnings, detect, setback_warning
from cdc_plugin.training.features import head_probabilities, kmeans_of_all, shared_features
from cdc_plugin.training.prepare import Prepared
from cdc_plugin.training.progress import log
from cdc_plugin.training.run_folder import PAGE, PREDICTIONS, REPORT, Run


def measure_start(prepared: Prepared, heads: InitialHeads, settings: ResolvedConfig, folder: Path) -> Run:
    """Return a run that is ready to be trained, with the figures of its initial heads and of the old model."""
    images, features, partition = prepared.images, prepared.features, heads.partition.cpu()
    clustering, calibration = (head_probabilities(head, features) for head in (heads.clustering, heads.calibration))
    before = measure(clustering, calibration, partition.numpy(), images.labels)
    old = None
    if prepared.old is not None:
        assignment = prepared.old.argmax(axis=1)
        figures = measure_head(prepared.old, images.labels)
        figures |= {"writer": prepared.loaded.origin.writer, "clusters": prepared.old.shape[1]}
        figures["agreement_before"] = float((calibration.argmax(axis=1) == assignment).mean())
        old = {"figures": figures, "assignment": torch.from_numpy(assignment)}
    model = Clusterer(prepared.backbone, heads.clustering, heads.calibration)
    return Run(settings, folder, prepared.runtime, images, model, before, start=partition, old=old)


def finish_run(run: Run, seconds: float) -> Report:
    """Predict all images, assess the clusters, and write model, table, report and, last of all, the page."""
    settings, runtime, images, model, folder = run.settings, run.runtime, run.images, run.model, run.folder
    if settings.freeze_backbone:
        for head in (model.clustering_head, model.calibration_head):  # the main process alone has trained them
            for tensor in head.to(runtime.device).state_dict().values():
                runtime.distributed.broadcast_(tensor)
    randomness = generator(settings.seed, FINAL)
    features = shared_features(model.backbone, images, runtime, cached=False)
    clustering = head_probabilities(model.clustering_head, features)
    calibration = head_probabilities(model.calibration_head, features)
    assignment = torch.from_numpy(calibration.argmax(axis=1))
    partition = kmeans_of_all(features, settings.clusters, runtime.device, randomness)
    rows, sample = features.sample(settings.clusters, randomness)
    model.prototypes = fit_prototypes(rows, assignment[sample], settings.clusters)
    distance = features.map(model.prototypes.distance).numpy()
    randomness = generator(settings.seed, QUALITY)
    seen, augmented = predict_augmented(
        model.backbone, model.calibration_head, images, settings.augment, runtime, randomness
    )
    card = assess(
        Evidence(
            torch.from_numpy(clustering),
            torch.from_numpy(calibration),
            rows,
            torch.from_numpy(partition),
            seen,
            augmented,
            run.start,
            [*run.snapshots, assignment[snapshot_rows(images.count)]],
            sample,
        )
    )
    card["warnings"] += [*setback_warning(run.setback), *as_warnings(detect(run.history, settings))]
    old = None
    if run.old is not None:
        same = calibration.argmax(axis=1) == run.old["assignment"].numpy()
        old = {**run.old["figures"], "agreement_after": float(same.mean())}
    metrics = start_record("refinement", images, settings.clusters) | {
        "epochs": settings.epochs,
        "seed": settings.seed,
        "before": run.before,
        "after": measure(clustering, calibration, partition, images.labels),
        "old_model": old,
        "label_free": card,
        "seconds": round(seconds, 1),
    }
    more = {"trusted": find_trusted(calibration), "distance": distance, "outlier": distance > model.prototypes.limit}
    table = build_prediction_table(images.names, clustering, calibration, more)
    if runtime.distributed.main:
        model.save(folder, describe_origin(run, card))
        write_tables(folder / PREDICTIONS, [table])
        write_text(folder / REPORT, json.dumps(metrics, indent=2) + "\n")
        about = describe_run(settings, folder)
        page = collect_page(metrics, table, calibration, images, history=run.history, **about)
        write_text(folder / PAGE, render_page(page))
        log.info("finished in %.0f s: %s", seconds, folder)
    return Report(metrics, table, folder)


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
