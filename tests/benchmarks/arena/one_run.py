"""Run one entry with one seed and write what came out; labels are read here, and by the report, only."""

import json
import resource
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import cdc_plugin.evaluation.outcome as outcome
import cdc_plugin.pipeline as pipeline
import cdc_plugin.training.train as training
from cdc_plugin import refine
from cdc_plugin.config.load import load_config
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.probe import principal_components, read_linearly
from cdc_plugin.core.prototypes import standardize_rows
from cdc_plugin.core.random_streams import PROBE, generator
from cdc_plugin.metrics import summary
from cdc_plugin.metrics.clustering import accuracy, true_columns
from cdc_plugin.metrics.confidence import accept_to_target
from cdc_plugin.training.features import head_probabilities, shared_features

TARGET = 0.95


def main(request: dict[str, Any]) -> None:
    """Refine, and write NAME.json and, for `choose.py`, the calibrated probabilities after every round."""
    torch.set_num_threads(1)
    out, rounds, arrays = Path(request["out"]), [], {}
    review = training.review_round

    def look(run: Any, refiner: Any) -> None:
        """Measure the heads and free k-means with labels before the product decides without."""
        features = shared_features(run.model.backbone, run.images, run.runtime, cached=False)
        probs = head_probabilities(run.model.calibration_head, features)
        labels, clusters = run.images.labels, run.settings.clusters
        points = standardize_rows(features.map(lambda block: block))
        free = kmeans(points, clusters, torch.Generator().manual_seed(0), starts=20).assignment.numpy()
        assignment = torch.from_numpy(probs.argmax(axis=1))[run.start_rows]
        probe = read_linearly(run.start_components, assignment, generator(run.settings.seed, PROBE, 1))
        seen = {"accuracy": accuracy(probs.argmax(axis=1), labels, clusters), "ECE": summary(probs, labels)["ECE"]}
        seen |= {
            "kmeans": accuracy(free, labels, clusters),
            "confidence": float(probs.max(axis=1).mean()),
            "probe": probe,
        }
        arrays[f"round{len(rounds)}"] = probs.astype(np.float16)
        components = principal_components(features.map(lambda block: block))
        arrays[f"components{len(rounds)}"] = components.numpy().astype(np.float16)
        review(run, refiner)
        if request["to_the_end"] and refiner.epoch < run.settings.epochs:
            refiner.settled = False
        rounds.append({**run.reviews[-1], **seen, "cpu": resource.getrusage(resource.RUSAGE_SELF).ru_utime})

    measure = outcome.measure_signals

    def keep(run: Any, calibration: np.ndarray) -> dict[str, float]:
        arrays["end"] = calibration.astype(np.float16)
        return measure(run, calibration)

    begin, start = pipeline.measure_start, {}

    def look_at_start(prepared: Any, *others: Any) -> Any:
        run = begin(prepared, *others)
        probs = head_probabilities(run.model.calibration_head, prepared.features)
        arrays["start"] = probs.astype(np.float16)
        arrays["start_kmeans"] = run.start.numpy().astype(np.int16)
        arrays["start_components"] = run.start_components.numpy().astype(np.float16)
        start.update(measure(run, probs), accuracy=run.before["calibration_head"]["ACC"])
        return run

    has_helped = (lambda run: True) if request["to_the_end"] else pipeline.has_helped
    with (
        patch.object(pipeline, "measure_start", look_at_start),
        patch.object(pipeline, "has_helped", has_helped),
        patch.object(training, "review_round", look),
        patch.object(outcome, "measure_signals", keep),
    ):
        report = refine(
            request["backbone"],
            request["data"],
            request["clusters"],
            out=out / "folder",
            overwrite=True,
            seed=request["seed"],
            device="cpu",
            **request["settings"],
        )
    labels = np.load(request["data"])["y"]
    metrics, table = report.metrics, report.predictions
    columns = true_columns(_one_hot(table["cluster"], request["clusters"]), labels)
    right, chosen = table["cluster"] == columns, accept_to_target(table["confidence"], TARGET).mask
    head, card = metrics["after"]["calibration_head"], metrics["label_free"]
    record = {
        **{name: request[name] for name in ("name", "source", "seed", "settings", "clusters")},
        "images": metrics["images"],
        "kmeans": metrics["before"]["kmeans"]["ACC"],
        **{name: head[name] for name in ("ACC", "NMI", "ECE", "CONF")},
        "expected": [card[name] for name in ("expected_accuracy", "expected_low", "expected_high")],
        "signals": card["signals"],
        "frozen_views": load_config(out / "folder" / "config.yaml").frozen_views,
        "start": start,
        "card": {name: value for name, value in card.items() if isinstance(value, (int, float))},
        "warnings": [warning["text"] for warning in card["warnings"]],
        "selected": float(chosen.mean()),
        "selected_right": float(right[chosen].mean()) if chosen.any() else None,
        "epochs": metrics["epochs"],
        "rounds": rounds,
        "cpu": resource.getrusage(resource.RUSAGE_SELF).ru_utime,
    }
    np.savez_compressed(out / "probabilities.npz", labels=labels, **arrays)
    (out / "run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _one_hot(assignment: np.ndarray, clusters: int) -> np.ndarray:
    return np.eye(clusters, dtype=np.float32)[assignment]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
