"""SPICE (Niu et al., 2022): MoCo pretraining, SPICE-Self with one or ten heads, SPICE-Semi by FixMatch.

Files of MoCo's own code have the same names and are read here as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from cdc_plugin.checkpoints.formats._clustering import (
    CIFAR_STEM,
    IMAGENET,
    STL10,
    STL_STEM,
    TINY_IMAGENET,
    Choice,
    Convention,
    choose_convention,
    choose_head,
    is_small_stem,
    load_layered_head,
    load_resnet,
    read_epoch,
    refuse_branch,
    rename_to_torchvision,
    resnet_shape,
    top_names,
)
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.torchvision import IMAGENET_MEAN, IMAGENET_STD
from cdc_plugin.checkpoints.read import Checkpoint, check_finite, find_state_dict, payload_fields, strip_prefix
from cdc_plugin.checkpoints.weights import build_with_weights
from cdc_plugin.config.schema import INPUT_FACTS
from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.heads import LayeredHead

MOCO_PARTS = {"encoder_q", "encoder_k", "queue", "queue_ptr"}
SELF_HEAD = ("linear", "relu", "linear")
# MoCo and SPICE-Self normalise every data set in the same way; FixMatch has CIFAR's own numbers, out of 255.
CIFAR = Convention(("CIFAR-10", "CIFAR-20", "CIFAR-100"), IMAGENET_MEAN, IMAGENET_STD, 32, CIFAR_STEM)
SEMI_CIFAR10 = Convention(
    ("CIFAR-10",), (125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255), 32, CIFAR_STEM
)
SEMI_CIFAR100 = Convention(
    ("CIFAR-100", "CIFAR-20"),
    (129.3 / 255, 124.1 / 255, 112.4 / 255),
    (68.2 / 255, 65.4 / 255, 70.4 / 255),
    32,
    CIFAR_STEM,
)
SEMI_CIFARS = (SEMI_CIFAR10, SEMI_CIFAR100)
WIDE_STRIDES = {3: [1, 2, 2], 4: [2, 2, 2, 2]}  # of FixMatch's network for CIFAR, and of SPICE's for STL-10


def load_moco(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the query encoder of MoCo or, on request, the key encoder, its moving average."""
    branch = wanted.branch or "online"
    inner = rename_to_torchvision(checkpoint, "encoder_q." if branch == "online" else "encoder_k.")
    if not inner.state:
        raise CheckpointError(f"{checkpoint.path} has no {branch} encoder; leave out {option('branch', branch)}")
    choose_head(0, wanted, None, checkpoint.path)
    arch = payload_fields(checkpoint.payload).get("arch")
    spec = resnet_shape(inner, wanted, "MoCo")
    candidates = _find_data_sets(spec, checkpoint.below("encoder_q.").state, arch, None)
    choice = choose_convention("MoCo", candidates, spec, inner)
    why = choice.why | dict.fromkeys(("mean", "std"), "ImageNet's, as in MoCo's code") | {"branch": branch}
    backbone, matched = load_resnet(inner, wanted, _fix_normalisation(choice))
    return Loaded(backbone, Origin("MoCo", describe(choice.spec), read_epoch(checkpoint), why), matched=matched)


def load_self(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return backbone and head of SPICE-Self; selected checkpoints have one head, those saved in training ten."""
    refuse_branch(wanted, checkpoint)
    inner = rename_to_torchvision(checkpoint, "feature_module.")
    heads = sorted({key.split(".")[1] for key in checkpoint.state if key.startswith("head.")})
    first = checkpoint.state.get("head.head_0.classifier.lin2.weight")
    clusters = len(first) if first is not None and first.ndim else None
    spec = resnet_shape(inner, wanted, "SPICE-Self")
    candidates = _find_data_sets(spec, checkpoint.below("feature_module.").state, None, clusters)
    choice = choose_convention("SPICE-Self", candidates, spec, inner)
    why = choice.why | dict.fromkeys(("mean", "std"), "ImageNet's, in all settings of SPICE-Self")
    backbone, matched = load_resnet(inner, wanted, _fix_normalisation(choice))
    number, why["head"] = choose_head(len(heads), wanted, None, checkpoint.path)
    chosen: tuple[nn.Module, ...] = ()
    if number is not None:
        state = checkpoint.below(f"head.head_{number}.classifier.").state
        state = {re.sub(r"^lin(\d)\.", lambda m: f"{2 * int(m[1]) - 2}.", key): v for key, v in state.items()}
        chosen = (load_layered_head(state, SELF_HEAD, backbone.feature_dim, f"{checkpoint.path} (head {number})"),)
    return Loaded(backbone, Origin("SPICE-Self", describe(choice.spec), read_epoch(checkpoint), why), chosen, matched)


def load_semi(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return network and classifier of FixMatch: the moving average, which it evaluates, unless requested otherwise."""
    branch = wanted.branch or "momentum"
    name = "eval_model" if branch == "momentum" else "train_model"
    state = find_state_dict(payload_fields(checkpoint.payload).get(name), f"{name} of {checkpoint.path}")
    check_finite(state, str(checkpoint.path))
    if all(key.startswith("model.") for key in state):
        state = strip_prefix(state, "model.")
    network = replace(checkpoint, state=state)
    why = {"branch": f"{branch}{'' if wanted.branch else ', which FixMatch itself evaluates'}"}
    _, why["head"] = choose_head(1, wanted, None, checkpoint.path)
    clusters = len(state["fc.weight"]) if "fc.weight" in state and state["fc.weight"].ndim else 0
    small = {10: (SEMI_CIFAR10,), 20: (SEMI_CIFAR100,), 100: (SEMI_CIFAR100,)}.get(clusters, SEMI_CIFARS)
    if any(key.startswith("block1.layer.0.") for key in state):
        backbone, matched = _load_wide_resnet(network, wanted, small)
        why |= dict.fromkeys(INPUT_FACTS, "SPICE-Semi's for its data set with this network; the file does not say")
    else:
        inner = rename_to_torchvision(network, "")
        spec = resnet_shape(inner, wanted, "SPICE-Semi")
        candidates = (*small, STL10) if is_small_stem(spec) else (IMAGENET, STL10)
        choice = choose_convention("SPICE-Semi", candidates, spec, inner)
        why |= choice.why
        backbone, matched = load_resnet(inner, wanted, choice)
    head = _load_classifier(state, backbone.feature_dim, str(checkpoint.path))
    return Loaded(backbone, Origin("SPICE-Semi (FixMatch)", describe(backbone.spec), why=why), (head,), matched)


def _find_data_sets(
    spec: Mapping[str, Any], original: Mapping[str, Tensor], arch: Any, clusters: int | None
) -> Sequence[Convention]:
    """Return the data sets that SPICE uses with a ResNet, their stems included.

    Args:
        original: the weights under SPICE's names.
        arch: the name that MoCo's script stores, if any.
    """
    if not is_small_stem(spec):
        return (IMAGENET,)
    if not any(".shortcut." in key for key in original):  # its ClusterResNet, which pools for every data set
        pooled = (STL10, replace(CIFAR, stem=STL_STEM), TINY_IMAGENET)
        return {20: pooled[1:2], 200: pooled[2:]}.get(clusters or 0, pooled)
    return {"resnet18": (STL10,), "resnet18_cifar": (CIFAR,)}.get(str(arch), (CIFAR, STL10))


def _fix_normalisation(choice: Choice) -> Choice:
    """Return the choice with mean and std as known: MoCo and SPICE-Self normalise all data sets in the same way."""
    return replace(choice, inferred=tuple(fact for fact in choice.inferred if fact not in ("mean", "std")))


def _load_wide_resnet(checkpoint: Checkpoint, wanted: Wanted, small: Sequence[Convention]) -> tuple[Backbone, float]:
    """Return FixMatch's wide ResNet, its sizes read from the weights, and the share that matched."""
    state = {key: value for key, value in checkpoint.state.items() if not key.startswith("fc.")}
    stages = len({key.split(".")[0] for key in state if re.match(r"block\d+\.", key)})
    depth = len({key.split(".")[2] for key in state if key.startswith("block1.layer.")})
    firsts = [state.get("conv1.weight")] + [state.get(f"block{n}.layer.0.conv1.weight") for n in range(1, stages + 1)]
    widths = [len(first) for first in firsts if first is not None and first.ndim == 4 and len(first)]
    if wanted.arch is not None:
        raise CheckpointError(
            f"{checkpoint.path} holds FixMatch's wide ResNet; leave out {option('arch', wanted.arch)}"
        )
    # A stage that halves the maps widens them as well.
    if stages not in WIDE_STRIDES or len(widths) != stages + 1 or widths[1:] != sorted(set(widths[1:])):
        raise CheckpointError(
            f"expected FixMatch's wide ResNet of 3 or 4 widening stages in {checkpoint.path}, found {stages} stages "
            f"of widths {widths}; copy it again"
        )
    spec = {"family": "fixmatch_wrn", "name": f"widths {'/'.join(map(str, widths))}", "depth": depth}
    spec |= {"widths": widths, "strides": WIDE_STRIDES[stages]}
    network, features, matched = build_with_weights(spec, state, str(checkpoint.path), wanted.partial)
    fed = small[0] if stages == 3 else STL10
    return Backbone(network, features, fed.mean, fed.std, fed.size, spec, INPUT_FACTS), matched


def _load_classifier(state: Mapping[str, Tensor], features: int, source: str) -> LayeredHead:
    layer = {f"0.{key}": value for key, value in strip_prefix(state, "fc.").items()}
    return load_layered_head(layer, ["linear"], features, f"{source} (classifier)")


def matches_moco(checkpoint: Checkpoint) -> bool:
    """Return whether this is MoCo's query encoder, with or without its key encoder and queue."""
    names = {key.split(".")[0] for key in checkpoint.state}
    return "encoder_q" in names and names <= MOCO_PARTS and "encoder_q.conv1.weight" in checkpoint.state


def matches_self(checkpoint: Checkpoint) -> bool:
    """Return whether this is a feature module with numbered heads."""
    return top_names(checkpoint.state) == {"feature_module", "head"} and any(
        key.startswith("head.head_0.classifier.") for key in checkpoint.state
    )


def matches_semi(checkpoint: Checkpoint) -> bool:
    """Return whether the file has FixMatch's network and its moving average."""
    return {"train_model", "eval_model"} <= set(payload_fields(checkpoint.payload))
