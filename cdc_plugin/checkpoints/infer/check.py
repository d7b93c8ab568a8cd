"""Check whether a rebuilt network and its normalisation suit images, by the statistics of its BatchNorm layers.

``resolve`` decides what a checkpoint left open; this doubts what it stated as well, changing one fact at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.infer.batchnorm import (
    CLEAR_NORMALISATION,
    CLEAR_SIZE,
    CLEAR_STEM,
    STEM_CHOICES,
    TRUSTED_MISMATCH,
    Comparison,
    Normalisation,
    Variant,
    candidate_normalisations,
    has_statistics,
    resize,
)
from cdc_plugin.models.backbone import Backbone

STEPS = 3  # facts that may turn out wrong together: padding, pool or stride, and the normalisation
# Smaller images than a checkpoint is believed to take: 224 is often a default, and what was trained at 32 px
# sees enlarged images otherwise.
SIZES = (32, 64, 96, 128)
NEEDED = {"normalisation": CLEAR_NORMALISATION, "size": CLEAR_SIZE}
WORDS = {
    "imagenet": "ImageNet's mean and std",
    "half": "mean and std 0.5",
    "cifar10": "CIFAR-10's mean and std",
    "cifar10_within": "CIFAR-10's mean, std within images",
    "none": "no normalisation",
    "own": "the images' own mean and std",
    "own_by_channel": "the images' own mean and std by channel",
}


@dataclass(frozen=True)
class CheckedVariant:
    """A network as it was loaded except for some facts, and how far the images are from what it remembers."""

    changed: dict[str, Any]
    mismatch: float
    words: str


@dataclass(frozen=True)
class InputCheck:
    """The result of the comparison.

    Args:
        verdict: ``fits``, ``other`` (another variant clearly fits better), ``unlike`` (no variant fits),
            ``untrained`` (statistics as initialised) or ``unknown`` (nothing to compare with).
        words: the verdict in a sentence.
        variants: best first; the one with nothing changed is the network as it was loaded.
    """

    verdict: str
    words: str
    variants: tuple[CheckedVariant, ...] = ()


def check_input(backbone: Backbone, pixels: Tensor) -> InputCheck:
    """Compare the network with variants of its stem, normalisation and image size, stated facts included.

    Args:
        pixels: (N, 3, S, S) in 0..255, as the backbone sees them, better 256 than fewer.
    """
    if not has_statistics(backbone):
        return InputCheck("unknown", "the network has no BatchNorm statistics to compare with")
    if not _is_trained(backbone):
        return InputCheck("untrained", "the BatchNorm statistics are as initialised: nothing was trained")
    comparison = Comparison(backbone, pixels, candidate_normalisations(pixels))
    choices = _stem_choices(backbone) | {"normalisation": tuple(comparison.nearest_normalisations([{}]))}
    if _takes_any_size(backbone, comparison.few):
        choices["size"] = (pixels.shape[-1], *(size for size in SIZES if size < pixels.shape[-1]))
    best: Variant = ()
    comparison.measure(best)
    for _ in range(STEPS):
        nearest = min([best, *_neighbours(best, choices)], key=comparison.measure)
        if nearest == best:
            break
        best = nearest
    ranked = comparison.look_closer(always=[()])
    return _judge(ranked, comparison.mismatches, comparison.normalisations)


def _judge(
    ranked: list[Variant], mismatches: Mapping[Variant, float], normalisations: Mapping[str, Normalisation]
) -> InputCheck:
    variants = tuple(CheckedVariant(_as_record(v, normalisations), mismatches[v], _in_words(v)) for v in ranked)
    better, loaded = _needed_changes(ranked[0], mismatches), mismatches[()]
    comparison = f"{_in_words(better)} ({mismatches[better]:.2f} against {loaded:.2f})"
    if mismatches[better] > TRUSTED_MISMATCH:
        hint = f"; nearest comes {comparison}" if better else ""
        return InputCheck("unlike", f"the images are unlike the training images{hint}", variants)
    if better:
        kinds = {{"normalisation": fact, "size": "image size"}.get(fact, "stem") for fact, _ in better}
        return InputCheck("other", f"another {' and '.join(sorted(kinds))} fits better: {comparison}", variants)
    return InputCheck("fits", "the images fit the network as it stands", variants)


def _needed_changes(best: Variant, mismatches: Mapping[Variant, float]) -> Variant:
    """Return the best variant without the facts that hardly matter: a few images prefer one by chance."""
    for fact, _ in best:
        needed = NEEDED.get(fact, CLEAR_STEM)
        without = tuple((name, value) for name, value in best if name != fact)
        if mismatches.get(without, float("inf")) < needed * max(mismatches[best], 1e-12):
            return _needed_changes(without, mismatches)
    return best


def _stem_choices(backbone: Backbone) -> dict[str, tuple[Any, ...]]:
    """Return values of the stem's facts, the loaded one first; none for networks whose stem nobody varies."""
    spec = backbone.spec or {}
    if spec.get("family") != "resnet" or spec["stem"]["kernel"] >= 7:
        return {}
    stem = spec["stem"]
    return {fact: (stem[fact], *(v for v in values if v != stem[fact])) for fact, values in STEM_CHOICES.items()}


def _takes_any_size(backbone: Backbone, pixels: Tensor) -> bool:
    """Return whether the network accepts smaller images, which one with position embeddings refuses."""
    try:
        with torch.no_grad():
            backbone.eval()(resize(pixels[:1], SIZES[0]))
    except (RuntimeError, AssertionError, ValueError):
        return False
    return True


def _neighbours(variant: Variant, choices: Mapping[str, tuple[Any, ...]]) -> Iterator[Variant]:
    """Yield all variants that differ in the value of one fact."""
    for fact, (loaded, *others) in choices.items():
        rest = {name: value for name, value in variant if name != fact}
        for value in (loaded, *others):
            if dict(variant).get(fact, loaded) != value:
                changed = rest if value == loaded else rest | {fact: value}
                yield tuple(sorted(changed.items()))


def _as_record(variant: Variant, normalisations: Mapping[str, Normalisation]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for fact, value in variant:
        if fact == "normalisation":
            mean, std = normalisations[value]
            record |= {"normalisation": value, "mean": list(mean), "std": list(std)}
        else:
            record["input_size" if fact == "size" else f"stem.{fact}"] = value
    return record


def _in_words(variant: Variant) -> str:
    words = {"padding": "padding {}", "stride": "stride {}", "size": "image size {}"}
    parts = []
    for fact, value in variant:
        if fact == "normalisation":
            parts.append(WORDS[value])
        elif fact == "pool":
            parts.append("max-pool" if value else "no max-pool")
        else:
            parts.append(words[fact].format(value))
    return ", ".join(parts) or "as it stands"


def _is_trained(network: nn.Module) -> bool:
    means = [m.running_mean for m in network.modules() if isinstance(m, nn.BatchNorm2d) and m.running_mean is not None]
    return any(bool(torch.any(mean != 0)) for mean in means)
