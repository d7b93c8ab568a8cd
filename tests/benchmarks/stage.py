"""Speed of the stage's parts, as ratios measured in one process: ``python tests/benchmarks/stage.py``.

Prints what was measured on what, and whether each ratio keeps its stated limit; exits with 1 if one does not.
CPU seconds on one thread, so that other work on the machine matters little.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from torch import nn

from cdc_plugin.checkpoints.architectures import build
from cdc_plugin.config import RefineConfig
from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.prototypes import prototype_head
from cdc_plugin.core.selection import select_confident
from cdc_plugin.core.targets import mini_cluster_targets, mini_clusters_of
from cdc_plugin.data.images import open_images
from cdc_plugin.data.views import ViewSettings, make_views, plain_view
from cdc_plugin.engine import Refiner, Views
from cdc_plugin.heads import ClusterHead
from cdc_plugin.runtime import generator

RESNET18 = {
    "family": "resnet",
    "block": "basic",
    "depths": [2, 2, 2, 2],
    "widths": [64, 128, 256, 512],
    "stem": {"kernel": 3, "stride": 1, "padding": 1, "pool": True},
}


def cpu_seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Least CPU time of one call, after one call that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def kmeans_against_scikit_learn() -> dict[str, float]:
    """(N, K, D) = (1000, 500, 512), features of an untrained ResNet-18 on real digits."""
    digits = open_images("digits", 32, labels=False)
    network, _ = build(RESNET18)
    views = plain_view(digits.batch(range(1000)), settings())
    with torch.no_grad():
        features = F.normalize(torch.cat([network.eval()(part) for part in views.split(250)]), dim=1)
    ours = cpu_seconds(lambda: kmeans(features, 500, generator(0)), 5)
    array = features.numpy()
    theirs = cpu_seconds(lambda: KMeans(500, n_init=1, random_state=0).fit(array), 2)
    inertia = kmeans(features, 500, generator(0)).inertia / KMeans(500, n_init=1, random_state=0).fit(array).inertia_
    return {"ours": ours, "scikit_learn": theirs, "times_less": theirs / ours, "inertia_ratio": inertia}


def initialisation() -> dict[str, float]:
    """Both heads from 5,000 features of 128 dimensions, 10 clusters, 512 hidden units."""
    centers = torch.randn(10, 128, generator=generator(1))
    features = (centers.repeat(500, 1) + torch.randn(5000, 128, generator=generator(2))).relu()
    return {"seconds": cpu_seconds(lambda: prototype_head(features, 10, 512, generator(0)))}


def settings() -> ViewSettings:
    return ViewSettings(32, (0.31,) * 3, (0.35,) * 3, flip=False, crop_scale=0.4)


def share_of_an_epoch(batch: int = 1000, mini_clusters: int = 500) -> dict[str, float]:
    """One batch of a ResNet-18 at 32 px with B = 1000 and K = 500, and the part that is not the backbone's."""
    digits = open_images("digits", 32, labels=False)
    pixels = digits.batch(range(batch))
    network, width = build(RESNET18)
    network.to(memory_format=torch.channels_last)
    config = RefineConfig(
        clusters=10, mini_clusters=mini_clusters, batch_size=batch, sub_batch_size=500, lr_heads=1e-4, lr_backbone=5e-5
    )
    heads = [ClusterHead(width, 512, 10) for _ in range(2)]
    refiner = Refiner(network, *heads, config, torch.device("cpu"), len(pixels), 1000)

    def make() -> Views:
        return Views(*make_views(pixels, settings(), generator(0)), torch.arange(len(pixels)))

    views = make()
    whole = cpu_seconds(lambda: refiner.train_batch(make(), generator(0)))
    augmentation = cpu_seconds(make)
    features = torch.randn(batch, width, generator=generator(3)).relu()
    probs = F.softmax(3 * torch.randn(batch, 10, generator=generator(4)), dim=1)

    def overhead() -> None:
        select_confident(probs)
        assignment = mini_clusters_of(features, mini_clusters, generator(5))
        mini_cluster_targets(probs, assignment, mini_clusters)
        for part in features.split(500):
            refiner._step_calibration(part, probs[: len(part)])

    def bare() -> None:
        """The floor: two forwards, one forward and backward of the backbone alone, on ready tensors."""
        with torch.no_grad():
            for part in (*views.plain.split(500), *views.weak.split(500)):
                network(part)
        for part in views.strong.split(500):
            network.zero_grad()
            nn.functional.mse_loss(network(part), torch.zeros(len(part), width)).backward()

    own = cpu_seconds(overhead, 3)
    return {
        "batch": whole,
        "backbone_alone": cpu_seconds(bare),
        "augmentation": augmentation,
        "selection_targets_kmeans_heads": own,
        "share": own / whole,
    }


def main() -> None:
    torch.set_num_threads(1)
    found = {
        "kmeans (1000, 500, 512)": kmeans_against_scikit_learn(),
        "initialisation (5000, 128), C=10, H=512": initialisation(),
        "one batch, ResNet-18, 32 px, B=1000, K=500": share_of_an_epoch(),
    }
    limits = [
        ("k-means: times less CPU than scikit-learn", found["kmeans (1000, 500, 512)"]["times_less"], ">=", 5.0),
        ("k-means: inertia ratio", found["kmeans (1000, 500, 512)"]["inertia_ratio"], "<=", 1.01),
        (
            "selection + targets + k-means + heads: share of a batch",
            found["one batch, ResNet-18, 32 px, B=1000, K=500"]["share"],
            "<=",
            0.10,
        ),
    ]
    print(json.dumps(found, indent=2))
    failed = False
    for name, value, sign, limit in limits:
        kept = value >= limit if sign == ">=" else value <= limit
        failed |= not kept
        print(f"{name:58s} {value:8.3f}  limit {sign} {limit:<6g} {'kept' if kept else 'NOT KEPT'}")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
