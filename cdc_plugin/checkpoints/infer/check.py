"""Whether a rebuilt network and its normalisation suit images, by the memory of its BatchNorm layers.

``probe`` decides what a checkpoint left open; this doubts what it stated as well, changing one fact at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.infer.batchnorm import (
    CLEAR_NORMALISATION,
    CLEAR_STEM,
    CLOSE_LOOK,
    CLOSE_LOOK_LARGE,
    CLOSE_RATIO,
    CLOSE_VARIANTS,
    FINALISTS,
    QUICK_LOOK,
    STEM_CHOICES,
    TRUSTED_MISMATCH,
    Normalisation,
    batchnorm_mismatch,
    candidate_normalisations,
    has_statistics,
    input_of,
    layer_mismatches,
    normalise,
    sample,
    with_stem,
    without_twins,
)
from cdc_plugin.models.backbone import Backbone

# Facts that differ from the network as it was loaded: (("padding", 2),), say; empty for that network itself.
Change = tuple[tuple[str, Any], ...]
STEPS = 3  # facts that may turn out wrong together: padding, pool or stride, and the normalisation
# Smaller images than a checkpoint is believed to take: 224 is often a default, and what was trained at 32 px
# sees enlarged images otherwise. Random crops enlarge, too, so that this needs the clearest case.
SIZES = (32, 64, 96, 128)
CLEAR_SIZE = 1.5
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
class Variant:
    """A network as it was loaded but for some facts, and how far the images are from its memory."""

    changed: dict[str, Any]
    mismatch: float
    words: str


@dataclass(frozen=True)
class Verification:
    """What the comparison says.

    Args:
        verdict: ``fits``, ``other`` (another variant clearly fits better), ``unlike`` (no variant fits),
            ``untrained`` (statistics as initialised) or ``unknown`` (nothing to compare with).
        words: the verdict in a sentence.
        variants: best first; the one with nothing changed is the network as it was loaded.
    """

    verdict: str
    words: str
    variants: tuple[Variant, ...] = ()


def verify(backbone: Backbone, images: Tensor) -> Verification:
    """Compare the network with variants of its stem and normalisation, stated facts included.

    Args:
        images: (N, 3, S, S) in 0..255, as the backbone sees them, better 256 than fewer.
    """
    if not has_statistics(backbone):
        return Verification("unknown", "the network has no BatchNorm statistics to compare with")
    if not _is_trained(backbone):
        return Verification("untrained", "the BatchNorm statistics are as initialised: nothing was trained")
    few = sample(images, QUICK_LOOK, backbone)
    given = input_of(backbone)
    normalisations = without_twins({"given": given} | candidate_normalisations(images))
    at_entry = {
        name: layer_mismatches(backbone.module, normalise(few, pair), first_layers=1)[0]
        for name, pair in normalisations.items()
    }
    nearest = [name for name in sorted(at_entry, key=lambda name: at_entry[name]) if name != "given"]
    choices = _stem_choices(backbone) | {"normalisation": ("given", *nearest[:FINALISTS])}
    if _takes_any_size(backbone, few):
        choices["size"] = (images.shape[-1], *(size for size in SIZES if size < images.shape[-1]))

    def mismatch(change: Change, pixels: Tensor) -> float:
        facts = dict(change)
        pair = normalisations[facts.pop("normalisation", "given")]
        pixels = _resized(pixels, facts.pop("size", images.shape[-1]))
        return batchnorm_mismatch(with_stem(backbone, facts), normalise(pixels, pair))

    measured: dict[Change, float] = {(): mismatch((), few)}
    current: Change = ()
    for _ in range(STEPS):
        around = list(_neighbours(current, choices))
        measured |= {change: mismatch(change, few) for change in around if change not in measured}
        best = min([current, *around], key=lambda change: measured[change])
        if best == current:
            break
        current = best
    # A look at more images at those that lie close together, and always at the network as it was loaded.
    more = sample(images, CLOSE_LOOK if images.shape[-1] <= 64 else CLOSE_LOOK_LARGE, backbone)
    if len(more) > len(few):
        limit = CLOSE_RATIO * min(measured.values())
        close = [c for c in sorted(measured, key=lambda c: measured[c]) if measured[c] <= limit][:CLOSE_VARIANTS]
        measured |= {change: mismatch(change, more) for change in {(), *close}}
    return _judge(measured, normalisations)


def _judge(measured: Mapping[Change, float], normalisations: Mapping[str, Normalisation]) -> Verification:
    order = sorted(measured, key=lambda change: measured[change])
    variants = tuple(Variant(_as_record(c, normalisations), measured[c], _in_words(c)) for c in order)
    better, loaded = _needed_changes(order[0], measured), measured[()]
    comparison = f"{_in_words(better)} ({measured[better]:.2f} against {loaded:.2f})"
    if measured[better] > TRUSTED_MISMATCH:
        hint = f"; nearest comes {comparison}" if better else ""
        return Verification("unlike", f"the images are unlike the training images{hint}", variants)
    if better:
        kinds = {{"normalisation": fact, "size": "image size"}.get(fact, "stem") for fact, _ in better}
        return Verification("other", f"another {' and '.join(sorted(kinds))} fits better: {comparison}", variants)
    return Verification("fits", "the images fit the network as it stands", variants)


def _needed_changes(best: Change, measured: Mapping[Change, float]) -> Change:
    """The best change without the facts that hardly matter: a few images prefer one by chance."""
    for fact, _ in best:
        needed = NEEDED.get(fact, CLEAR_STEM)
        without = tuple((name, value) for name, value in best if name != fact)
        if measured.get(without, float("inf")) < needed * max(measured[best], 1e-12):
            return _needed_changes(without, measured)
    return best


def _stem_choices(backbone: Backbone) -> dict[str, tuple[Any, ...]]:
    """Values of the stem's facts, the loaded one first; none for networks whose stem nobody varies."""
    spec = backbone.spec or {}
    if spec.get("family") != "resnet" or spec["stem"]["kernel"] >= 7:
        return {}
    stem = spec["stem"]
    return {fact: (stem[fact], *(v for v in values if v != stem[fact])) for fact, values in STEM_CHOICES.items()}


def _takes_any_size(backbone: Backbone, images: Tensor) -> bool:
    """Whether the network can be given smaller images, which one with position embeddings refuses."""
    try:
        with torch.no_grad():
            backbone.eval()(_resized(images[:1], SIZES[0]))
    except (RuntimeError, AssertionError, ValueError):
        return False
    return True


def _resized(images: Tensor, size: int) -> Tensor:
    if images.shape[-1] == size:
        return images
    return nn.functional.interpolate(images, size=(size, size), mode="bilinear", antialias=True)


def _neighbours(change: Change, choices: Mapping[str, tuple[Any, ...]]) -> Iterator[Change]:
    """All changes that differ in the value of one fact."""
    for fact, (loaded, *others) in choices.items():
        rest = {name: value for name, value in change if name != fact}
        for value in (loaded, *others):
            if dict(change).get(fact, loaded) != value:
                changed = rest if value == loaded else rest | {fact: value}
                yield tuple(sorted(changed.items()))


def _as_record(change: Change, normalisations: Mapping[str, Normalisation]) -> dict[str, Any]:
    facts = dict(change)
    name = facts.pop("normalisation", None)
    names = {"size": "input_size"}
    record = {names.get(fact, f"stem.{fact}"): value for fact, value in facts.items()}
    if name is not None:
        mean, std = normalisations[name]
        record |= {"normalisation": name, "mean": list(mean), "std": list(std)}
    return record


def _in_words(change: Change) -> str:
    words = {"padding": "padding {}", "stride": "stride {}", "size": "image size {}"}
    parts = []
    for fact, value in change:
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
