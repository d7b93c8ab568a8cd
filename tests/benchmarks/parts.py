"""The parts of a run by themselves: k-means against scikit-learn, initialisation, and how all of them grow."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from material import blobs, resnet18
from measure import Found, Limit, Setting, cpu_seconds, slope

from cdc_plugin.core.kmeans import kmeans
from cdc_plugin.core.prototypes import fit_prototype_head
from cdc_plugin.core.random_streams import generator
from cdc_plugin.core.selection import select_confident
from cdc_plugin.core.targets import find_mini_clusters, mini_cluster_targets
from cdc_plugin.data.images import open_images
from cdc_plugin.data.views import plain_view, view_settings
from cdc_plugin.training.features import Features, refine_over_all

FEATURES = 64  # D where growth is measured
STEEPEST = 1.35  # n log n over these ranges, and more iterations until k-means settles, are 1.2
Work = Callable[[], object]


def kmeans_against_scikit_learn(setting: Setting, images: int = 1000, clusters: int = 500) -> Found:
    """Mini-clusters of one batch, (N, K, D) = (1000, 500, 512): features of a ResNet-18 on real digits."""
    from sklearn.cluster import KMeans

    backbone = resnet18().eval()
    views = plain_view(open_images("digits", 32, labels=False).batch(range(images)), view_settings(backbone))
    with torch.no_grad():
        features = F.normalize(torch.cat([backbone(part) for part in views.split(250)]), dim=1)
    repeats, array = 1 if setting.quick else 3, features.numpy()
    ours = cpu_seconds(lambda: kmeans(features, clusters, generator(0)), repeats + 2)
    theirs = cpu_seconds(lambda: KMeans(clusters, n_init=1, random_state=0).fit(array), repeats, warm=False)
    inertias = [KMeans(clusters, n_init=1, random_state=seed).fit(array).inertia_ for seed in range(repeats)]
    own = [kmeans(features, clusters, generator(seed)).inertia for seed in range(repeats)]
    rows = {
        "this package": {"seconds": ours, "inertia": own[0]},
        "scikit-learn": {"seconds": theirs, "inertia": inertias[0]},
    }
    limits = [
        Limit("k-means: CPU over scikit-learn's", ours / theirs, 0.2),
        Limit("k-means: inertia over scikit-learn's", sum(own) / sum(inertias), 1.01),
    ]
    return Found(f"k-means: N = {images}, K = {clusters}, D = {features.shape[1]}", rows, limits)


def initialisation(setting: Setting) -> Found:
    """Both heads from ready features: 5,000 of 128 and of 512 dimensions, 10 and 100 clusters, 512 hidden units."""
    count, hidden = (1000, 128) if setting.quick else (5000, 512)
    rows = {}
    for size, clusters in ((128, 10), (512, 10), (512, 100)):
        features = blobs(count, size, clusters)

        def work(features: torch.Tensor = features, clusters: int = clusters) -> object:
            return fit_prototype_head(features, clusters, hidden, generator(0))

        rows[f"D = {size}, C = {clusters}"] = {"seconds": cpu_seconds(work, warm=False)}
    return Found(f"initialisation: {count} features, H = {hidden}", rows)


def growth(setting: Setting, most: int | None = None) -> Found:
    """Seconds over N = 1k..100k images, K = 10..1000 mini-clusters and C = 2..1000 clusters, and their exponents."""
    most = most or (10_000 if setting.quick else 100_000)
    numbers = [most // 100, most // 10, most]
    few = max(200, most // 20)  # images where K or C grows
    minis = [size for size in (10, 100, 1000) if size <= few // 2]
    classes = [size for size in (2, 10, 100, 1000) if size <= few // 2]
    named: dict[str, tuple[Sequence[int], Callable[[int], Work]]] = {
        "N: k-means, K = 10": (numbers, lambda n: _minis(n, 10)),
        "N: selection, C = 10": (numbers, lambda n: _selection(n, 10)),
        "N: targets, C = 10, K = N / 2": (numbers, lambda n: _targets(n, 10, n // 2)),
        "N: initialisation, C = 10, H = 64": (numbers, lambda n: _heads(n, 10)),
        f"K: k-means, N = {few}": (minis, lambda k: _minis(few, k)),
        f"K: targets, N = {few}, C = 10": (minis, lambda k: _targets(few, 10, k)),
        f"C: selection, N = {few}": (classes, lambda c: _selection(few, c)),
        f"C: targets, N = {few}, K = N / 2": (classes, lambda c: _targets(few, c, few // 2)),
        f"C: initialisation, N = {few}, H = 64": (classes, lambda c: _heads(few, c)),
    }
    rows, steepest = {}, 0.0
    for name, (sizes, work_of) in named.items():
        seconds = [_seconds(work_of(size)) for size in sizes]
        # The exponent of the larger half: small sizes are all overhead, which hides how the rest grows.
        exponent = slope(sizes[-2:], seconds[-2:])
        steepest = max(steepest, exponent)
        rows[name] = {f"{size:,}": spent for size, spent in zip(sizes, seconds, strict=True)} | {"exponent": exponent}
    return Found("growth: CPU seconds by size", rows, [Limit("growth: steepest exponent", steepest, STEEPEST)])


def _seconds(work: Work) -> float:
    """Short work is repeated, so that the clock's steps do not matter."""
    first = cpu_seconds(work, warm=False)
    return first if first > 0.5 else cpu_seconds(work, 3)


def _minis(count: int, clusters: int) -> Work:
    features = blobs(count, FEATURES, 50)
    return lambda: find_mini_clusters(features, clusters, generator(0))


def _heads(count: int, clusters: int) -> Work:
    """As a run does it: of very many features the starts of k-means see a sample."""
    features = Features(blobs(count, FEATURES, clusters), count)

    def work() -> object:
        rows, chosen = features.sample(clusters, generator(0))
        refine = None if len(chosen) == count else partial(refine_over_all, features)
        return fit_prototype_head(rows, clusters, FEATURES, generator(0), refine)

    return work


def _selection(count: int, clusters: int) -> Work:
    probs = F.softmax(3 * torch.randn(count, clusters, generator=generator(3)), dim=1)
    return lambda: select_confident(probs)


def _targets(count: int, clusters: int, minis: int) -> Work:
    probs = F.softmax(3 * torch.randn(count, clusters, generator=generator(3)), dim=1)
    assignment = torch.randint(minis, (count,), generator=generator(4))
    return lambda: mini_cluster_targets(probs, assignment, minis)
