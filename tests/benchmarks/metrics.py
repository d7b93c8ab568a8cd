"""Speed of all figures together: ``python tests/benchmarks/metrics.py``.

Prints the CPU seconds that N samples in C clusters take, and whether they keep the stated limit; exits with 1 if
not. Run it with OMP_NUM_THREADS=1: CPU seconds of one thread, so that other work on the machine matters little.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.metrics import risk_coverage_curve, summary, summary_outliers, summary_unlabelled

SIZES = [(10_000, 10), (100_000, 10), (100_000, 200)]
# How far apart logits lie: from all clusters alike, through many large entries a row, to confidences of 1.
SPREADS = {"flat": 0.0, "spread": 1.0, "sharp": 8.0}
LIMIT = 1.0  # CPU seconds of the largest size


def cpu_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Least CPU time of one call, after one call that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


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
        "summary": cpu_seconds(lambda: summary(probs, labels)),
        "summary_unlabelled": cpu_seconds(lambda: summary_unlabelled(probs)),
        "risk_coverage_curve": cpu_seconds(lambda: risk_coverage_curve(confidence, correct)),
        "summary_outliers": cpu_seconds(lambda: summary_outliers(confidence, confidence[: samples // 2] ** 2)),
    }


def main() -> None:
    found = {
        f"N={samples}, C={clusters}, {name}": measure(samples, clusters, spread)
        for samples, clusters in SIZES
        for name, spread in SPREADS.items()
    }
    print(json.dumps(found, indent=2))
    failed = False
    for name, seconds in found.items():
        kept = seconds["summary"] <= LIMIT
        failed |= not kept
        print(
            f"summary, {name:30s} {seconds['summary']:8.3f} s  limit <= {LIMIT:g} s  {'kept' if kept else 'NOT KEPT'}"
        )
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
