"""Decide by a look at the images what a checkpoint left open: image size, stem and normalisation."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.checkpoints.infer.batchnorm import (
    CLEAR_NORMALISATION,
    CLEAR_SIZE,
    CLEAR_STEM,
    STEM_CHOICES,
    TRUSTED_MISMATCH,
    Comparison,
    batchnorm_mismatch,
    candidate_normalisations,
    has_statistics,
    input_of,
    normalise,
    resize,
    sample,
    with_stem,
)
from cdc_plugin.checkpoints.infer.max_pool import pool_by_weights
from cdc_plugin.data.images import ImageSet, native_size, open_images
from cdc_plugin.models.backbone import Backbone

log = logging.getLogger(__name__)
# Batches after which BatchNorm layers have forgotten how they were initialised (momentum 0.1: 0.5 % is left).
MEMORABLE = 50
# Images that are a little unlike, say some of the classes trained on, still refute a normalisation under which they
# are so many times further off.
BEARABLE_MISMATCH, ABSURD = 0.8, 2.0


@dataclass(frozen=True)
class Resolution:
    """The backbone to use, and what was compared.

    Args:
        backbone: the best variant, or the one passed in where the comparison decides nothing.
        reason: one sentence for the log.
        decided: the facts decided, by name ("mean", "stem.pool", ...), each with its value.
        margins: for each open fact, mismatch of the best other value divided by the best mismatch.
        mismatch: of the best variant; NaN if nothing was compared.
        compared: the variants tried on the whole network, best first.
    """

    backbone: Backbone
    reason: str
    decided: dict[str, Any] = field(default_factory=dict)
    margins: dict[str, float] = field(default_factory=dict)
    mismatch: float = float("nan")
    compared: tuple[dict[str, Any], ...] = ()


def adopt_native_size(backbone: Backbone, source: Any, root: str | None = None) -> None:
    """Set ``input_size`` to the images' own size where the checkpoint left it open and the network is for small images.

    A network trained on 224 px sees next to nothing at 32. Where the stem does not decide, the statistics that the
    BatchNorm layers remember do.
    """
    size = native_size(source) if "input_size" in backbone.inferred else None
    if size is None or size > 96 or size == backbone.input_size:
        return
    small_stem = ((backbone.spec or {}).get("stem") or {}).get("kernel", 7) < 7
    if small_stem or _trained_on_small(backbone, open_images(source, size, labels=False, root=root, limit=64)):
        backbone.input_size = size


def resolve_input(backbone: Backbone, images: ImageSet) -> Backbone:
    """Return the backbone with the stem and normalisation that the images support, where they were left open."""
    if "mean" not in backbone.inferred and not any(name.startswith("stem") for name in backbone.inferred):
        _warn_of_unlike_images(backbone, images)
        return backbone
    resolution = infer_input(backbone, images.batch(_spread_indices(len(images), 2048)))
    log.info("%s", resolution.reason)
    return resolution.backbone


def infer_input(backbone: Backbone, pixels: Tensor) -> Resolution:
    """Decide the facts in ``backbone.inferred`` that BatchNorm statistics show, leave the others alone.

    Args:
        pixels: (N, 3, S, S) in 0..255, as the backbone will see them, better 256 than fewer.
    """
    open_mean = {"mean", "std"} <= set(backbone.inferred)
    comparison = Comparison(backbone, pixels, candidate_normalisations(pixels) if open_mean else {})
    stems = _open_stems(backbone)
    if len(stems) * len(comparison.normalisations) == 1 or not has_statistics(backbone):
        return Resolution(backbone, "nothing is open that BatchNorm statistics could decide")
    for stem, name in itertools.product(stems, comparison.nearest_normalisations(stems)):
        comparison.measure(tuple(sorted({**stem, "normalisation": name}.items())))
    ranked = comparison.look_closer()
    compared = [{**dict(variant), "mismatch": comparison.mismatches[variant]} for variant in ranked]
    return _decide(comparison, compared, [*stems[0], "normalisation"])


def _decide(comparison: Comparison, compared: list[dict[str, Any]], facts: list[str]) -> Resolution:
    backbone, best = comparison.backbone, compared[0]
    present = {"normalisation": "given"} | (backbone.spec or {}).get("stem", {})
    margins: dict[str, float] = {}
    value: dict[str, Any] = {}
    clear: set[str] = set()
    for fact in facts:
        needed = CLEAR_NORMALISATION if fact == "normalisation" else CLEAR_STEM
        # Reversed, so that the best row of each value is the last to be written.
        others = {row[fact]: row["mismatch"] / max(best["mismatch"], 1e-12) for row in compared[::-1]}
        del others[best[fact]]
        value[fact] = best[fact] if others.get(present[fact], needed) >= needed else present[fact]
        if others:
            margins[fact] = min(others.values())
        # A pool that the weights alone decide has no rival here; it counts as decided with the rest.
        if margins.get(fact, needed) >= needed:
            clear.add(fact)
    record: dict[str, Any] = {"margins": margins, "mismatch": best["mismatch"], "compared": tuple(compared)}
    unlike = f"the images are unlike the training data (BatchNorm mismatch {best['mismatch']:.2f})"
    trusted = best["mismatch"] <= TRUSTED_MISMATCH
    if not trusted:
        # By normalisation, with the present stem: such images say nothing about that.
        as_it_is = [row for row in compared if all(row[f] == present[f] for f in facts if f != "normalisation")]
        left = {"given": math.inf} | {row["normalisation"]: row["mismatch"] for row in as_it_is}
        least = min(left, key=lambda name: left[name])
        if left[least] > BEARABLE_MISMATCH or left["given"] < ABSURD * left[least]:
            return Resolution(backbone, f"{unlike}, so stem and normalisation stay as inferred", **record)
        value, clear = {**present, "normalisation": least}, set()  # adopted, but still marked as inferred
    stem = {fact: value[fact] for fact in facts if fact != "normalisation"}
    decided = {f"stem.{fact}": value for fact, value in stem.items() if fact in clear}
    mean, std = comparison.normalisations[value["normalisation"]]
    if "mean" in backbone.inferred and "normalisation" in clear:
        decided |= {"mean": mean, "std": std}
    changed = Backbone(
        with_stem(backbone, stem),
        backbone.feature_dim,
        mean,
        std,
        backbone.input_size,
        backbone.spec | {"stem": backbone.spec["stem"] | stem} if backbone.spec and stem else backbone.spec,
        inferred=[name for name in backbone.inferred if name not in decided],
    )
    changed.train(backbone.training).to(backbone.mean.device)
    words = "by BatchNorm statistics: " + ", ".join(f"{fact} {value[fact]}" for fact in facts)
    return Resolution(changed, words if trusted else f"{unlike}, but least {words}", decided, **record)


def _open_stems(backbone: Backbone) -> list[dict[str, Any]]:
    """Return every combination of the stem's open facts, the inferred values first; one empty one if none is open."""
    spec = backbone.spec or {}
    if spec.get("family") != "resnet":
        return [{}]
    choices = {}
    for fact, values in STEM_CHOICES.items():
        if f"stem.{fact}" in backbone.inferred:
            inferred = spec["stem"][fact]
            choices[fact] = (inferred, *(value for value in values if value != inferred))
    guess = pool_by_weights(backbone.module.state_dict())
    if "pool" in choices and guess.clear and "pool_kernel" not in spec["stem"]:  # the guess is for 3x3 pools
        choices["pool"] = (guess.kept,)
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def _trained_on_small(backbone: Backbone, images: ImageSet) -> bool:
    if not has_statistics(backbone):
        return False
    pixels = normalise(sample(images.batch(torch.arange(len(images))), 64, backbone), input_of(backbone))
    enlarged = resize(pixels, backbone.input_size)
    try:
        return CLEAR_SIZE * batchnorm_mismatch(backbone, pixels) <= batchnorm_mismatch(backbone, enlarged)
    except RuntimeError:  # a network that takes one size only, or whose maps vanish at this one
        return False


def _warn_of_unlike_images(backbone: Backbone, images: ImageSet) -> None:
    """Warn where the images contradict the facts a checkpoint states; the facts are not changed."""
    seen = [int(value) for name, value in backbone.state_dict().items() if name.endswith("num_batches_tracked")]
    if not has_statistics(backbone) or max(seen, default=MEMORABLE) < MEMORABLE:
        return
    pixels = sample(images.batch(_spread_indices(len(images), 64)), 64, backbone)
    mismatch = batchnorm_mismatch(backbone, normalise(pixels, input_of(backbone)))
    if mismatch > TRUSTED_MISMATCH:
        log.warning(
            "the images look unlike the training data, or are normalised differently (BatchNorm mismatch %.2f); "
            "cdc-inspect CHECKPOINT --data IMAGES examines this",
            mismatch,
        )


def _spread_indices(count: int, wanted: int) -> Tensor:
    """Return up to ``wanted`` indices, evenly spread over ``count`` images."""
    return torch.linspace(0, count - 1, min(count, wanted)).long()
