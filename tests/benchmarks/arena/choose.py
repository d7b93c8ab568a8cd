"""Choose the constants from runs to the end: ``python tests/benchmarks/arena/choose.py DIR``; DIR is the arena's --out.

Each constant is chosen on all image sources but one, and judged on the source left out; what is printed of a constant
is that, and then the value chosen on all of them, which stands in the package.
"""

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tables import Run, read_runs  # noqa: E402

from cdc_plugin.core.estimate import TOP, TRAINED, damp, find_bounds, fit_temperature, from_logit, to_logit  # noqa: E402
from cdc_plugin.metrics import correct_samples, summary  # noqa: E402
from cdc_plugin.metrics.confidence import accept_to_target  # noqa: E402
from cdc_plugin.training.review import PATIENCE  # noqa: E402

CEILINGS = (0.85, 0.88, 0.9, 0.92, 0.94, 0.96, 0.98, 0.995)
UNREADABLE = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
STUCK = (1.0005, 1.001, 1.002, 1.003, 1.005, 1.01, 1.02, math.inf)
SETTLED = (0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 1.0)
COST = 0.001  # of accuracy that is given up, at most, for the time, or for confidence that can be relied on
COVERED = 0.9  # of the runs are to lie in the interval
RIDGE = 0.05
TARGET = 0.95


Level = tuple[float, np.ndarray]  # ceiling and coefficients of an estimate


def leave_one_out(runs: Sequence[Run], choose: Callable[[Sequence[Run]], Any]) -> dict[str, Any]:
    """Return what is chosen without each source."""
    sources = sorted({run["source"] for run in runs})
    return {source: choose([run for run in runs if run["source"] != source]) for source in sources}


def by_source(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    """Return the mean of the means of the sources: none counts more because it has more runs."""
    sources = sorted({run["source"] for run in runs})
    return float(np.mean([np.mean([value(run) for run in runs if run["source"] == source]) for source in sources]))


def gain_of_restarts(run: Run, limit: float) -> float:
    """Return how much more accurate a run was a round after the heads had begun again, where they would have.

    Where the limit asks for a restart that did not take place, free k-means stands for what it would have given.
    """
    gain = 0.0
    for now, later in itertools.pairwise(run["rounds"]):
        if now["inertia_ratio"] > limit:
            gain += (later["accuracy"] if now["restarted"] else now["kmeans"]) - now["accuracy"]
    return gain


def choose_stuck(runs: Sequence[Run]) -> float:
    """Return the middle one of the limits that gain most, but for `COST`: any of them does on these runs."""
    gains = [by_source(runs, lambda run, limit=limit: gain_of_restarts(run, limit)) for limit in STUCK]
    best = [limit for limit, gain in zip(STUCK, gains, strict=True) if gain >= max(gains) - COST]
    return best[len(best) // 2]


def stop(run: Run, limit: float) -> int:
    """Return the number of the round, from 0, after which a run would have ended, by the rules of `review_round`."""
    last, falls = -math.inf, 0
    for number, seen in enumerate(run["rounds"]):
        expected = TRAINED.intercept + float(np.dot(TRAINED[2:4], features(run, seen, TRAINED.ceiling)[1:]))
        falls = falls + 1 if expected <= last else 0
        if not seen["restarted"] and (seen["moved"] < limit or falls == PATIENCE):
            return number
        last, falls = (-math.inf, 0) if seen["restarted"] else (expected, falls)
    return len(run["rounds"]) - 1


def choose_settled(runs: Sequence[Run]) -> float:
    def accuracy(limit: float) -> float:
        return by_source(runs, lambda run: run["rounds"][stop(run, limit)]["accuracy"])

    return max(limit for limit in SETTLED if accuracy(limit) >= accuracy(0.0) - COST)


def features(run: Run, seen: dict[str, float], ceiling: float) -> list[float]:
    return [1.0, *(damp(to_logit(seen[name], run["clusters"]), ceiling) for name in ("confidence", "probe"))]


def truth_of(run: Run, seen: dict[str, float]) -> float:
    return to_logit(seen["accuracy"], run["clusters"])


def find_end(run: Run, limit: float) -> tuple[str, dict[str, float]]:
    """Return where a run would have ended: the name of its probabilities, and what was seen there."""
    if not run["rounds"]:  # a frozen backbone has no rounds
        return "end", {"accuracy": run["ACC"], **run["signals"]}
    last = stop(run, limit)
    return f"round{last}", run["rounds"][last]


def fit_level(runs: Sequence[Run], limit: float, ceiling: float) -> Level:
    """Fit the accuracy's logit to those of confidence and probe; each source weighs the same."""
    ends = [(run, find_end(run, limit)[1]) for run in runs]
    sources = [run["source"] for run in runs]
    weight = np.sqrt([1 / sources.count(source) for source in sources])[:, None]
    table, goal = np.array([features(*end, ceiling) for end in ends]), np.array([[truth_of(*end)] for end in ends])
    # Drawn towards the confidence as it is, with the probe ignored.
    prior = np.array([[0.0], [1.0], [0.0]])
    penalty = np.diag([0.0, RIDGE, RIDGE]) * len(set(sources))
    left = (weight * table).T @ (weight * table) + penalty
    return ceiling, (prior + np.linalg.solve(left, (weight * table).T @ (weight * (goal - table @ prior)))).ravel()


def choose_level(runs: Sequence[Run], limit: float) -> Level:
    """Return the fit with the ceiling that is best for sources left out."""

    def error(ceiling: float) -> float:
        fits = leave_one_out(runs, lambda rest: fit_level(rest, limit, ceiling))

        def miss(run: Run) -> float:
            seen = find_end(run, limit)[1]
            return abs(from_logit(estimate(run, seen, fits[run["source"]]), run["clusters"]) - seen["accuracy"])

        return by_source(runs, miss)

    return fit_level(runs, limit, min(CEILINGS, key=error))


def estimate(run: Run, seen: dict[str, float], level: Level) -> float:
    return float(level[1] @ features(run, seen, level[0]))


def distance(run: Run, end: dict[str, float], level: Level) -> float:
    """Return how wide the interval of `find_bounds` would have to be, to either side, to hold the truth."""
    truth, middle = truth_of(run, end), estimate(run, end, level)
    return max(0.0, min(middle, TOP) - truth, min(truth, TOP) - middle)


def is_readable(run: Run, share: float, limit: float) -> bool:
    """Return whether the first features know the final clusters, by the rule of `has_helped`."""
    return bool(find_end(run, limit)[1]["probe"] >= share * run["start"]["probe"])


def choose_unreadable(pairs: Sequence[tuple[Run, Run]], limit: float) -> float:
    """Return the largest share below which to return to the start costs nothing; ``pairs`` are trained and frozen."""

    def gain(share: float) -> float:
        def of(run: Run) -> float:
            seen = find_end(run, limit)[1]
            return 0.0 if is_readable(run, share, limit) else frozen[run["name"], run["seed"]]["ACC"] - seen["accuracy"]

        return by_source([run for run, _ in pairs], of)

    frozen = {(run["name"], run["seed"]): other for run, other in pairs}
    return max(share for share in UNREADABLE if gain(share) >= -COST)


def quantile(distances: Sequence[float]) -> float:
    """Return the split-conformal bound of distances."""
    ranked = np.sort(distances)
    return float(ranked[min(len(ranked) - 1, math.ceil((len(ranked) + 1) * COVERED) - 1)])


def calibrated(out: Path, run: Run, which: str, level: float | None) -> tuple[float, float, float]:
    """Return the ECE, as learned or at this level, the share selected at 95 %, and the share of it that is right."""
    with np.load(out / "runs" / f"{run['name']}-{run['seed']}" / "probabilities.npz") as arrays:
        probs, labels = arrays[which].astype(np.float32), arrays["labels"]
    logits = torch.from_numpy(probs).clamp_min(1e-12).log()
    temperature = 1.0 if level is None else fit_temperature(logits, level)
    probs = torch.softmax(logits / temperature, dim=1).numpy()
    right = correct_samples(probs.argmax(axis=1), labels, probs.shape[1])
    chosen = accept_to_target(probs.max(axis=1), TARGET).mask
    return summary(probs, labels)["ECE"], chosen.mean(), right[chosen].mean() if chosen.any() else math.nan


def report_level(out: Path, runs: Sequence[Run], limit: float) -> dict[tuple[str, int], list[float]]:
    """Print how the estimate does on sources left out, and the constants for all; return the figures of every run."""
    levels = leave_one_out(runs, lambda rest: choose_level(rest, limit))
    distances: dict[str, list[float]] = {run["source"]: [] for run in runs}
    for run in runs:
        end = find_end(run, limit)[1]
        distances[run["source"]].append(distance(run, end, levels[run["source"]]))
    rows = {}
    for run in runs:
        which, end = find_end(run, limit)
        others = [value for source, values in distances.items() if source != run["source"] for value in values]
        half, middle = quantile(others), estimate(run, end, levels[run["source"]])
        below, above = find_bounds(middle, half)
        low, level, high = (from_logit(value, run["clusters"]) for value in (below, middle, above))
        before, (after, selected, kept) = calibrated(out, run, which, None)[0], calibrated(out, run, which, level)
        figures = [end["accuracy"], end["confidence"], level, low, high, before, after, selected, kept, run["kmeans"]]
        rows[run["name"], run["seed"]] = figures
        print(
            f"{run['name']:28s} {run['seed']} {which:7s} ACC {100 * end['accuracy']:5.1f} k-means "
            f"{100 * run['kmeans']:5.1f} confidence {100 * end['confidence']:5.1f} probe {100 * end['probe']:5.1f} "
            f"expected {100 * level:5.1f} ({100 * low:3.0f}-{100 * high:3.0f}) "
            f"ECE {100 * before:4.1f} -> {100 * after:4.1f}, at 95 %: {100 * selected:5.1f} of which "
            f"{100 * kept:5.1f} right"
        )
    summarise(list(rows.values()))
    bound = quantile([value for values in distances.values() for value in values])
    ceiling, coefficients = choose_level(runs, limit)
    print(f"ceilings without each source: { ({source: level[0] for source, level in levels.items()}) }")
    print(f"ceiling {ceiling}, coefficients {np.round(coefficients, 2).tolist()}, interval {bound:.2f}\n")
    return rows


def summarise(rows: Sequence[list[float]]) -> None:
    truth, learned, expected, low, high, before, after, selected, kept, kmeans = 100 * np.array(rows).T
    inside = (low <= truth) & (truth <= high)
    print(f"mean |expected - true|: {abs(learned - truth).mean():.1f} -> {abs(expected - truth).mean():.1f}")
    print(f"mean ECE: {before.mean():.1f} -> {after.mean():.1f}, largest: {before.max():.1f} -> {after.max():.1f}")
    print(f"truth inside the interval: {inside.sum()} of {len(rows)}, mean width {(high - low).mean():.0f} points")
    print(f"ECE above 10 and the truth outside the interval: {((after > 10) & ~inside).sum()}")
    print(f"selected at 95 %, 93 or more right: {(kept[selected > 0] >= 93).sum()} of {(selected > 0).sum()}")
    print(f"less accurate than k-means: {(truth < kmeans - 0.05).sum()}; mean ACC {truth.mean():.1f}")


def main(out: Path) -> None:
    every = read_runs(out)
    trained, frozen = ([run for run in every if bool(run["rounds"]) is kind] for kind in (True, False))
    print(f"{len(trained)} trained runs of {len({run['source'] for run in trained})} sources")
    stuck, settled = leave_one_out(trained, choose_stuck), leave_one_out(trained, choose_settled)
    print(f"STUCK without each source: {stuck}; all: {choose_stuck(trained)}")
    print(f"SETTLED without each source: {settled}; all: {choose_settled(trained)}")
    limit = choose_settled(trained)
    twins = {(run["name"].removesuffix("-frozen"), run["seed"]): run for run in frozen}
    pairs = [(run, twins[run["name"], run["seed"]]) for run in trained if (run["name"], run["seed"]) in twins]

    def choose(rest: Sequence[Run]) -> float:
        return choose_unreadable([pair for pair in pairs if pair[0] in rest], limit)

    unreadable = leave_one_out([run for run, _ in pairs], choose)
    print(f"UNREADABLE without each source: {unreadable}; all: {choose(trained)}\n")
    rows = report_level(out, [run for run in trained if is_readable(run, choose(trained), limit)], limit)
    viewed, embedded = ([run for run in frozen if bool(run["frozen_views"]) is kind] for kind in (True, False))
    print(f"{len(viewed)} runs of frozen backbones")
    still = report_level(out, viewed, limit)
    print(f"{len(embedded)} runs without views")
    report_level(out, embedded, limit)
    ends = []
    for run, twin in pairs:
        helped = is_readable(run, unreadable[run["source"]], limit)
        name, seed = run["name"], run["seed"]
        ends.append(rows[name, seed] if helped and (name, seed) in rows else still[twin["name"], seed])
    print(f"{len(ends)} default runs, those that have not helped from the start")
    summarise(ends)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
