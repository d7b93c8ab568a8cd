"""Measure a backbone without labels: collapse of its features, and neighbours that survive a change of the view."""

import copy
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.core.random_streams import generator
from cdc_plugin.data.images import Progress
from cdc_plugin.data.views import plain_view, view_settings, weak_view
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone

MOST_IMAGES, FEWEST_IMAGES = 1000, 64
SECONDS = 20.0  # the target for the four passes of `compare_neighbours`
BATCH = 64
NEIGHBOURS = 10
# Crops that keep half of the area, unmirrored: digits and letters have a right way round. On trained networks
# 67 to 89 % of ten neighbours stayed, on the same networks with random weights 8 to 24 %.
CROP_SCALE = 0.5
# Beyond these limits the features hardly distinguish images.
LEAST_SPREAD, LEAST_RANK, MOST_DEAD = 0.05, 1.5, 0.5
DEAD_SHARE = 0.01  # of the mean deviation of a dimension
BETTER_RATIO = 1.3
FEWEST_FOR_VERDICT = 50


@dataclass(frozen=True)
class FeatureSpread:
    """How much of its space a network uses."""

    effective_rank: float  # exponential of the entropy of the covariance's eigenvalues; 1 is a line
    dead_dimensions: float  # share of features that hardly vary over the images
    mean_cosine: float  # between the features of two images; 1 if all are alike
    spread: float  # deviation of unit-length features times the root of their number, 0 to 1
    collapsed: bool
    words: str


@dataclass(frozen=True)
class Neighbours:
    """Nearest neighbours of images and of crops of them."""

    kept: float  # share of an image's nearest others that are also its crop's nearest
    found: float  # share of crops whose nearest image is their own


@dataclass(frozen=True)
class NeighbourComparison:
    """A network against itself with random weights."""

    neighbours: int
    trained: Neighbours
    random: Neighbours
    chance: float  # what arbitrary neighbours would give for ``kept``
    better: bool | None  # whether the trained network is clearly better; None where images are too few to tell
    words: str


def choose_image_count(backbone: Backbone, pixels: Tensor) -> int:
    """Return how many images the network can process in reasonable time, by a trial: 1000, half, a quarter ..."""
    settings = view_settings(backbone)
    few = plain_view(pixels[:8], settings)
    with torch.no_grad():
        backbone(few[:1])  # the first pass is slower than later ones
        began = time.monotonic()
        backbone(few)
    per_image = (time.monotonic() - began) / len(few)
    count = MOST_IMAGES
    while count // 2 >= FEWEST_IMAGES - 2 and 4 * count * per_image > SECONDS:
        count //= 2
    return min(count, len(pixels))


def measure_spread(features: Tensor) -> FeatureSpread:
    """Measure whether features (N, D) distinguish images at all."""
    rows = features.double()
    deviation = rows.std(dim=0)
    values = torch.linalg.svdvals(rows - rows.mean(dim=0)).square()  # eigenvalues of the covariance, but for a factor
    shares = values / values.sum().clamp_min(1e-30)
    rank = float(torch.exp(-(shares * shares.clamp_min(1e-30).log()).sum()))
    dead = float((deviation <= DEAD_SHARE * deviation.mean()).double().mean())
    unit, count = F.normalize(rows, dim=1), len(rows)
    cosine = float((unit.sum(dim=0).square().sum() - unit.square().sum()) / (count * (count - 1)))
    spread = float(unit.var(dim=0).sum().sqrt())
    if spread < LEAST_SPREAD:
        words = "collapsed: all images get nearly the same features"
    elif rank < LEAST_RANK:
        words = "collapsed: the features vary along a single line"
    elif dead > MOST_DEAD:
        words = f"partly collapsed: {dead:.0%} of the features never vary"
    else:
        words = "not collapsed"
    return FeatureSpread(rank, dead, cosine, spread, words != "not collapsed", words)


def measure_neighbours(features: Tensor, views: Tensor, count: int) -> Neighbours:
    """Compare the nearest images of N features (N, D) with those of other views of the same images (N, D)."""
    bank, queries = F.normalize(features, dim=1), F.normalize(views, dim=1)
    own = torch.arange(len(bank), device=bank.device)
    near_image, near_view = bank @ bank.T, queries @ bank.T
    found = (near_view.argmax(dim=1) == own).float().mean()
    for similarity in (near_image, near_view):
        similarity.fill_diagonal_(-float("inf"))
    first, second = (similarity.topk(count, dim=1).indices for similarity in (near_image, near_view))
    kept = (first.unsqueeze(2) == second.unsqueeze(1)).any(dim=2).float().mean()
    return Neighbours(float(kept), float(found))


def compare_neighbours(
    backbone: Backbone, pixels: Tensor, progress: Progress | None = None
) -> tuple[Tensor, NeighbourComparison]:
    """Return features of the images, and their neighbours against the same network with random weights.

    Args:
        pixels: uint8 (N, 3, S, S) on the CPU, at least 4.
    """
    count = max(1, min(NEIGHBOURS, len(pixels) // 10))
    networks = (backbone, build_random_twin(backbone, pixels))
    passes = [(network, crops) for network in networks for crops in (False, True)]
    steps = [(number, start) for number in range(len(passes)) for start in range(0, len(pixels), BATCH)]
    rows: list[list[Tensor]] = [[] for _ in passes]
    for number, start in progress(steps, len(steps), "neighbours") if progress else steps:
        network, crops = passes[number]
        part = pixels[start : start + BATCH].to(backbone.mean.device)
        rows[number].append(_extract(network, part, generator(0, start) if crops else None))
    features, views, random_features, random_views = map(torch.cat, rows)
    trained = measure_neighbours(features, views, count)
    random = measure_neighbours(random_features, random_views, count)
    better = trained.kept > BETTER_RATIO * random.kept if len(pixels) >= FEWEST_FOR_VERDICT else None
    verdict = "too few images to compare with random weights"
    if better is not None:
        degree = "" if better else ("hardly " if trained.kept > random.kept else "no ")
        verdict = f"{degree}better than random weights"
    words = f"{verdict}: {trained.kept:.0%} against {random.kept:.0%}"
    comparison = NeighbourComparison(count, trained, random, count / (len(pixels) - 1), better, words)
    return features.cpu(), comparison


def build_random_twin(backbone: Backbone, pixels: Tensor) -> Backbone:
    """Return the network with random weights, and BatchNorm statistics of the images (N, 3, S, S) uint8."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = _initialise(backbone)
    twin = Backbone(network, backbone.feature_dim, backbone.mean.tolist(), backbone.std.tolist(), backbone.input_size)
    twin.to(backbone.mean.device)
    layers = [m for m in twin.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if layers:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the plain mean over batches
            layer.train()
        with torch.no_grad():
            twin(plain_view(pixels[:BATCH].to(backbone.mean.device), view_settings(backbone)))
    return twin.eval()


@torch.no_grad()
def _extract(backbone: Backbone, pixels: Tensor, crops: torch.Generator | None) -> Tensor:
    settings = view_settings(backbone, flip=False, crop_scale=CROP_SCALE)
    view = plain_view(pixels, settings) if crops is None else weak_view(pixels, settings, crops)
    return backbone(view.contiguous(memory_format=torch.channels_last)).float()


def _initialise(backbone: Backbone) -> nn.Module:
    if backbone.spec is not None:
        return build(backbone.spec)[0]
    network = copy.deepcopy(backbone.module)
    for module in network.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    return network
