"""Measure a run where it begins and where it ends, and write every result."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdc_plugin.checkpoints.formats.base import Loaded, Origin
from cdc_plugin.config.resolve import ResolvedConfig
from cdc_plugin.core.agreement import agreement
from cdc_plugin.core.cluster_count import Count
from cdc_plugin.core.estimate import EMBEDDED, FROZEN, TRAINED, Estimate, estimate_accuracy, fit_temperature
from cdc_plugin.core.hierarchy import build_hierarchy
from cdc_plugin.core.mahalanobis import fit_prototypes
from cdc_plugin.core.probe import principal_components
from cdc_plugin.core.random_streams import FINAL, INITIALISATION, PROBE, QUALITY, generator
from cdc_plugin.core.sizes import LIKELY, estimate_shares
from cdc_plugin.data.atomic import write_text
from cdc_plugin.data.sources.features import FeatureSource
from cdc_plugin.evaluation.next_changes import find_next_changes
from cdc_plugin.evaluation.quality import Evidence, assess, find_trusted, name_samples
from cdc_plugin.evaluation.records import (
    Report,
    build_prediction_table,
    describe_run,
    measure,
    measure_head,
    start_record,
    write_tables,
)
from cdc_plugin.metrics import summary_hard
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.initialise import InitialHeads
from cdc_plugin.report.run_page import collect_page, render_page
from cdc_plugin.training.batches import AUGMENTED_IMAGES, predict_augmented, snapshot_rows
from cdc_plugin.training.collapse import as_warnings, detect, setback_warning
from cdc_plugin.training.features import (
    Features,
    head_probabilities,
    kmeans_assignment,
    kmeans_of_all,
    shared_features,
)
from cdc_plugin.training.prepare import Prepared, start_heads
from cdc_plugin.training.progress import log
from cdc_plugin.training.review import is_estimated, may_return, measure_signals, put_start_back, return_warning
from cdc_plugin.training.run_folder import PAGE, PREDICTIONS, REPORT, Run, begin_run_folder

LEAST_SEEN = 64  # images that are predicted again in an augmented view, where a pass of all is most of the work


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
    rows, chosen = features.sample(settings.clusters, generator(settings.seed, PROBE))
    components = principal_components(rows)
    run = Run(settings, folder, prepared.runtime, images, model, before, partition, components, chosen, old=old)
    run.assignment = torch.from_numpy(calibration.argmax(axis=1))
    run.count = None if prepared.count is None else dataclasses.asdict(prepared.count)
    run.start_probe = measure_signals(run, calibration)["probe"]
    run.features = features if settings.freeze_backbone else None
    return run


def begin_again(run: Run, count: Count) -> Run:
    """Return a run with another number of clusters, from the start, in the place of this one."""
    put_start_back(run)
    settings = dataclasses.replace(run.settings, clusters=count.number)
    backbone, runtime = run.model.backbone, run.runtime
    features = shared_features(backbone, run.images, runtime)
    heads = start_heads("prototypes", settings, features, generator(settings.seed, INITIALISATION), runtime.device)
    loaded = Loaded(backbone, Origin("the start of the run"))
    prepared = Prepared(settings, settings, loaded, backbone, run.images, runtime, features, None, count)
    again = measure_start(prepared, heads, settings, run.folder)
    if runtime.distributed.main:
        begin_run_folder(again, may_return(again))
    return again


def finish_run(run: Run, seconds: float) -> Report:
    """Predict all images, assess the clusters, and write model, table, report and, last of all, the page."""
    settings, runtime, images, model, folder = run.settings, run.runtime, run.images, run.model, run.folder
    if settings.freeze_backbone:
        for head in (model.clustering_head, model.calibration_head):  # the main process alone has trained them
            for tensor in head.to(runtime.device).state_dict().values():
                runtime.distributed.broadcast_(tensor)
    randomness = generator(settings.seed, FINAL)
    features, clustering, calibration = predict_all(run)
    signals = measure_signals(run, calibration)
    estimate = estimate_run(run, signals)
    if estimate is not None:
        # The logarithms of probabilities are logits.
        temperature = fit_temperature(torch.from_numpy(calibration).clamp_min(1e-12).log_(), estimate.accuracy)
        temperature = runtime.distributed.broadcast_from_main(lambda: temperature)
        model.calibration_head.divide_logits(temperature)  # type: ignore[operator]
        calibration = head_probabilities(model.calibration_head, features)
    assignment = torch.from_numpy(calibration.argmax(axis=1))
    partition = (
        run.start.numpy()
        if settings.freeze_backbone
        else kmeans_of_all(features, settings.clusters, runtime.device, randomness)
    )
    rows, sample = features.sample(settings.clusters, randomness)
    model.prototypes = fit_prototypes(rows, assignment[sample], settings.clusters)
    model.hierarchy = build_hierarchy(rows, torch.from_numpy(calibration)[sample])
    distance = features.map(model.prototypes.distance).numpy()
    randomness = generator(settings.seed, QUALITY)
    most = max(LEAST_SEEN, images.count // 8) if settings.freeze_backbone else AUGMENTED_IMAGES
    seen, augmented = predict_augmented(
        model.backbone, model.calibration_head, images, settings.augment, runtime, randomness, most
    )
    probabilities = torch.from_numpy(clustering), torch.from_numpy(calibration)
    last_epochs = [*run.snapshots, assignment[snapshot_rows(images.count)]]
    kmeans = torch.from_numpy(partition)
    card = assess(Evidence(*probabilities, rows, kmeans, seen, augmented, run.start, last_epochs, sample))
    card["signals"] = signals
    card["expected_low"], card["expected_high"] = (estimate.low, estimate.high) if estimate else (None, None)
    card["warnings"] += [
        *return_warning(run),
        *setback_warning(run.setback),
        *as_warnings(detect(run.history, settings)),
    ]
    name_samples(card, images.noun)
    old = None
    if run.old is not None:
        same = calibration.argmax(axis=1) == run.old["assignment"].numpy()
        old = {**run.old["figures"], "agreement_after": float(same.mean())}
    metrics = start_record("refinement", images, settings.clusters) | {
        "epochs": len(run.history),
        "rounds": run.reviews,
        "returned_to_start": bool(run.returned),
        "seed": settings.seed,
        "before": run.before,
        "after": measure(clustering, calibration, partition, images.labels),
        "old_model": old,
        "label_free": card,
        "count": run.count,
        "next_changes": find_next_changes(rows, assignment[sample], sample, model.hierarchy),
        "sizes": describe_sizes(run, calibration, estimate),
        "spaces": measure_spaces(run, features, assignment),
        "hierarchy": model.hierarchy.record(),
        "seconds": round(seconds, 1),
    }
    more = {"trusted": find_trusted(calibration), "distance": distance, "outlier": distance > model.prototypes.limit}
    table = build_prediction_table(images.names, clustering, calibration, more)
    if runtime.distributed.main:
        model.save(folder, describe_origin(run, card))
        write_tables(folder / PREDICTIONS, [table])
        write_text(folder / REPORT, json.dumps(metrics, indent=2) + "\n")
        about = describe_run(run.asked, folder)
        page = collect_page(metrics, table, calibration, images, history=run.history, **about)
        write_text(folder / PAGE, render_page(page))
        log.info("finished in %.0f s: %s", seconds, folder)
    return Report(metrics, table, folder)


def measure_spaces(run: Run, features: Features, assignment: torch.Tensor) -> list[dict[str, Any]]:
    """Return what each space says alone: k-means on it against the clusters and, for the report, labels."""
    source, labels, clusters = run.images.images, run.images.labels, run.settings.clusters
    if not isinstance(source, FeatureSource):
        return []
    randomness, device = generator(run.settings.seed, FINAL, 1), run.runtime.device
    rows, chosen = features.sample(clusters, randomness)
    records = []
    for space, part in zip(source.spaces, rows.split(source.dims, dim=1), strict=True):
        is_all = part.shape == rows.shape
        alone = run.start[chosen].numpy() if is_all else kmeans_assignment(part.to(device), clusters, randomness)
        same = agreement(torch.from_numpy(alone), assignment[chosen], clusters)
        figures = {} if labels is None else summary_hard(alone, labels[chosen.numpy()], clusters)
        records.append({"name": space.title, "numbers": part.shape[1], "agreement": same, **figures})
    return records


def describe_sizes(run: Run, calibration: NDArray[np.float32], estimate: Estimate | None) -> dict[str, Any]:
    """Return the share of the images that each cluster has, with an interval where the accuracy has one."""
    shares, errors = estimate_shares(torch.from_numpy(calibration), estimate.doubt if estimate else 0.0)
    around = (LIKELY * errors).tolist() if estimate else [None] * len(shares)
    intervals = [
        {
            "share": share,
            "low": None if half is None else max(0.0, share - half),
            "high": half and min(1.0, share + half),
        }
        for share, half in zip(shares.tolist(), around, strict=True)
    ]
    return {"estimated": run.settings.sizes == "estimated", "clusters": intervals}


def predict_all(run: Run) -> tuple[Features, NDArray[np.float32], NDArray[np.float32]]:
    """Return the features of all images, and what the clustering and the calibration head make of them."""
    model = run.model
    features = run.features or shared_features(model.backbone, run.images, run.runtime, cached=False)
    heads = model.clustering_head, model.calibration_head
    clustering, calibration = (head_probabilities(head, features) for head in heads)
    return features, clustering, calibration


def estimate_run(run: Run, signals: dict[str, float]) -> Estimate | None:
    """Return the estimate; None where the constants were not chosen for such runs, or another level was asked for."""
    settings = run.settings
    if not is_estimated(run):
        return None
    constants = FROZEN if settings.freeze_backbone or settings.epochs == 0 else TRAINED
    if settings.freeze_backbone and not settings.frozen_views:
        constants = EMBEDDED
    return estimate_accuracy(**signals, clusters=settings.clusters, images=run.images.count, constants=constants)


def describe_origin(run: Run, card: dict[str, Any]) -> dict[str, Any]:
    """Return where a model comes from, and what was said of it, for its model.json."""
    return {
        "tool": "cdc_plugin",
        "backbone": run.settings.backbone,
        "data": run.images.source,
        "data_digest": run.images.digest,
        "epochs": len(run.history),
        "seed": run.settings.seed,
        "expected_accuracy": round(card["expected_accuracy"], 4),
        "warnings": [warning["text"] for warning in card["warnings"]],
    }
