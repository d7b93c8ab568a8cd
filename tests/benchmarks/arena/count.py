"""Choose how the number of clusters is found: ``python tests/benchmarks/arena/count.py ../shared --out DIR``.

Sets of the arena and some of their classes, seen through the first features of their full backbones; two photo sets,
digits and others through a real network. What is extracted and measured is kept in DIR. Weights are chosen on all
sources of images but one, and judged on it. Sets that k-means sorts by less than 60 % have no number that their
features could tell: they are shown, and have no part in the choice.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from entries import LITE, PHOTOS, TRAINED, write_data  # noqa: E402

from cdc_plugin.core.cluster_count import Weights, gather_evidence, list_candidates, weigh  # noqa: E402
from cdc_plugin.core.kmeans import kmeans  # noqa: E402
from cdc_plugin.core.probe import principal_components  # noqa: E402
from cdc_plugin.core.prototypes import standardize_rows  # noqa: E402
from cdc_plugin.metrics.clustering import accuracy  # noqa: E402
from cdc_plugin.training.features import shared_features  # noqa: E402
from cdc_plugin.training.prepare import prepare  # noqa: E402
from cdc_plugin.training.request import configure  # noqa: E402
from cdc_plugin.training.runtime import Runtime  # noqa: E402

Case = dict[str, Any]
SEEN, HIGHEST, STARTS = 2000, 50, 5
READABLE = 0.6  # accuracy of k-means with the true number
FEWER, DRAWS = (2, 3, 4, 5, 7), 2  # classes that are left of a set; sets of these
SMALL = {"input_size": 64}
CLOSE = 0.12  # on the scale of logarithms: how near to the truth a number is as good
RIDGE = 0.01
WHOLE = 10.0  # times what a few classes of a set weigh
HELD = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
COVERED = 0.9  # of the sets left out are to lie in the range


def list_sets() -> Iterator[tuple[str, str, str, str, dict[str, Any]]]:
    """Yield name, source, data, backbone below shared or of the package, and settings of what is counted."""
    for entry in TRAINED:
        known = not entry.backbone.isdigit() and entry.data == {"fashion": "fashion5k"}.get(entry.source, entry.data)
        if known and entry.quality in ("full", "demo", "imagenet") and "_" not in entry.data.replace("_5k", ""):
            yield entry.name, entry.source, entry.data, entry.backbone, entry.settings
    yield "cifar10_5k-imagenet", "cifar", "cifar10_5k", LITE, PHOTOS
    for data in ("digits", "fashion5k", "mnist5k", "usps5k"):
        yield f"{data}-imagenet", data.removesuffix("5k"), data, LITE, PHOTOS | SMALL


def read_features(shared: Path, out: Path) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Yield name, source, features and labels, which are read here to judge by, and nowhere else."""
    for name, source, data, backbone, settings in list_sets():
        kept = out / "features" / f"{name}.npz"
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            given = {"backbone": str(shared / backbone), "data": str(write_data(data, shared, out / "data"))}
            request = configure(None, {**given, "clusters": 10, **settings})
            prepared = prepare(request, None, None, Runtime(torch.device("cpu")), shared_features)
            np.savez(kept, x=prepared.features.map(lambda block: block).numpy(), y=prepared.images.labels)
        with np.load(kept) as archive:
            yield name, source, archive["x"], archive["y"]


def list_cases(shared: Path, out: Path) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Yield every set, and some of its classes."""
    for name, source, features, labels in read_features(shared, out):
        classes, randomness = int(labels.max()) + 1, np.random.default_rng(0)
        for fewer in (count for count in FEWER if count < classes):
            for draw in range(DRAWS):
                left = np.sort(randomness.permutation(classes)[:fewer])
                kept = np.isin(labels, left)
                yield f"{name} {fewer}.{draw}", source, features[kept], np.searchsorted(left, labels[kept])
        yield name, source, features, labels


def measure(shared: Path, out: Path) -> list[Case]:
    """Return the evidence of every case, which is kept."""
    cases = []
    for name, source, features, labels in list_cases(shared, out):
        kept = out / "counts" / f"{name}.npz"
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            chosen = np.random.default_rng(0).permutation(len(features))[:SEEN]
            points, classes = torch.from_numpy(features[chosen]), int(labels.max()) + 1
            candidates = list_candidates(2, max(2, min(HIGHEST, len(points) // 20)))
            evidence = gather_evidence(principal_components(points), candidates, torch.Generator().manual_seed(0))
            free = kmeans(standardize_rows(points), classes, torch.Generator().manual_seed(5), starts=STARTS)
            right = accuracy(free.assignment.numpy(), labels[chosen], classes)
            np.savez(kept, evidence=evidence.numpy(), candidates=candidates, classes=classes, kmeans=right)
            print(f"{name}: measured", flush=True)
        with np.load(kept) as archive:
            cases.append({"name": name, "source": source, **{key: archive[key] for key in archive.files}})
    return cases


def fit(cases: Sequence[Case]) -> list[float]:
    """Return the weights by which the evidence is largest near the truth; every source counts the same."""
    sources = [case["source"] for case in cases]
    scale = torch.from_numpy(np.concatenate([case["evidence"] for case in cases])).std(dim=0)
    weights = torch.zeros(len(scale), requires_grad=True)
    rows = [torch.from_numpy(case["evidence"]) / scale for case in cases]
    apart = [np.log(case["candidates"] / case["classes"]) for case in cases]
    wanted = [torch.softmax(torch.from_numpy(-((each / CLOSE) ** 2) / 2).float(), dim=0) for each in apart]
    # A whole set is what people have; a few of its classes are a makeshift.
    shares = torch.tensor([(1.0 if " " in case["name"] else WHOLE) / sources.count(case["source"]) for case in cases])
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        chances = [torch.log_softmax(each @ weights, dim=0) for each in rows]
        missed = [-(want * chance).sum() for want, chance in zip(wanted, chances, strict=True)]
        value = (torch.stack(missed) * shares).sum() / shares.sum() + RIDGE * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return (weights / scale).tolist()


def count(case: Case, weights: Sequence[float], held: float) -> tuple[int, int, int]:
    found = weigh(torch.from_numpy(case["evidence"]), case["candidates"].tolist(), Weights(*weights, held))
    return found.number, found.low, found.high


def choose_held(cases: Sequence[Case], weights: Sequence[float]) -> float:
    """Return the least share of the evidence whose range holds the truth often enough."""
    for held in HELD:
        ranges = [count(case, weights, held) for case in cases]
        inside = [low <= case["classes"] <= high for case, (_, low, high) in zip(cases, ranges, strict=True)]
        if np.mean(inside) >= COVERED:
            return held
    return HELD[-1]


def report(cases: Sequence[Case], title: str, say: Sequence[str]) -> None:
    ranges = np.array([case["left_out"] for case in cases])
    truth = np.array([int(case["classes"]) for case in cases])
    near = np.abs(ranges[:, 0] - truth) <= 0.2 * truth + 1e-9
    inside = (ranges[:, 1] <= truth) & (truth <= ranges[:, 2])
    width = np.exp(np.log(ranges[:, 2] / ranges[:, 1]).mean())
    print(f"{title}: within 20 % {near.sum()} of {len(cases)}, in the range {inside.sum()}, high / low {width:.1f}")
    for case, (number, low, high) in zip(cases, ranges, strict=True):
        if case["name"] in say:
            right = f"k-means {100 * case['kmeans']:.0f} %"
            print(f"  {case['name']:24s} true {case['classes']:2d}, found {number:2d} ({low}-{high}), {right}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path, help="folder with data/, backbones/ and weights/")
    parser.add_argument("--out", type=Path, required=True, help="folder of features and evidence")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = measure(options.shared, options.out)
    readable = [case for case in cases if case["kmeans"] >= READABLE or " " not in case["name"]]
    chosen_on = [case for case in cases if case["kmeans"] >= READABLE]
    for source in sorted({case["source"] for case in cases}):
        others = [case for case in chosen_on if case["source"] != source]
        weights = fit(others)
        held = choose_held(others, weights)
        for case in cases:
            if case["source"] == source:
                case["left_out"] = count(case, weights, held)
    whole = [case for case in readable if " " not in case["name"]]
    names = [case["name"] for case in whole]
    report([case for case in whole if case["kmeans"] >= READABLE], "whole sets", names)
    report([case for case in whole if case["kmeans"] < READABLE], "whole sets that k-means cannot read", names)
    report([case for case in chosen_on if " " in case["name"]], "some classes of them", [])
    weights = fit(chosen_on)
    print(f"WEIGHTS = {Weights(*(round(each, 2) for each in weights), choose_held(chosen_on, weights))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
