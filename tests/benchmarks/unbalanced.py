"""Measure clusters of unequal sizes: ``python tests/benchmarks/unbalanced.py --shared DIR --out DIR [SETTING ...]``.

Four sets, each as it is (balanced), with class sizes of 1:2:..:10 (ramp) and with one class of 1 % of the images
(rare), are refined with the SETTINGs, such as ``sizes=equal``. What has been run is read from --out. A table follows,
and the constants that the package chooses by, each of them once without every set.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "arena"), str(HERE.parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from entries import DIGITS, FASHION, Array, read_array  # noqa: E402

import cdc_plugin.training.review as review  # noqa: E402
from cdc_plugin import refine  # noqa: E402
from cdc_plugin.core.regroup import regroup  # noqa: E402
from cdc_plugin.metrics.clustering import accuracy  # noqa: E402

SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("backbones/digits_resnet18w16.pt", DIGITS),
    "usps5k": ("backbones/usps5k", {}),
    "mnist5k": ("backbones/mnist5k", {}),
    "fashion5k": ("backbones/fashion5k_resnet18w16.pt", FASHION),
}
VARIANTS = ("balanced", "ramp", "rare")
CLASSES = 10
MARGINS = (1.0, 1.25, 1.5, 2.0, 3.0, 1e9)
Run = dict[str, Any]


def choose_rows(labels: Array, variant: str, seed: int) -> Array:
    """Return the images of a variant: classes of a ramp grow from number ``seed`` on, which is also the rare one."""
    randomness, counts = np.random.default_rng(seed), np.bincount(labels)
    order, wanted = np.roll(np.arange(CLASSES), -seed), counts.copy()
    if variant == "ramp":
        shares = np.empty(CLASSES)
        shares[order] = np.arange(1, CLASSES + 1)
        wanted = np.floor(shares * (counts / shares).min()).astype(int)
    if variant == "rare":
        wanted[order[0]] = round((len(labels) - counts[order[0]]) / 99)
    rows = [randomness.permutation(np.flatnonzero(labels == kind))[:count] for kind, count in enumerate(wanted)]
    return np.sort(np.concatenate(rows))


def run_one(request: Run) -> None:
    """Refine, and write what came out; labels are read here, and by the report, only."""
    torch.set_num_threads(1)
    backbone, inputs = SETS[request["set"]]
    shared, out = Path(request["shared"]), Path(request["out"])
    images, labels = read_array(shared / "data" / f"{request['set']}.npz")
    rows, moves = choose_rows(labels, request["variant"], request["seed"]), []
    images, labels = images[rows], labels[rows]

    def look(points: torch.Tensor, assignment: torch.Tensor, clusters: int, margin: float, stream: Any) -> Any:
        """Measure what every margin would have come to."""
        for tried in MARGINS:
            again = torch.Generator().set_state(stream.get_state())
            after, ratio = regroup(points, assignment, clusters, tried, again)
            accuracies = [accuracy(each.numpy(), labels, clusters) for each in (assignment, after)]
            moves.append({"margin": tried, "ratio": ratio, "before": accuracies[0], "after": accuracies[1]})
        return regroup(points, assignment, clusters, margin, stream)

    data = out.with_suffix(".npz")
    np.savez(data, x=images, y=labels)
    settings = {**inputs, **dict(word.split("=") for word in request["settings"])}
    with patch.object(review, "regroup", look):
        folder, seed = out.with_suffix(""), request["seed"]
        report = refine(shared / backbone, data, CLASSES, out=folder, seed=seed, overwrite=True, **settings)
    confusion = np.zeros((CLASSES, CLASSES), dtype=int)
    np.add.at(confusion, (labels, report.predictions["cluster"]), 1)
    keys = ("before", "after", "rounds", "label_free", "seconds")
    record = {**request, **{key: report.metrics[key] for key in keys}, "confusion": confusion.tolist(), "moves": moves}
    out.write_text(json.dumps(record))
    data.unlink()


def write_table(runs: Sequence[Run]) -> None:
    """Print a line for every run: before and after, and how many classes have no cluster of their own."""
    for run in runs:
        kmeans, head, confusion = run["before"]["kmeans"], run["after"]["calibration_head"], np.array(run["confusion"])
        # A class without a cluster in which it is the largest.
        lost = [kind for kind in range(CLASSES) if kind not in confusion.argmax(axis=0)]
        restarts = sum(seen["restarted"] for seen in run["rounds"])
        ratios = " ".join(f"{seen['bond_ratio']:.1f}" for seen in run["rounds"])
        print(
            f"{run['set']:9} {run['variant']:8} {run['seed']} {' '.join(run['settings']):15} "
            f"k-means {kmeans['ACC']:6.1%} ACC {head['ACC']:6.1%} ECE {head['ECE']:5.1%} lost {lost} "
            f"restarts {restarts} of {len(run['rounds'])} ({ratios}), {run['seconds']:.0f} s"
        )


def choose_margin(runs: Sequence[Run]) -> float:
    """Return the margin whose moves have gained most accuracy; of equal ones the largest, which moves least."""

    def gain(margin: float) -> float:
        tried = [move for run in runs for move in run["moves"] if move["margin"] == margin]
        return sum(move["after"] - move["before"] for move in tried)

    return max(reversed(MARGINS), key=gain)


def leave_one_out(name: str, runs: Sequence[Run], choose: Callable[[Sequence[Run]], float]) -> None:
    """Print what is chosen on all sets, and without each of them."""
    without = {left: choose([run for run in runs if run["set"] != left]) for left in SETS}
    words = ", ".join(f"{value:.4g} without {left}" for left, value in without.items())
    print(f"{name}: {choose(runs):.4g} on all sets; {words}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="SETTING")
    parser.add_argument("--shared", type=Path, required=True, help="where data/ and backbones/ lie")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in asked.sets:
        for variant in asked.variants:
            out = asked.out / f"{'-'.join([name, variant, str(asked.seed), *asked.settings])}.json"
            request = {"set": name, "variant": variant, "seed": asked.seed, "settings": asked.settings}
            request |= {"shared": str(asked.shared), "out": str(out)}
            if not out.is_file():
                subprocess.run([sys.executable, __file__, "--one", json.dumps(request)], check=True)
    runs = [json.loads(path.read_text()) for path in sorted(asked.out.glob("*.json"))]
    write_table(runs)
    leave_one_out("margin", runs, choose_margin)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_one(json.loads(sys.argv[2]))
    else:
        main()
