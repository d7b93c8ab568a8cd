"""Settling, by a look at images and without labels, what a checkpoint leaves open: stem and normalisation.

BatchNorm layers remember the activations of their training; a network that is rebuilt or fed otherwise shows
other activations. The variant that disagrees least with the memory is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.infer.max_pool import pool_by_weights
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]

NORMALISATIONS: dict[str, Normalisation] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
    # The deviation within images instead of over all pixels, as many CIFAR scripts have it.
    "cifar10_within": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.201)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
STEM_CHOICES: dict[str, tuple[Any, ...]] = {"pool": (True, False), "padding": (1, 2), "stride": (1, 2)}
# Above this the images are not of the kind the backbone was trained on, and the comparison decides nothing.
TRUSTED_MISMATCH = 0.4
# Images that are a little unlike, say some of the classes trained on, still speak against an assumption under which
# they are so many times further off.
BEARABLE_MISMATCH, ABSURD = 0.8, 2.0
# How much worse, as a ratio, the inferred value of a fact must be before another takes its place. Brightness
# of a few images varies as much as the usual normalisations differ, so that one needs the clearer case.
CLEAR_STEM, CLEAR_NORMALISATION = 1.2, 1.3
# Normalisations, beside the inferred one, that go on from the first layer's test to the whole network's.
FINALISTS = 2
# Images of the first comparison and of the second, between variants it left close together: with 32 images
# the choice between two paddings was seen to go wrong, with 256 it was not.
QUICK_LOOK, CLOSE_LOOK, CLOSE_LOOK_LARGE = 32, 256, 64
CLOSE_RATIO, CLOSE_VARIANTS = 1.5, 4


class _SeenEnough(Exception):  # noqa: N818  (a way out of a forward pass, not an error)
    pass


@dataclass(frozen=True)
class Resolution:
    """The backbone to go on with, and what was compared.

    Args:
        backbone: the best variant, or the given one where the comparison decides nothing.
        settled: the facts decided, by name ("mean", "stem.pool", ...), each with its value.
        margins: for each open fact, mismatch of the best other value divided by the best mismatch.
        mismatch: of the best variant; NaN if nothing was compared.
        compared: the variants tried on the whole network, best first.
        reason: one sentence for the log.
    """

    backbone: Backbone
    reason: str
    settled: dict[str, Any] = field(default_factory=dict)
    margins: dict[str, float] = field(default_factory=dict)
    mismatch: float = float("nan")
    compared: tuple[dict[str, Any], ...] = ()


def batchnorm_mismatch(backbone: nn.Module, images: Tensor) -> float:
    """How far activations are from what the BatchNorm layers remember, averaged over layers; 0 is agreement.

    A layer counts the mean over its channels of |difference of means| / deviation + |log ratio of variances|.

    Args:
        images: (N, 3, H, W), normalised.
    """
    layers = layer_mismatches(backbone, images, first_layers=None)
    if not layers:
        raise UserError("the backbone has no BatchNorm statistics to compare with; state mean, std and --arch")
    return sum(layers) / len(layers)


def candidate_normalisations(images: Tensor) -> dict[str, Normalisation]:
    """The usual statistics and the images' own, over all channels together and one by one.

    Args:
        images: (N, 3, H, W) in 0..255.
    """
    values = images.double() / 255
    # Constant images would give a deviation of 0.
    pooled = (values.mean().item(),) * 3, (max(values.std().item(), 1e-3),) * 3
    by_channel = (
        tuple(values.mean(dim=(0, 2, 3)).tolist()),
        tuple(values.std(dim=(0, 2, 3)).clamp_min(1e-3).tolist()),
    )
    return NORMALISATIONS | {"own": pooled, "own_by_channel": by_channel}


def settle(backbone: Backbone, images: Tensor) -> Resolution:
    """Decide the facts in ``backbone.inferred`` that BatchNorm statistics can tell, leave the others alone.

    Args:
        images: (N, 3, S, S) in 0..255, as the backbone will see them, better 256 than fewer. Their own
            mean and std are taken over all, the network sees an even sample.
    """
    if images.ndim != 4 or images.shape[1] != 3 or len(images) == 0:
        raise UserError(f"expected images of shape (N, 3, S, S), found {tuple(images.shape)}")
    stems = _open_stems(backbone)
    open_mean = {"mean", "std"} <= set(backbone.inferred)
    normalisations = {"given": input_of(backbone)}
    if open_mean:
        normalisations |= candidate_normalisations(images)
    normalisations = without_twins(normalisations)
    if len(stems) * len(normalisations) == 1 or not has_statistics(backbone):
        return Resolution(backbone, "nothing is open that BatchNorm statistics could tell")

    chosen = sample(images, QUICK_LOOK, backbone)
    variants = [(stem, with_stem(backbone, stem)) for stem in stems]
    # The first layer sees the normalisation directly, and costs a hundredth of the network.
    at_entry = {
        name: min(layer_mismatches(network, normalise(chosen, pair), first_layers=1)[0] for _, network in variants)
        for name, pair in normalisations.items()
    }
    finalists = {"given", *sorted(at_entry, key=lambda name: at_entry[name])[:FINALISTS]}
    compared: list[dict[str, Any]] = []
    for (stem, network), name in itertools.product(variants, [n for n in normalisations if n in finalists]):
        mismatch = batchnorm_mismatch(network, normalise(chosen, normalisations[name]))
        compared.append({**stem, "normalisation": name, "mismatch": mismatch})
    compared.sort(key=_mismatch_of)
    # Activations of large images fill the memory sooner.
    closer = sample(images, CLOSE_LOOK if images.shape[-1] <= 64 else CLOSE_LOOK_LARGE, backbone)
    if len(closer) > len(chosen):
        limit = CLOSE_RATIO * _mismatch_of(compared[0])
        for row in [row for row in compared if _mismatch_of(row) <= limit][:CLOSE_VARIANTS]:
            network = next(made for stem, made in variants if stem.items() <= row.items())
            pair = normalisations[row["normalisation"]]
            row["mismatch"] = batchnorm_mismatch(network, normalise(closer, pair))
        compared.sort(key=_mismatch_of)
    return _decide(backbone, normalisations, compared, open_mean)


def _decide(
    backbone: Backbone,
    normalisations: Mapping[str, Normalisation],
    compared: list[dict[str, Any]],
    open_mean: bool,
) -> Resolution:
    best = compared[0]
    facts = [name for name in best if name != "mismatch"]
    given = {"normalisation": "given"} | (backbone.spec or {}).get("stem", {})
    margins: dict[str, float] = {}
    value: dict[str, Any] = {}
    clear: set[str] = set()
    for fact in facts:
        needed = CLEAR_NORMALISATION if fact == "normalisation" else CLEAR_STEM
        # Reversed, so that the best row of each value is the last to be written.
        others = {row[fact]: row["mismatch"] / max(best["mismatch"], 1e-12) for row in compared[::-1]}
        del others[best[fact]]
        value[fact] = best[fact] if others.get(given[fact], needed) >= needed else given[fact]
        if others:
            margins[fact] = min(others.values())
        # A pool that the weights alone decide has no rival here; it counts as settled with the rest.
        if margins.get(fact, needed) >= needed:
            clear.add(fact)
    record: dict[str, Any] = {"margins": margins, "mismatch": best["mismatch"], "compared": tuple(compared)}
    unlike = f"the images are unlike those of the training (BatchNorm mismatch {best['mismatch']:.2f})"
    trusted = best["mismatch"] <= TRUSTED_MISMATCH
    if not trusted:
        # By normalisation, with the stem as it is: of that such images tell nothing.
        as_it_is = [row for row in compared if all(row[f] == given[f] for f in facts if f != "normalisation")]
        left = {"given": math.inf} | {row["normalisation"]: row["mismatch"] for row in as_it_is}
        least = min(left, key=lambda name: left[name])
        if left[least] > BEARABLE_MISMATCH or left["given"] < ABSURD * left[least]:
            return Resolution(backbone, f"{unlike}, so stem and normalisation stay as inferred", **record)
        value, clear = {**given, "normalisation": least}, set()  # taken, but no more than inferred
    mean, std = normalisations[value["normalisation"]]
    stem = {fact: value[fact] for fact in facts if fact != "normalisation"}
    settled: dict[str, Any] = {f"stem.{fact}": value for fact, value in stem.items() if fact in clear}
    if open_mean and "normalisation" in clear:
        settled |= {"mean": mean, "std": std}
    spec = dict(backbone.spec or {})
    if stem:
        spec["stem"] = spec["stem"] | stem
    changed = Backbone(
        with_stem(backbone, stem),
        backbone.feature_dim,
        mean,
        std,
        backbone.input_size,
        spec if backbone.spec is not None else None,
        inferred=[name for name in backbone.inferred if name not in settled],
    )
    changed.train(backbone.training).to(backbone.mean.device)
    words = "by BatchNorm statistics: " + ", ".join(f"{fact} {value[fact]}" for fact in facts)
    return Resolution(changed, words if trusted else f"{unlike}, but least {words}", settled, **record)


def _mismatch_of(row: Mapping[str, Any]) -> float:
    return float(row["mismatch"])


def sample(images: Tensor, count: int, backbone: Backbone) -> Tensor:
    """At most ``count`` images, evenly spread, in [0, 1] on the backbone's device."""
    places = torch.linspace(0, len(images) - 1, min(count, len(images))).long()
    return images[places].to(backbone.mean.device).float() / 255


def _open_stems(backbone: Backbone) -> list[dict[str, Any]]:
    """Every combination of the stem's open facts, the inferred values first; one empty one if none is open."""
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


def with_stem(backbone: Backbone, stem: Mapping[str, Any]) -> nn.Module:
    if not stem or backbone.spec is None:
        return backbone.module
    network, _ = build(backbone.spec | {"stem": backbone.spec["stem"] | dict(stem)})
    network.load_state_dict(backbone.module.state_dict())
    return network.to(backbone.mean.device)


def without_twins(normalisations: Mapping[str, Normalisation]) -> dict[str, Normalisation]:
    """Of normalisations that agree within 0.01 in every number, the first."""
    kept: dict[str, Normalisation] = {}
    for name, pair in normalisations.items():
        numbers = torch.tensor(pair)
        if all((numbers - torch.tensor(other)).abs().max() > 0.01 for other in kept.values()):
            kept[name] = pair
    return kept


def input_of(backbone: Backbone) -> Normalisation:
    """Mean and std that the backbone states."""
    return tuple(backbone.mean.tolist()), tuple(backbone.std.tolist())


def normalise(images: Tensor, pair: Normalisation) -> Tensor:
    mean, std = (torch.tensor(numbers, device=images.device).view(1, 3, 1, 1) for numbers in pair)
    return (images - mean) / std


def has_statistics(network: nn.Module) -> bool:
    return any(isinstance(m, nn.BatchNorm2d) and m.running_mean is not None for m in network.modules())


def layer_mismatches(network: nn.Module, images: Tensor, first_layers: int | None) -> list[float]:
    """One number a BatchNorm layer, in the order of the forward pass, which ends after ``first_layers``."""
    found: list[float] = []

    def compare(layer: nn.Module, inputs: Sequence[Tensor]) -> None:
        assert isinstance(layer, nn.BatchNorm2d)
        if layer.running_mean is None or layer.running_var is None:
            return
        variance, mean = torch.var_mean(inputs[0].float(), dim=(0, 2, 3), correction=0)
        remembered = layer.running_var + layer.eps
        shift = (mean - layer.running_mean).abs() / remembered.sqrt()
        spread = ((variance + layer.eps) / remembered).log().abs()
        found.append(float((shift + spread).mean()))
        if len(found) == first_layers:
            raise _SeenEnough

    hooks = [m.register_forward_pre_hook(compare) for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    training = network.training
    try:
        with torch.no_grad():
            network.eval()(images)
    except _SeenEnough:
        pass
    finally:
        network.train(training)
        for hook in hooks:
            hook.remove()
    return found
