"""Inspect a checkpoint: what it is, whether it loads completely, and whether it suits a set of images."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cdc_plugin.checkpoints.infer.batchnorm import QUICK_LOOK
from cdc_plugin.checkpoints.infer.resolve import adopt_native_size, check_input, infer_input
from cdc_plugin.checkpoints.load import BRANCHES, Loaded, Wanted, formats, load_checkpoint
from cdc_plugin.checkpoints.read import Checkpoint, read_checkpoint
from cdc_plugin.checkpoints.weights import WeightsMismatchError, nearest
from cdc_plugin.data.images import Progress, open_images
from cdc_plugin.data.views import plain_view, view_settings
from cdc_plugin.errors import DataError, UserError
from cdc_plugin.evaluation.inspect_features import MOST_IMAGES, choose_image_count, compare_neighbours, measure_spread
from cdc_plugin.evaluation.records import SCHEMA_VERSION
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
    arch: str | None = None,
    branch: str | None = None,
    head: int | None = None,
    clusters: int | None = None,
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
        path: a checkpoint, a run or result folder, or ``timm:NAME``.
        data: images to try it on, as for `refine`; at most 1000 of them are examined.
        format, arch, branch, head, clusters: what to load, where the file leaves a choice.
        trust_checkpoint: open whole pickled networks, which runs their code.
    """
    wanted = Wanted(arch, branch, head, clusters)
    report: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": "inspection", "path": str(path)}
    report |= {"loadable": False, "error": None}
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
        "input": {
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
        report["images"] = examine_images(backbone, data, device, progress)
    return report


def examine_images(
    backbone: Backbone, data: Any, device: str = "auto", progress: Progress | None = None
) -> dict[str, Any]:
    """Return what images show about a backbone, without labels.

    Facts that the checkpoint does not state are inferred first, as at the start of a run; the rest is about the
    backbone that a run would use.
    """
    adopt_native_size(backbone, data)
    images = open_images(data, backbone.input_size, labels=False, progress=progress, limit=MOST_IMAGES)
    if len(images) < FEWEST:
        raise DataError(f"{images.source} has {len(images)} readable images; give at least {FEWEST}")
    backbone.to(choose_device(device), memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
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


def _pick_evenly(pixels: torch.Tensor, count: int) -> torch.Tensor:
    return pixels[torch.linspace(0, len(pixels) - 1, min(count, len(pixels))).long()]


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
    kind = {"mlp": "linear-batchnorm-relu-linear", "cosine": "cosine"}.get(spec["kind"], "-".join(layers))
    return {"kind": kind, "clusters": spec["clusters"], "temperature": spec.get("temperature")}


def _round(values: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
