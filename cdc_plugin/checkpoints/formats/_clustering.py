"""Shared by the formats of clustering networks: ResNets, heads, and the input conventions of their data sets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from cdc_plugin.checkpoints.formats.base import Wanted
from cdc_plugin.checkpoints.formats.resnet_keys import has_shortcuts, rename_shortcuts
from cdc_plugin.checkpoints.formats.torchvision import IMAGENET_MEAN, IMAGENET_STD, RESNETS, is_resnet, resnet_spec
from cdc_plugin.checkpoints.infer.from_weights import inner_share, last_side
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, whole_number
from cdc_plugin.checkpoints.weights import build_backbone, load_strictly
from cdc_plugin.config.schema import INPUT_FACTS
from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.heads import LayeredHead

CONVOLUTION = re.compile(r"(conv\d|downsample\.0)\.weight$")
# 3x3 stems of SCAN and its many descendants: for CIFAR without a pool, for STL-10 with one of 2x2.
CIFAR_STEM = {"stride": 1, "padding": 1, "pool": False}
STL_STEM = {"stride": 1, "padding": 1, "pool": True, "pool_kernel": 2}


@dataclass(frozen=True)
class Convention:
    """How a framework presents one of its data sets to the network."""

    names: tuple[str, ...]  # ways to write the name of the data set
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int  # side of the images
    stem: Mapping[str, Any] = field(default_factory=dict)  # of the framework's network for it, where a small one


@dataclass(frozen=True)
class Choice:
    """The convention to use: the spec with its stem, the facts that stay open, and where each fact comes from."""

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
    """Return the first parts of all names, without numbers at their end as in ``center_3``."""
    return {re.sub(r"_\d+$", "", key.split(".")[0]) for key in state}


def count_rows(state: Mapping[str, Tensor], name: str) -> int | None:
    """Return the number of rows of a weight, for a head's last layer its clusters; None if it is missing."""
    return len(state[name]) if name in state and state[name].ndim else None


def find_cifar(clusters: int | None, both: tuple[Convention, ...] = (CIFAR10, CIFAR20)) -> tuple[Convention, ...]:
    """Return CIFAR-10 or CIFAR-20 by the number of clusters; both, if that is unknown or another."""
    return {10: both[:1], 20: both[1:], 100: both[1:]}.get(clusters or 0, both)


def load_resnet(
    checkpoint: Checkpoint,
    wanted: Wanted,
    framework: str,
    prefix: str,
    small: Sequence[Convention],
    large: Sequence[Convention] = (IMAGENET,),
    known: Sequence[str] = (),
    shortcuts: bool = False,
) -> tuple[Backbone, float, dict[str, str]]:
    """Return the ResNet below a prefix, the share of its weights that matched, and where its facts come from.

    Stems for small and for large images belong to the data sets ``small`` and ``large``, the more usual one first;
    ``known`` facts are the same for all. Where the framework's own small networks say ``shortcut``, others, which users
    put in their frame, have an open stem.
    """
    inner = rename_to_torchvision(checkpoint, prefix)
    spec = resnet_shape(inner, wanted, framework)
    if shortcuts and is_small_stem(spec) and not has_shortcuts(checkpoint.below(prefix).state):
        choice = _leave_open(framework, small[0], spec)
    else:
        choice = choose_convention(framework, small if is_small_stem(spec) else large, spec, inner)
    inferred, fed = [fact for fact in choice.inferred if fact not in known], choice.fed
    facts = (str(checkpoint.path), fed.mean, fed.std, fed.size, inferred, wanted.partial)
    backbone, matched = build_backbone(choice.spec, inner.state, *facts)
    return backbone, matched, choice.why


def choose_convention(
    framework: str, candidates: Sequence[Convention], spec: Mapping[str, Any], checkpoint: Checkpoint
) -> Choice:
    """Return the most plausible of the data sets that fit the content of a file.

    BatchNorm statistics reveal the size of the last maps, hence network and images; where two data sets agree in it,
    the path may name one, else it is the first. The weights are under torchvision's names.
    """
    stems = [spec["stem"] | (c.stem if is_small_stem(spec) else {}) for c in candidates]
    inner = [1 - 1 / last_side(stem, c.size) for stem, c in zip(stems, candidates, strict=True)]
    measured = inner_share(checkpoint.state)
    distances = [abs(share - measured) if measured is not None else 0.0 for share in inner]
    fitting = [c for c, distance in zip(candidates, distances, strict=True) if distance == min(distances)]
    nearby = " ".join(map(_squash, checkpoint.path.absolute().parts[-4:]))
    named = [c for c in fitting if any(re.search(rf"{_squash(name)}(?!\d)", nearby) for name in c.names)]
    chosen = named[0] if len(named) == 1 else fitting[0]
    stem = stems[list(candidates).index(chosen)]
    why = {"input_size": f"{framework}'s for {chosen.names[0]}"}
    if len(fitting) < len(candidates):
        why["input_size"] += ", inferred from the size of the last maps, which BatchNorm statistics reveal"
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
            why["stem"] += "; its max-pool is inferred from BatchNorm statistics, images can settle it"
    return Choice(chosen, {**spec, "stem": stem}, inferred, why)


def _leave_open(framework: str, fed: Convention, spec: Mapping[str, Any]) -> Choice:
    """Return a choice for a small ResNet that is not the framework's own: its stem is open, as in any bare ResNet."""
    guess = f"{framework}'s for {fed.names[0]}, but the network is not its own; images can settle it"
    why = dict.fromkeys((*INPUT_FACTS, "stem"), guess)
    return Choice(fed, dict(spec), (*INPUT_FACTS, "stem.pool", "stem.padding", "stem.stride"), why)


def rename_to_torchvision(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    """Return the ResNet below a prefix under torchvision's names, without its projection head ``fc``."""
    inner = rename_shortcuts(checkpoint.below(prefix).state)
    return replace(checkpoint, state={key: value for key, value in inner.items() if not key.startswith("fc.")})


def resnet_shape(checkpoint: Checkpoint, wanted: Wanted, framework: str) -> dict[str, Any]:
    """Return the spec of a ResNet under torchvision's names, its stem as torchvision would have it."""
    state, source = checkpoint.state, checkpoint.path
    flat = [key for key in state if CONVOLUTION.search(key) and state[key].ndim != 4]
    if not is_resnet(state) or flat:
        sample = ", ".join((flat or list(state))[:3]) or "none"
        raise CheckpointError(f"expected a complete ResNet of {framework} in {source}, found {sample}; copy it again")
    spec, _ = resnet_spec(state)
    # Lost blocks leave a shallower network, which no framework has.
    name = next((name for name, kind in RESNETS.items() if kind == (spec["block"], spec["depths"])), None)
    if name is None:
        raise CheckpointError(
            f"the ResNet of {framework} in {source} has {spec['depths']} blocks per stage, unlike any known one; "
            "copy it again"
        )
    if wanted.arch not in (None, name):
        raise CheckpointError(f"{option('arch', wanted.arch)} does not fit {source}, which holds {name}; leave it out")
    return spec


def is_small_stem(spec: Mapping[str, Any]) -> bool:
    """Return whether the first convolution is one for small images."""
    return bool(spec["stem"]["kernel"] < 7)


def load_linear(state: Mapping[str, Tensor], inputs: int, source: str) -> LayeredHead:
    """Return a head of one linear layer."""
    return load_layered_head({f"0.{key}": value for key, value in state.items()}, ["linear"], inputs, source)


def load_layered_head(state: Mapping[str, Tensor], kinds: Sequence[str], inputs: int, source: str) -> LayeredHead:
    """Return a head of exactly these kinds of layers, its sizes read from weights named as nn.Sequential does."""
    layers: list[list[Any]] = []
    size = inputs
    for position, kind in enumerate(kinds):
        if kind == "linear":
            weight = state.get(f"{position}.weight")
            if weight is None or weight.ndim != 2 or weight.shape[1] != size or not len(weight):
                actual = "nothing" if weight is None else f"shape {tuple(weight.shape)}"
                raise CheckpointError(
                    f"expected a linear layer with {size} inputs in {source}, found {actual}; copy it again"
                )
            layers.append(["linear", size, len(weight)])
            size = len(weight)
        else:
            layers.append([kind, size] if kind == "batchnorm" else [kind])
    head = LayeredHead(layers)
    load_strictly(head, state, source)
    return head


def choose_head(
    checkpoint: Checkpoint, count: int, wanted: Wanted, stated: int | None = None
) -> tuple[int | None, str]:
    """Return the number of the head to use and why; None if neither the user nor the file chooses one."""
    for number, reason in ((wanted.head, "as requested"), (stated, "the best one according to the file")):
        if number is None:
            continue
        if not 0 <= number < count:
            raise CheckpointError(
                f"{checkpoint.path} has {count} clustering heads, {number} ({reason}) is not one of them"
            )
        return number, f"head {number} of {count}, {reason}"
    if count == 1:
        return 0, "the only one"
    return None, f"{count} heads and the file does not say which is best; pass {option('head', 0)} to {count - 1}"


def refuse_branch(wanted: Wanted, checkpoint: Checkpoint) -> None:
    """Refuse a request for the moving average in a file that holds one network only."""
    if wanted.branch == "momentum":
        raise CheckpointError(
            f"{checkpoint.path} has no moving average of its network; leave out {option('branch', wanted.branch)}"
        )


def read_epoch(checkpoint: Checkpoint) -> int | None:
    """Return the number of epochs that the file states."""
    return whole_number(payload_fields(checkpoint.payload).get("epoch"))


def _squash(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
