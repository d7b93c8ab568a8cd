"""The checkpoint doctor: what a checkpoint is, whether it loads whole, and whether it suits a set of images."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cdc_plugin.checkpoints.infer.batchnorm import QUICK_LOOK
from cdc_plugin.checkpoints.infer.check import check_input
from cdc_plugin.checkpoints.infer.resolve import adopt_native_size, infer_input
from cdc_plugin.checkpoints.load import BRANCHES, Loaded, Wanted, formats, load_checkpoint
from cdc_plugin.checkpoints.read import Checkpoint, read_checkpoint
from cdc_plugin.checkpoints.weights import WeightsMismatchError, nearest
from cdc_plugin.data.images import Progress, open_images
from cdc_plugin.data.views import plain_view, view_settings
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.inspect_features import MOST_IMAGES, affordable, compare_neighbours, feature_spread
from cdc_plugin.evaluation.report_record import SCHEMA_VERSION
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training.runtime import choose_device

MOST_HEADS = 32
NAMED = 200  # names of each kind that a report lists; the first of them with their nearest match
WITH_NEAREST = 40
FEWEST = 4


def inspect(
    path: str | Path,
    data: Any = None,
    *,
    format: str | None = None,
    wanted: Wanted | None = None,
    trust: bool = False,
    device: str = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """All that can be said of a checkpoint, as plain values for JSON; ``loadable`` says whether it can be used.

    Args:
        path: as for ``load_checkpoint``.
        data: images to try it on, as for ``open_images``; at most 1000 of them are looked at.
    """
    wanted = wanted or Wanted()
    report: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": "inspection", "path": str(path)}
    report |= {"loadable": False, "error": None}
    try:
        loaded = load_checkpoint(path, format, wanted, trust)
    except WeightsMismatchError as error:
        return report | {"error": str(error), "weights": _differences(error)}
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
        "input": _input(loaded),
        "why": dict(loaded.origin.why),
    }
    checkpoint = None if str(path).startswith(("timm:", "hf-hub:")) else read_checkpoint(path, trust)
    report |= _file(checkpoint) | _heads(checkpoint, loaded, wanted) | _branches(checkpoint, loaded, wanted)
    if data is not None:
        report["images"] = examine(backbone, data, device, progress)
    return report


def examine(backbone: Backbone, data: Any, device: str = "auto", progress: Progress | None = None) -> dict[str, Any]:
    """What images tell about a backbone, without labels.

    Facts that the checkpoint left open are settled first, as at the start of a run; what follows is about the
    backbone that a run would take.
    """
    adopt_native_size(backbone, data)
    images = open_images(data, backbone.input_size, labels=False, progress=progress, limit=MOST_IMAGES)
    if len(images) < FEWEST:
        raise UserError(f"{images.source} has {len(images)} readable images, a look takes {FEWEST}; add images")
    backbone.to(choose_device(device), memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    pixels = images.batch(torch.arange(len(images)))
    few = _spread(pixels, affordable(backbone, pixels))
    seen = _as_seen(backbone, _spread(few, max(QUICK_LOOK, len(few) // 2)))
    resolution = infer_input(backbone, seen)
    backbone = resolution.backbone.eval()
    verification = check_input(backbone, seen)
    features, comparison = compare_neighbours(backbone, few, progress)
    return {
        "source": images.source,
        "count": len(few),
        "size": backbone.input_size,
        "skipped": len(images.skipped),
        "settled": resolution.reason if resolution.decided else None,
        "used": {"mean": _rounded(backbone.mean), "std": _rounded(backbone.std), "spec": backbone.spec},
        "batchnorm": {
            "verdict": verification.verdict,
            "words": verification.words,
            "variants": [dataclasses.asdict(variant) for variant in verification.variants],
        },
        "features": dataclasses.asdict(feature_spread(features)),
        "neighbours": dataclasses.asdict(comparison),
    }


def _spread(images: torch.Tensor, count: int) -> torch.Tensor:
    return images[torch.linspace(0, len(images) - 1, min(count, len(images))).long()]


def _as_seen(backbone: Backbone, images: torch.Tensor) -> torch.Tensor:
    """The plain views before they are normalised, (N, 3, S, S) in 0..255."""
    settings = dataclasses.replace(view_settings(backbone), mean=(0.0,) * 3, std=(1.0,) * 3)
    return plain_view(images, settings).mul(255)


def _differences(error: WeightsMismatchError) -> dict[str, Any]:
    found = error.differences
    expected = found.matched + len(found.missing) + len(found.misshapen)

    def named(names: tuple[str, ...], others: tuple[str, ...]) -> list[dict[str, Any]]:
        return [
            {"name": name, "near": nearest(name, others) if place < WITH_NEAREST else None}
            for place, name in enumerate(names[:NAMED])
        ]

    shapes = list(error.shapes.items())[:NAMED]
    return {
        "matched": found.matched / max(expected, 1),
        "tensors": expected,
        "counts": {
            "missing": len(found.missing),
            "unexpected": len(found.unexpected),
            "misshapen": len(found.misshapen),
        },
        "missing": named(found.missing, found.unexpected),
        "unexpected": named(found.unexpected, found.missing),
        "misshapen": [{"name": name, "found": list(was), "expected": list(want)} for name, (was, want) in shapes],
    }


def _input(loaded: Loaded) -> dict[str, Any]:
    backbone = loaded.backbone
    return {
        "size": backbone.input_size,
        "mean": _rounded(backbone.mean),
        "std": _rounded(backbone.std),
        "inferred": list(backbone.inferred),
    }


def _file(checkpoint: Checkpoint | None) -> dict[str, Any]:
    if checkpoint is None:
        return {"file": None}
    return {
        "file": {
            "path": str(checkpoint.path),
            "bytes": checkpoint.path.stat().st_size,
            "tensors": len(checkpoint.state),
            "beside": sorted(checkpoint.sidecar),
        }
    }


def _heads(checkpoint: Checkpoint | None, loaded: Loaded, wanted: Wanted) -> dict[str, Any]:
    """Every clustering head of the file, found by asking for one after the other, and which is used."""
    found = [_head(head) for head in loaded.heads]
    if checkpoint is not None and loaded.format != "native" and len(loaded.heads) < 2:
        each: list[nn.Module] = []
        for number in range(MOST_HEADS):
            # Asking by number alone: a number of clusters would name another head.
            asked = dataclasses.replace(wanted, head=number, clusters=None)
            other = _try(checkpoint, loaded.format, asked)
            if other is None or len(other.heads) != 1 or (each and _same(other.heads[0], each[-1])):
                break
            each.append(other.heads[0])
        found = [_head(head) for head in each] or found
        used = [n for n, head in enumerate(each) if loaded.heads and _same(head, loaded.heads[0])][:1]
    else:
        used = list(range(len(found)))
    return {"heads": found, "heads_used": used}


def _branches(checkpoint: Checkpoint | None, loaded: Loaded, wanted: Wanted) -> dict[str, Any]:
    """Which of the network and its moving average the file holds, and which is used."""
    networks: dict[str, nn.Module] = {}
    if checkpoint is not None and loaded.format != "native":
        for branch in BRANCHES:
            other = _try(checkpoint, loaded.format, dataclasses.replace(wanted, branch=branch))
            if other is not None and not any(_same(other.backbone, known) for known in networks.values()):
                networks[branch] = other.backbone
    used = [branch for branch, network in networks.items() if _same(network, loaded.backbone)]
    return {"branches": list(networks) or ["online"], "branch_used": used[0] if used else "online"}


def _try(checkpoint: Checkpoint, format: str, wanted: Wanted) -> Loaded | None:
    try:
        return formats.get(format).load(checkpoint, wanted)
    except UserError:
        return None


def _same(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def _head(head: nn.Module) -> dict[str, Any]:
    spec: dict[str, Any] = head.spec  # type: ignore[assignment]
    layers = [entry[0] for entry in spec.get("layers", [])]
    kind = {"mlp": "linear-batchnorm-relu-linear", "cosine": "cosine"}.get(spec["kind"], "-".join(layers))
    return {"kind": kind, "clusters": spec["clusters"], "temperature": spec.get("temperature")}


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
