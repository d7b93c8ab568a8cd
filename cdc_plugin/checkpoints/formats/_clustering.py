"""What formats of clustering networks share: their ResNets, their heads, and how their data sets are fed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from cdc_plugin.checkpoints.formats.torchvision import IMAGENET_MEAN, IMAGENET_STD, is_resnet, resnet_spec
from cdc_plugin.checkpoints.infer.map_size import inner_share, last_side
from cdc_plugin.checkpoints.load import Wanted
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, whole_number
from cdc_plugin.checkpoints.weights import build_with_weights, load_strictly
from cdc_plugin.config.schema import INPUT_FACTS
from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.heads import LayeredHead

SHORTCUT = re.compile(r"(layer[1-4]\.\d+)\.shortcut\.")
CONVOLUTION = re.compile(r"(conv\d|downsample\.0)\.weight$")
KNOWN_DEPTHS = {("basic", 2, 2, 2, 2): 18, ("basic", 3, 4, 6, 3): 34, ("bottleneck", 3, 4, 6, 3): 50}
KNOWN_DEPTHS |= {("bottleneck", 3, 4, 23, 3): 101, ("bottleneck", 3, 8, 36, 3): 152}
# 3x3 stems of SCAN and its many descendants: for CIFAR without a pool, for STL-10 with one of 2x2.
CIFAR_STEM = {"stride": 1, "padding": 1, "pool": False}
STL_STEM = {"stride": 1, "padding": 1, "pool": True, "pool_kernel": 2}


@dataclass(frozen=True)
class Convention:
    """How a framework feeds one of its data sets.

    Args:
        names: ways to write that data set.
        size: side of the images.
        stem: stem of the framework's network for it, where that is a small one.
    """

    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int
    stem: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The convention to go on with: the spec with its stem, facts that stay open, and where all of it comes from."""

    fed: Convention
    spec: dict[str, Any]
    inferred: tuple[str, ...]
    why: dict[str, str]


# The deviations of CIFAR-10 are those within images, as SCAN and those after it have them.
CIFAR10 = Convention(("CIFAR-10",), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 32, CIFAR_STEM)
CIFAR20 = Convention(("CIFAR-20", "CIFAR-100"), (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), 32, CIFAR_STEM)
STL10 = Convention(("STL-10",), IMAGENET_MEAN, IMAGENET_STD, 96, STL_STEM)
IMAGENET = Convention(("ImageNet",), IMAGENET_MEAN, IMAGENET_STD, 224)
TINY_IMAGENET = Convention(("Tiny-ImageNet",), IMAGENET_MEAN, IMAGENET_STD, 64, STL_STEM)


def top_names(state: Mapping[str, Tensor]) -> set[str]:
    """The first parts of all names; numbers at their end, as in ``center_3``, are left out."""
    return {re.sub(r"_\d+$", "", key.split(".")[0]) for key in state}


def choose_convention(
    framework: str, candidates: Sequence[Convention], spec: Mapping[str, Any], checkpoint: Checkpoint
) -> Choice:
    """The most plausible of the data sets that fit what a file holds.

    The weights tell the size of the last maps, and so network and images; where two data sets have the same, the
    path may name one.

    Args:
        candidates: the more usual first.
        spec: the ResNet as ``resnet_shape`` gives it.
        checkpoint: its weights, under torchvision's names.
    """
    stems = [spec["stem"] | (c.stem if is_small_stem(spec) else {}) for c in candidates]
    inner = [1 - 1 / last_side(stem, c.size) for stem, c in zip(stems, candidates, strict=True)]
    measured = inner_share(checkpoint.state)
    far = [abs(share - measured) if measured is not None else 0.0 for share in inner]
    fitting = [c for c, distance in zip(candidates, far, strict=True) if distance == min(far)]
    nearby = " ".join(re.sub(r"[^a-z0-9]", "", part.lower()) for part in checkpoint.path.absolute().parts[-4:])
    named = [c for c in fitting if any(_occurs(name, nearby) for name in c.names)]
    chosen = named[0] if len(named) == 1 else fitting[0]
    stem = stems[list(candidates).index(chosen)]
    why = {"input_size": f"{framework}'s for {chosen.names[0]}"}
    if len(fitting) < len(candidates):
        why["input_size"] += ", by the size of the last maps, which BatchNorm statistics tell"
    others = " and ".join(c.names[0] for c in fitting if c is not chosen)
    if others:
        why["input_size"] += ", which the path names" if len(named) == 1 else f"; {others} would fit as well"
    why |= {"mean": why["input_size"], "std": why["input_size"]}
    inferred: tuple[str, ...] = INPUT_FACTS
    if is_small_stem(spec):
        why["stem"] = f"{framework}'s for {chosen.names[0]}"
        if any(other["pool"] != stem["pool"] for other in stems):
            stem |= {"pool_kernel": 2}
            inferred += ("stem.pool",)
            why["stem"] += "; its max-pool is told by BatchNorm statistics, images can settle it"
    return Choice(chosen, {**spec, "stem": stem}, inferred, why)


def choose_for_shortcuts(
    framework: str, candidates: Sequence[Convention], spec: Mapping[str, Any], checkpoint: Checkpoint, prefix: str
) -> Choice:
    """`choose_convention` for frameworks whose small networks say ``shortcut``; others put theirs in the frame, too.

    Args:
        checkpoint: its weights as the file names them, the network below ``prefix``.
    """
    own = any(SHORTCUT.search(key) for key in checkpoint.below(prefix).state)
    if is_small_stem(spec) and not own:
        return _of_somebody_else(framework, candidates[0], spec)
    return choose_convention(framework, candidates, spec, torchvision_names(checkpoint, prefix))


def _of_somebody_else(framework: str, fed: Convention, spec: Mapping[str, Any]) -> Choice:
    """A small ResNet that is not the framework's own: its stem is open, as that of any bare ResNet."""
    guess = f"{framework}'s for {fed.names[0]}, but the network is not its own; images can settle it"
    why = dict.fromkeys((*INPUT_FACTS, "stem"), guess)
    return Choice(fed, dict(spec), (*INPUT_FACTS, "stem.pool", "stem.padding", "stem.stride"), why)


def cifar_by_clusters(clusters: int | None) -> tuple[Convention, ...]:
    """CIFAR-10 or CIFAR-20 by their number of classes; both, if that is unknown or another."""
    return {10: (CIFAR10,), 20: (CIFAR20,), 100: (CIFAR20,)}.get(clusters or 0, (CIFAR10, CIFAR20))


def torchvision_names(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    """The ResNet below a prefix under torchvision's names; its projection head ``fc`` stays behind."""
    inner = checkpoint.below(prefix).state
    state = {SHORTCUT.sub(r"\1.downsample.", key): value for key, value in inner.items() if not key.startswith("fc.")}
    return replace(checkpoint, state=state)


def resnet_shape(checkpoint: Checkpoint, wanted: Wanted, framework: str) -> dict[str, Any]:
    """The spec of a ResNet under torchvision's names, its stem as torchvision would have it."""
    state, source = checkpoint.state, checkpoint.path
    flat = [key for key in state if CONVOLUTION.search(key) and state[key].ndim != 4]
    if not is_resnet(state) or flat:
        some = ", ".join((flat or list(state))[:3]) or "none"
        raise UserError(f"expected a whole ResNet of {framework} in {source}, found {some}; copy it again")
    try:
        spec, _ = resnet_spec(state)
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise UserError(f"the ResNet of {framework} in {source} lacks {error}; copy it again") from error
    # Blocks that got lost leave a shallower network, which is none of any framework's.
    number = KNOWN_DEPTHS.get((spec["block"], *spec["depths"]))
    if number is None:
        raise UserError(
            f"the ResNet of {framework} in {source} has {spec['depths']} blocks a stage, as no known one; copy it again"
        )
    if wanted.arch not in (None, f"resnet{number}"):
        raise UserError(f"--arch {wanted.arch} does not fit {source}: it holds resnet{number}; leave --arch out")
    return spec


def is_small_stem(spec: Mapping[str, Any]) -> bool:
    return bool(spec["stem"]["kernel"] < 7)


def load_resnet(checkpoint: Checkpoint, wanted: Wanted, choice: Choice) -> tuple[Backbone, float]:
    """The chosen backbone with the weights under torchvision's names, and the share of them that matched."""
    state, source = checkpoint.state, str(checkpoint.path)
    network, feature_dim, matched = build_with_weights(choice.spec, state, source, wanted.partial)
    fed = choice.fed
    return Backbone(network, feature_dim, fed.mean, fed.std, fed.size, choice.spec, choice.inferred), matched


def layered_head(state: Mapping[str, Tensor], kinds: Sequence[str], inputs: int, source: str) -> LayeredHead:
    """A head of exactly these kinds of layers, its sizes read from the weights.

    Args:
        state: names as nn.Sequential gives them, ``0.weight`` for the first layer.
        inputs: number of features it stands on.
    """
    layers: list[list[Any]] = []
    size = inputs
    for place, kind in enumerate(kinds):
        if kind == "linear":
            weight = state.get(f"{place}.weight")
            if weight is None or weight.ndim != 2 or weight.shape[1] != size or not len(weight):
                found = "nothing" if weight is None else f"shape {tuple(weight.shape)}"
                raise UserError(f"expected a linear layer on {size} numbers in {source}, found {found}; copy it again")
            layers.append(["linear", size, len(weight)])
            size = len(weight)
        else:
            layers.append([kind, size] if kind == "batchnorm" else [kind])
    head = LayeredHead(layers)
    load_strictly(head, state, source)
    return head


def head_number(count: int, wanted: Wanted, stated: int | None, source: Path) -> tuple[int | None, str]:
    """Which of several heads is meant, and why; None if neither user nor file tell."""
    for number, reason in ((wanted.head, "asked for"), (stated, "the best one, by the file")):
        if number is None:
            continue
        if not 0 <= number < count:
            raise UserError(f"{source} has {count} clustering heads, number {number} ({reason}) is not among them")
        return number, f"head {number} of {count}, {reason}"
    if count == 1:
        return 0, "the only one"
    return None, f"{count} heads and the file does not say which is best; pass --head 0 to {count - 1}"


def refuse_branch(wanted: Wanted, checkpoint: Checkpoint) -> None:
    """Files with one network have no moving average to choose."""
    if wanted.branch == "momentum":
        raise UserError(f"{checkpoint.path} holds no moving average of its network; leave --branch out")


def stated_epoch(checkpoint: Checkpoint) -> int | None:
    return whole_number(payload_fields(checkpoint.payload).get("epoch"))


def _occurs(name: str, text: str) -> bool:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.search(rf"{plain}(?!\d)", text) is not None
