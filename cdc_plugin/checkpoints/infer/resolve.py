"""Decide by a look at the images what a checkpoint left open, doubt what it stated: size, stem, normalisation."""

import itertools
import logging
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.infer.batchnorm import (
    CLOSE_LOOK,
    Comparison,
    Variant,
    batchnorm_mismatch,
    candidate_normalisations,
    has_statistics,
    input_of,
    normalise,
    sample,
    spread_indices,
    with_stem,
)
from cdc_plugin.checkpoints.infer.from_weights import pool_by_weights
from cdc_plugin.data.images import ImageSet, native_size, open_images
from cdc_plugin.data.views.operations import resize
from cdc_plugin.models.backbone import Backbone

log = logging.getLogger(__name__)
# Batches after which BatchNorm layers have forgotten how they were initialised (momentum 0.1: 0.5 % is left).
MEMORABLE = 50
# Images that are a little unlike, say some of the classes trained on, still refute a normalisation under which they
# are so many times further off.
BEARABLE_MISMATCH, ABSURD = 0.8, 2.0
STEM_CHOICES: dict[str, tuple[Any, ...]] = {"pool": (True, False), "padding": (1, 2), "stride": (1, 2)}
# Above this the images are not of the kind the backbone was trained on, and the comparison decides nothing.
TRUSTED_MISMATCH = 0.4
# Views leave other statistics than images, and few images have statistics of their own: training images are seen at up
# to 0.43 if there are 64, 3.9 if there is one. By tests/benchmarks/batchnorm.py, on sets that were left out.
UNLIKE, UNLIKE_OF_ONE, FEWEST = 0.45, 4.0, 16
# Few training images also prefer their own mean and std, while their mismatch is below this over the root of their
# number: sixteen were seen at 0.51, 64 at 0.29.
ALIKE_OF_ONE = 2.5
# Below it a run compares nothing, and no normalisation is doubted: a network's own was seen at 0.2 with 300 images,
# half its mean at 0.35.
SURELY_ALIKE = 0.25
# How much worse, as a ratio, the present value of a fact must be before another replaces it. The brightness of a few
# images varies as much as the usual normalisations differ, so that one needs the clearer case; random crops enlarge
# images as well, so that size needs the clearest.
CLEAR = {"pool": 1.2, "padding": 1.2, "stride": 1.2, "normalisation": 1.3, "size": 1.5}
CONTRADICTING = CLEAR | {"normalisation": 1.4}  # a stated fact needs more against it than an open one
STEPS = 3  # facts that may turn out wrong together: padding, pool or stride, and the normalisation
# Smaller images than a checkpoint is believed to take: 224 is often a default, and what was trained at 32 px
# sees enlarged images otherwise.
SIZES = (32, 64, 96, 128)
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
class Resolution:
    """The backbone to use (the given one where the comparison decides nothing), and what was compared."""

    backbone: Backbone
    reason: str  # for the log
    decided: dict[str, Any] = field(default_factory=dict)  # values by name: "mean", "stem.pool", ...
    mismatch: float = float("nan")  # of the best variant
    compared: tuple[dict[str, Any], ...] = ()  # variants tried on the whole network, best first


@dataclass(frozen=True)
class CheckedVariant:
    """A network as it was loaded except for some facts, and how far the images are from what it remembers."""

    changed: dict[str, Any]
    mismatch: float
    words: str


@dataclass(frozen=True)
class InputCheck:
    """The result of the comparison."""

    verdict: str  # fits, other (another variant fits better), unlike (none fits), untrained, unknown (no statistics)
    words: str
    variants: tuple[CheckedVariant, ...] = ()  # best first; with nothing changed it is the network as it was loaded


def adopt_native_size(backbone: Backbone, source: Any, root: str | None = None) -> None:
    """Set ``input_size`` to the images' own size where it is open and stem or BatchNorm are for small images.

    A network trained on 224 px sees next to nothing at 32.
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
    resolution = infer_input(backbone, images.batch(spread_indices(len(images), 2048)))
    log.info("%s", resolution.reason)
    if "mean" in resolution.backbone.inferred and not resolution.mismatch <= TRUSTED_MISMATCH:  # or there is none
        log.warning(
            "mean %s and std %s are assumed: neither the checkpoint nor images can tell; if the backbone was trained "
            "with others, pass mean=[R,G,B] std=[R,G,B]",
            *(" ".join(f"{value:.4g}" for value in numbers) for numbers in input_of(resolution.backbone)),
        )
    return resolution.backbone


def infer_input(backbone: Backbone, pixels: Tensor) -> Resolution:
    """Decide the facts in ``backbone.inferred`` that BatchNorm statistics show, leave the others alone.

    The pixels are (N, 3, S, S) in 0..255, as the backbone will see them, better 256 images than fewer.
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


def check_input(backbone: Backbone, pixels: Tensor) -> InputCheck:
    """Compare the network, stated facts included, with variants that differ in one fact or a few; change nothing."""
    if not has_statistics(backbone):
        return InputCheck("unknown", "the network has no BatchNorm statistics to compare with")
    layers = [layer for layer in backbone.modules() if isinstance(layer, nn.BatchNorm2d)]
    if not any(layer.running_mean is not None and layer.running_mean.any() for layer in layers):
        return InputCheck("untrained", "the BatchNorm statistics are as initialised: nothing was trained")
    comparison = Comparison(backbone, pixels, candidate_normalisations(pixels))
    small = (backbone.spec or {}).get("stem", {}).get("kernel", 7) < 7  # nobody varies a larger stem
    choices = _stem_choices(backbone, STEM_CHOICES if small else ())
    choices |= {"normalisation": tuple(comparison.nearest_normalisations([{}]))}
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
    return _judge(ranked, comparison)


def _decide(comparison: Comparison, compared: list[dict[str, Any]], facts: list[str]) -> Resolution:
    backbone, best = comparison.backbone, compared[0]
    present = {"normalisation": "given"} | (backbone.spec or {}).get("stem", {})
    value: dict[str, Any] = {}
    clear: set[str] = set()
    for fact in facts:
        needed = CLEAR[fact]
        # Reversed, so that the best row of each value is the last to be written.
        others = {row[fact]: row["mismatch"] / max(best["mismatch"], 1e-12) for row in compared[::-1]}
        del others[best[fact]]
        value[fact] = best[fact] if others.get(present[fact], needed) >= needed else present[fact]
        # A pool that the weights alone decide has no rival here; it counts as decided with the rest.
        if min(others.values(), default=needed) >= needed and len(comparison.more) >= FEWEST:
            clear.add(fact)
    record: dict[str, Any] = {"mismatch": best["mismatch"], "compared": tuple(compared)}
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
    spec = backbone.spec | {"stem": backbone.spec["stem"] | stem} if backbone.spec and stem else backbone.spec
    inferred = [name for name in backbone.inferred if name not in decided]
    network = with_stem(backbone, stem)
    changed = Backbone(network, backbone.feature_dim, mean, std, backbone.input_size, spec, inferred)
    changed.train(backbone.training).to(backbone.mean.device)
    words = "by BatchNorm statistics: " + ", ".join(f"{fact} {value[fact]}" for fact in facts)
    return Resolution(changed, words if trusted else f"{unlike}, but least {words}", decided, **record)


def _stem_choices(backbone: Backbone, facts: Collection[str]) -> dict[str, tuple[Any, ...]]:
    """Return the values that some facts of a ResNet's stem may have, the present one first."""
    spec = backbone.spec or {}
    if spec.get("family") != "resnet":
        return {}
    stem, choices = spec["stem"], {fact: STEM_CHOICES[fact] for fact in STEM_CHOICES if fact in facts}
    return {fact: (stem[fact], *(v for v in values if v != stem[fact])) for fact, values in choices.items()}


def _open_stems(backbone: Backbone) -> list[dict[str, Any]]:
    """Return every combination of the stem's open facts, the inferred values first; one empty one if none is open."""
    choices = _stem_choices(backbone, [fact.removeprefix("stem.") for fact in backbone.inferred])
    if "pool" in choices and "pool_kernel" not in (backbone.spec or {})["stem"]:  # the guess is for 3x3 pools
        guess = pool_by_weights(backbone.module.state_dict())
        if guess.clear:
            choices["pool"] = (guess.kept,)
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def _trained_on_small(backbone: Backbone, images: ImageSet) -> bool:
    if not has_statistics(backbone):
        return False
    pixels = normalise(sample(images.batch(torch.arange(len(images))), 64, backbone), input_of(backbone))
    enlarged = resize(pixels, backbone.input_size)
    try:
        return CLEAR["size"] * batchnorm_mismatch(backbone, pixels) <= batchnorm_mismatch(backbone, enlarged)
    except RuntimeError:  # a network that takes one size only, or whose maps vanish at this one
        return False


def _warn_of_unlike_images(backbone: Backbone, images: ImageSet) -> None:
    """Warn where the images contradict the facts a checkpoint states; the facts are not changed."""
    seen = [int(value) for name, value in backbone.state_dict().items() if name.endswith("num_batches_tracked")]
    if not has_statistics(backbone) or max(seen, default=MEMORABLE) < MEMORABLE:
        return
    pixels = images.batch(spread_indices(len(images), CLOSE_LOOK))
    few = sample(pixels, 64, backbone)
    if batchnorm_mismatch(backbone.module, normalise(few, input_of(backbone))) <= SURELY_ALIKE:
        return
    check = check_input(backbone, pixels)
    if check.verdict in ("other", "unlike"):
        log.warning("%s; cdc-inspect CHECKPOINT --data IMAGES shows what was compared", check.words)


def _judge(ranked: list[Variant], comparison: Comparison) -> InputCheck:
    mismatches, count = comparison.mismatches, len(comparison.more)
    variants = tuple(CheckedVariant(_as_record(v, comparison), mismatches[v], _in_words(v)) for v in ranked)
    bearable = max(SURELY_ALIKE, ALIKE_OF_ONE / math.sqrt(count))
    better = _needed_changes(ranked[0], mismatches, bearable) if count >= FEWEST else ()
    figures = f"{_in_words(better)} ({mismatches[better]:.2f} against {mismatches[()]:.2f})"
    if mismatches[better] > UNLIKE + UNLIKE_OF_ONE / count:
        hint = f"; nearest comes {figures}" if better else f" (BatchNorm mismatch {mismatches[()]:.2f})"
        return InputCheck("unlike", f"the images are unlike the training images{hint}", variants)
    if count < FEWEST:
        return InputCheck("unknown", f"{FEWEST} images or more are needed to tell; found {count}", variants)
    if better:
        kinds = {{"normalisation": fact, "size": "image size"}.get(fact, "stem") for fact, _ in better}
        return InputCheck("other", f"another {' and '.join(sorted(kinds))} fits better: {figures}", variants)
    return InputCheck("fits", "the images fit the network as it stands", variants)


def _needed_changes(best: Variant, mismatches: Mapping[Variant, float], bearable: float) -> Variant:
    """Return the best variant without the facts that hardly matter: a few images prefer one by chance."""
    for fact, _ in best:
        without = tuple((name, value) for name, value in best if name != fact)
        mismatch = mismatches.get(without, float("inf"))
        slight = fact == "normalisation" and mismatch <= bearable
        if slight or mismatch < CONTRADICTING[fact] * max(mismatches[best], 1e-12):
            return _needed_changes(without, mismatches, bearable)
    return best


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


def _as_record(variant: Variant, comparison: Comparison) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for fact, value in variant:
        if fact == "normalisation":
            mean, std = comparison.normalisations[value]
            record |= {"normalisation": value, "mean": list(mean), "std": list(std)}
        else:
            record["input_size" if fact == "size" else f"stem.{fact}"] = value
    return record


def _in_words(variant: Variant) -> str:
    parts = []
    for fact, value in variant:
        if fact == "normalisation":
            parts.append(WORDS[value])
        elif fact == "pool":
            parts.append("max-pool" if value else "no max-pool")
        else:
            parts.append(f"{'image size' if fact == 'size' else fact} {value}")
    return ", ".join(parts) or "as it stands"
