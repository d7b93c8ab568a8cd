"""Speed of all figures together, against a limit: ``OMP_NUM_THREADS=1 python tests/benchmarks/metrics.py``."""

import json
import sys

import numpy as np
from measure import Limit, cpu_seconds
from numpy.typing import NDArray

from cdc_plugin.metrics import risk_coverage_curve, summary, summary_outliers, summary_unlabelled

SIZES = [(10_000, 10), (100_000, 10), (100_000, 200)]
# How far apart logits lie: from all clusters alike, through many large entries a row, to confidences of 1.
SPREADS = {"flat": 0.0, "spread": 1.0, "sharp": 8.0}
LIMIT = 1.0  # CPU seconds of the largest size


def predictions(samples: int, clusters: int, spread: float) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, clusters, samples)
    logits = spread * rng.standard_normal((samples, clusters), dtype=np.float32)
    logits[np.arange(samples), labels] += 2 * spread
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    return probs / probs.sum(axis=1, keepdims=True), labels


def measure(samples: int, clusters: int, spread: float) -> dict[str, float]:
    probs, labels = predictions(samples, clusters, spread)
    confidence, correct = probs.max(axis=1), probs.argmax(axis=1) == labels
    return {
        "summary": cpu_seconds(lambda: summary(probs, labels), 3),
        "summary_unlabelled": cpu_seconds(lambda: summary_unlabelled(probs), 3),
        "risk_coverage_curve": cpu_seconds(lambda: risk_coverage_curve(confidence, correct), 3),
        "summary_outliers": cpu_seconds(lambda: summary_outliers(confidence, confidence[: samples // 2] ** 2), 3),
    }


def main() -> None:
    found = {
        f"N={samples}, C={clusters}, {name}": measure(samples, clusters, spread)
        for samples, clusters in SIZES
        for name, spread in SPREADS.items()
    }
    print(json.dumps(found, indent=2))
    limits = [Limit(f"summary, {name}", seconds["summary"], LIMIT) for name, seconds in found.items()]
    print(*limits, sep="\n")
    sys.exit(0 if all(limit.kept for limit in limits) else 1)


if __name__ == "__main__":
    main()
