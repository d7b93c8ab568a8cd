"""Inspect a checkpoint: what it is, whether it loads completely, and whether it suits a set of images.

Without labels, images show two things of a backbone: whether its features collapsed, and whether neighbours stay
neighbours when the view changes.
"""

import copy
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.checkpoints.infer.batchnorm import QUICK_LOOK
from cdc_plugin.checkpoints.infer.resolve import adopt_native_size, check_input, infer_input
from cdc_plugin.checkpoints.load import BRANCHES, Loaded, Wanted, formats, load_checkpoint
from cdc_plugin.checkpoints.load_model import is_result, load_model
from cdc_plugin.checkpoints.read import Checkpoint, find_run, read_checkpoint
from cdc_plugin.checkpoints.weights import WeightsMismatchError, nearest
from cdc_plugin.core.mahalanobis import FALSE_ALARMS
from cdc_plugin.core.random_streams import generator
from cdc_plugin.core.torch_defaults import torch_defaults
from cdc_plugin.data.cache import copy_rows
from cdc_plugin.data.images import Progress, open_images
from cdc_plugin.data.sources.base import spread_evenly
from cdc_plugin.data.sources.features import BLOCK, Space, describe_features, explain_difference, open_spaces
from cdc_plugin.data.views import plain_view, view_settings, weak_view
from cdc_plugin.errors import ConfigError, DataError, UserError, option
from cdc_plugin.evaluation.records import SCHEMA_VERSION
from cdc_plugin.models.architectures import build, describe
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training.prepare import FITTED, check_source
from cdc_plugin.training.runtime import choose_device

MOST_HEADS = 32
NAMED = 200  # names of each kind that a report lists; the first of them with their nearest match
WITH_NEAREST = 40
# Images that are examined: at most, also by a slow network, and at least.
MOST_IMAGES, SLOW_IMAGES, FEWEST_IMAGES = 1000, 64, 4
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
CORRESPONDING = 2.0  # times as many neighbours in common as by chance: rows of two spaces are of the same samples


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


@torch_defaults()
def inspect(
    path: str | Path | None = None,
    data: Any = None,
    *,
    features: Any = None,
    format: str | None = None,
    arch: str | None = None,
    branch: str | None = None,
    head: int | None = None,
    clusters: int | None = None,
    pool: str | None = None,
    trust_checkpoint: bool = False,
    device: str = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return all facts about a checkpoint as plain values for JSON; ``loadable`` says whether it can be used.

    >>> import cdc_plugin
    >>> report = cdc_plugin.inspect("no such file.pth")
    >>> report["loadable"], "no such file.pth" in report["error"]
    (False, True)

    Args:
        path: a checkpoint, a run or result folder, or ``timm:NAME``; None to look at features alone.
        data: images to try it on, as for `refine`; at most 1000 of them are examined.
        features: vectors in place of images, as for `refine`.
        format, arch, branch, head, clusters, pool: what to load, where the file leaves a choice.
        trust_checkpoint: open whole pickled networks, which runs their code.
    """
    wanted = Wanted(arch, branch, head, clusters, pool=pool)
    start = {"schema_version": SCHEMA_VERSION, "kind": "inspection", "path": None if path is None else str(path)}
    report: dict[str, Any] = {**start, "loadable": False, "error": None}
    chosen = choose_device(device)  # refused before anything is read, and where no image asks for it
    if path is None and features is None:
        raise ConfigError(f"missing a checkpoint, or {option('features', 'FILE')}")
    if features is not None:
        found = examine_features(features)
        problem = found.pop("problem")
        report |= {"features": found, "loadable": problem is None and path is None, "error": problem}
    if path is None or report["error"] is not None:
        return report
    try:
        loaded = load_checkpoint(path, format, wanted, trust_checkpoint)
    except WeightsMismatchError as error:
        return report | {"error": str(error), "weights": _describe_mismatch(error)}
    except UserError as error:
        return report | {"error": str(error)}
    backbone = loaded.backbone
    report |= {
        "loadable": True,
        "writer": loaded.origin.writer,
        "format": loaded.format,
        "network": loaded.origin.network,
        "epoch": loaded.origin.epoch,
        "parameters": sum(parameter.numel() for parameter in backbone.parameters()),
        "feature_dim": backbone.feature_dim,
        "weights": {"matched": loaded.matched, "tensors": len(backbone.module.state_dict())},
        "input": None
        if backbone.takes_features
        else {
            "size": backbone.input_size,
            "mean": _round(backbone.mean),
            "std": _round(backbone.std),
            "inferred": list(backbone.inferred),
        },
        "why": dict(loaded.origin.why),
        "file": None,
    }
    checkpoint = None if str(path).startswith(("timm:", "hf-hub:")) else read_checkpoint(path, trust_checkpoint)
    if checkpoint is not None:
        report["file"] = {
            "path": str(checkpoint.path),
            "bytes": checkpoint.path.stat().st_size,
            "tensors": len(checkpoint.state),
            "beside": sorted(checkpoint.sidecar),
        }
    report |= _find_heads(checkpoint, loaded, wanted) | _find_branches(checkpoint, loaded, wanted)
    if data is not None:
        report["images"] = examine_images(backbone, data, chosen, progress)
    if features is not None:
        try:
            report["features"]["model"] = fit_features(path, backbone, features)
        except UserError as error:
            report |= {"loadable": False, "error": str(error)}
    return report


def examine_images(backbone: Backbone, data: Any, device: torch.device, progress: Progress | None) -> dict[str, Any]:
    """Return what images show about a backbone, without labels.

    Facts that the checkpoint does not state are inferred first, as at the start of a run; the rest is about the
    backbone that a run would use.
    """
    if backbone.takes_features:
        instead = f"give {option('features', '...')} in place of {option('data', '...')}"
        raise DataError(f"the model takes {describe(backbone.spec)}, not images; {instead}")
    adopt_native_size(backbone, data)
    images = open_images(data, backbone.input_size, labels=False, progress=progress, limit=MOST_IMAGES)
    if len(images) < FEWEST_IMAGES:
        raise DataError(f"{images.source} has {len(images)} readable images; give at least {FEWEST_IMAGES}")
    backbone.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    pixels = images.batch(torch.arange(len(images)))
    few = _pick_evenly(pixels, choose_image_count(backbone, pixels))
    unnormalised = dataclasses.replace(view_settings(backbone), mean=(0.0,) * 3, std=(1.0,) * 3)
    views = plain_view(_pick_evenly(few, max(QUICK_LOOK, len(few) // 2)), unnormalised).mul(255)
    resolution = infer_input(backbone, views)
    backbone = resolution.backbone.eval()
    check = check_input(backbone, views)
    features, comparison = compare_neighbours(backbone, few, progress)
    return {
        "source": images.source,
        "count": len(few),
        "size": backbone.input_size,
        "skipped": len(images.skipped),
        "warnings": [warning["text"] for warning in images.warnings],
        "settled": resolution.reason if resolution.decided else None,
        "used": {"mean": _round(backbone.mean), "std": _round(backbone.std), "spec": backbone.spec},
        "batchnorm": {
            "verdict": check.verdict,
            "words": check.words,
            "variants": [dataclasses.asdict(variant) for variant in check.variants],
        },
        "features": dataclasses.asdict(measure_spread(features)),
        "neighbours": dataclasses.asdict(comparison),
    }


def _pick_evenly(pixels: Tensor, count: int) -> Tensor:
    return pixels[torch.linspace(0, len(pixels) - 1, min(count, len(pixels))).long()]


def choose_image_count(backbone: Backbone, pixels: Tensor) -> int:
    """Return how many images the network can process in reasonable time, by a trial: 1000, half, a quarter ..."""
    few = plain_view(pixels[:8].to(backbone.mean.device), view_settings(backbone))
    with torch.no_grad():
        backbone(few[:1]).sum().item()  # the first pass is slower than later ones; reading a number awaits its end
        began = time.monotonic()
        backbone(few).sum().item()
    per_image = (time.monotonic() - began) / len(few)
    count = MOST_IMAGES
    while count // 2 >= SLOW_IMAGES - 2 and 4 * count * per_image > SECONDS:
        count //= 2
    return min(count, len(pixels))


def examine_features(sources: Any) -> dict[str, Any]:
    """Return what vectors show of themselves: every space alone, and whether the rows of several correspond."""
    spaces = open_spaces(sources)
    difference = explain_difference(spaces)
    facts, correspondence = [_examine_space(space) for space in spaces], []
    if difference is None and len(spaces) > 1:
        first, *others = (_read_sample(space) for space in spaces)
        correspondence = [measure_correspondence(first, other) for other in others]
    broken = next((space for space in facts if space["not_finite"]), None)
    problem = difference
    if broken is not None and difference is None:
        problem = f"{broken['source']} has rows that are not finite in float32 ({broken['not_finite']})"
        problem += "; remove these rows, or compute them again"
    return {"spaces": facts, "correspondence": correspondence, "problem": problem}


def _examine_space(space: Space) -> dict[str, Any]:
    """Return the facts about all rows of a space, which are read block by block."""
    count, width = space.rows.shape
    low, high, broken = np.full(width, np.inf, np.float32), np.full(width, -np.inf, np.float32), 0
    marks = np.empty(count, dtype=np.int64)
    for start in range(0, count, BLOCK):
        with np.errstate(over="ignore"):
            rows = copy_rows(space.rows, slice(start, start + BLOCK)).astype(np.float32)
        marks[start : start + len(rows)] = [hash(row.tobytes()) for row in rows]
        finite = rows[np.isfinite(rows).all(axis=1)]
        broken += len(rows) - len(finite)
        if len(finite):
            low, high = np.minimum(low, finite.min(axis=0)), np.maximum(high, finite.max(axis=0))
    sample = _read_sample(space)
    sample = sample[sample.isfinite().all(dim=1)]
    return {
        "source": space.title,
        "count": count,
        "dimension": width,
        "dtype": str(space.rows.dtype),
        "not_finite": broken,
        "duplicates": count - len(np.unique(marks)),
        "constant_columns": int((low == high).sum()),
        "features": dataclasses.asdict(measure_spread(sample, "sample")) if len(sample) > 1 else None,
    }


def _read_sample(space: Space) -> Tensor:
    places = np.asarray(spread_evenly(len(space.rows), MOST_IMAGES))
    with np.errstate(over="ignore"):  # counted by `_examine_space`
        return torch.from_numpy(copy_rows(space.rows, places).astype(np.float32))


def measure_correspondence(first: Tensor, second: Tensor) -> dict[str, Any]:
    """Return how many neighbours of a row (N, D) are neighbours in another space (N, D'), and by chance."""
    both = first.isfinite().all(dim=1) & second.isfinite().all(dim=1)
    units = [F.normalize(rows[both] - rows[both].mean(dim=0), dim=1) for rows in (first, second)]
    count, near = max(1, min(NEIGHBOURS, len(units[0]) // 10)), []
    if len(units[0]) < FEWEST_FOR_VERDICT:
        return {"neighbours": count, "kept": None, "chance": None, "words": "too few rows to compare"}
    for unit in units:
        similarity = (unit @ unit.T).fill_diagonal_(-float("inf"))
        near.append(similarity.topk(count, dim=1).indices)
    kept, chance = _share_kept(*near), count / (len(units[0]) - 1)
    words = "the rows correspond" if kept > CORRESPONDING * chance else "no sign that the rows correspond"
    return {"neighbours": count, "kept": kept, "chance": chance, "words": words}


def fit_features(path: str | Path, backbone: Backbone, sources: Any) -> dict[str, Any]:
    """Return whether vectors suit a model: why not, or the share of a sample of them beyond its outlier limit."""
    source = describe_features(sources, labels=False)
    check_source(backbone, source)
    model = load_model(path) if is_result(Path(find_run(path))) else None
    if model is None or model.prototypes is None:
        return {"looked_at": 0, "outliers": None, "expected": None}
    rows = torch.from_numpy(source[spread_evenly(len(source), FITTED)])
    with torch.no_grad():
        distance = model.prototypes.distance(model.backbone.eval()(rows))
    outliers = float((distance > model.prototypes.limit).float().mean())
    return {"looked_at": len(rows), "outliers": outliers, "expected": FALSE_ALARMS}


def measure_spread(features: Tensor, noun: str = "image") -> FeatureSpread:
    """Measure whether features (N, D) distinguish images at all."""
    rows = features.cpu().double()
    deviation = rows.std(dim=0)
    values = torch.linalg.svdvals(rows - rows.mean(dim=0)).square()  # eigenvalues of the covariance, but for a factor
    shares = values / values.sum().clamp_min(1e-30)
    rank = float(torch.exp(-(shares * shares.clamp_min(1e-30).log()).sum()))
    dead = float((deviation <= DEAD_SHARE * deviation.mean()).double().mean())
    unit, count = F.normalize(rows, dim=1), len(rows)
    cosine = float((unit.sum(dim=0).square().sum() - unit.square().sum()) / (count * (count - 1)))
    spread = float(unit.var(dim=0).sum().sqrt())
    if spread < LEAST_SPREAD:
        words = f"collapsed: all {noun}s get nearly the same features"
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
    return Neighbours(_share_kept(first, second), float(found))


def _share_kept(first: Tensor, second: Tensor) -> float:
    """Return the share of neighbours (N, k) that are among others (N, k) of the same rows."""
    return float((first.unsqueeze(2) == second.unsqueeze(1)).any(dim=2).float().mean())


def compare_neighbours(
    backbone: Backbone, pixels: Tensor, progress: Progress | None = None
) -> tuple[Tensor, NeighbourComparison]:
    """Return features of the images, and their neighbours against the same network with random weights."""
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
    degree = "" if better else ("hardly " if trained.kept > random.kept else "no ")
    verdict = "too few images to compare with" if better is None else f"{degree}better than"
    words = f"{verdict} random weights: {trained.kept:.0%} against {random.kept:.0%}"
    return features.cpu(), NeighbourComparison(count, trained, random, count / (len(pixels) - 1), better, words)


def build_random_twin(backbone: Backbone, pixels: Tensor) -> Backbone:
    """Return the network with random weights, and BatchNorm statistics of the images (N, 3, S, S) uint8."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if backbone.spec is not None:
            network = build(backbone.spec)[0]
        else:
            network = copy.deepcopy(backbone.module)
            for module in network.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
    twin = Backbone(network, backbone.feature_dim, backbone.mean.tolist(), backbone.std.tolist(), backbone.input_size)
    twin.to(backbone.mean.device)
    layers = [m for m in twin.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean over batches
        layer.train()
    if layers:
        with torch.no_grad():
            twin(plain_view(pixels[:BATCH].to(backbone.mean.device), view_settings(backbone)))
    return twin.eval()


@torch.no_grad()
def _extract(backbone: Backbone, pixels: Tensor, crops: torch.Generator | None) -> Tensor:
    settings = view_settings(backbone, flip=False, crop_scale=CROP_SCALE)
    view = plain_view(pixels, settings) if crops is None else weak_view(pixels, settings, crops)
    return backbone(view.contiguous(memory_format=torch.channels_last)).float()


def _describe_mismatch(error: WeightsMismatchError) -> dict[str, Any]:
    differences = error.differences
    kinds = {kind: getattr(differences, kind) for kind in ("missing", "unexpected", "misshapen")}
    tensors = differences.matched + len(differences.missing) + len(differences.misshapen)

    def list_names(names: tuple[str, ...], others: tuple[str, ...]) -> list[dict[str, Any]]:
        return [
            {"name": name, "near": nearest(name, others) if index < WITH_NEAREST else None}
            for index, name in enumerate(names[:NAMED])
        ]

    return {
        "matched": differences.matched / max(tensors, 1),
        "tensors": tensors,
        "counts": {kind: len(names) for kind, names in kinds.items()},
        "missing": list_names(differences.missing, differences.unexpected),
        "unexpected": list_names(differences.unexpected, differences.missing),
        "misshapen": [
            {"name": name, "found": list(found), "expected": list(expected)}
            for name, (found, expected) in list(error.shapes.items())[:NAMED]
        ],
    }


def _find_heads(checkpoint: Checkpoint | None, loaded: Loaded, wanted: Wanted) -> dict[str, Any]:
    """Return every clustering head of the file, by loading one after the other, and which is used."""
    described = [_describe_head(head) for head in loaded.heads]
    if checkpoint is not None and loaded.format != "native" and len(loaded.heads) < 2:
        heads: list[nn.Module] = []
        for number in range(MOST_HEADS):
            # By number alone: a number of clusters would select another head.
            other = _try_load(checkpoint, loaded.format, dataclasses.replace(wanted, head=number, clusters=None))
            if other is None or len(other.heads) != 1 or (heads and _is_same(other.heads[0], heads[-1])):
                break
            heads.append(other.heads[0])
        described = [_describe_head(head) for head in heads] or described
        used = [n for n, head in enumerate(heads) if loaded.heads and _is_same(head, loaded.heads[0])][:1]
    else:
        used = list(range(len(described)))
    return {"heads": described, "heads_used": used}


def _find_branches(checkpoint: Checkpoint | None, loaded: Loaded, wanted: Wanted) -> dict[str, Any]:
    """Return which of the network and its moving average the file holds, and which is used."""
    networks: dict[str, nn.Module] = {}
    if checkpoint is not None and loaded.format != "native":
        for branch in BRANCHES:
            other = _try_load(checkpoint, loaded.format, dataclasses.replace(wanted, branch=branch))
            if other is not None and not any(_is_same(other.backbone, network) for network in networks.values()):
                networks[branch] = other.backbone
    used = [branch for branch, network in networks.items() if _is_same(network, loaded.backbone)]
    return {"branches": list(networks) or ["online"], "branch_used": used[0] if used else "online"}


def _try_load(checkpoint: Checkpoint, format: str, wanted: Wanted) -> Loaded | None:
    try:
        return formats.get(format).load(checkpoint, wanted)
    except UserError:
        return None


def _is_same(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def _describe_head(head: nn.Module) -> dict[str, Any]:
    spec: dict[str, Any] = head.spec  # type: ignore[assignment]
    layers = [entry[0] for entry in spec.get("layers", [])]
    known = {"mlp": "linear-batchnorm-relu-linear", "cosine": "cosine", "mixture": "mean of linear layers"}
    kind = known.get(spec["kind"], "-".join(layers))
    return {"kind": kind, "clusters": spec["clusters"], "temperature": spec.get("temperature")}


def _round(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
