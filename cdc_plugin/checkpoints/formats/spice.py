"""SPICE (Niu et al., 2022): MoCo pretraining, as MoCo's own code writes it, SPICE-Self, SPICE-Semi by FixMatch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from cdc_plugin.checkpoints.formats import _clustering as clustering
from cdc_plugin.checkpoints.formats._clustering import CIFAR_STEM, IMAGENET, STL10, STL_STEM, TINY_IMAGENET, Convention
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.torchvision import IMAGENET_MEAN, IMAGENET_STD
from cdc_plugin.checkpoints.read import Checkpoint, check_finite, find_state_dict, payload_fields
from cdc_plugin.checkpoints.weights import build_backbone, strip_prefix
from cdc_plugin.config.schema import INPUT_FACTS
from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.backbone import Backbone

MOCO_PARTS = {"encoder_q", "encoder_k", "queue", "queue_ptr"}
SELF_HEAD = ("linear", "relu", "linear")
# MoCo and SPICE-Self normalise every data set in the same way; FixMatch has CIFAR's own numbers, out of 255.
CIFAR = Convention(("CIFAR-10", "CIFAR-20", "CIFAR-100"), IMAGENET_MEAN, IMAGENET_STD, 32, CIFAR_STEM)
SEMI_CIFARS = tuple(
    Convention(names, tuple(m / 255 for m in mean), tuple(s / 255 for s in std), 32, CIFAR_STEM)
    for names, mean, std in (
        (("CIFAR-10",), (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
        (("CIFAR-100", "CIFAR-20"), (129.3, 124.1, 112.4), (68.2, 65.4, 70.4)),
    )
)
WIDE_STRIDES = {3: [1, 2, 2], 4: [2, 2, 2, 2]}  # of FixMatch's network for CIFAR, and of SPICE's for STL-10


def load_moco(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the query encoder of MoCo or, on request, the key encoder, its moving average."""
    branch = wanted.branch or "online"
    prefix = "encoder_q." if branch == "online" else "encoder_k."
    if not checkpoint.below(prefix).state:
        raise CheckpointError(f"{checkpoint.path} has no {branch} encoder; leave out {option('branch', branch)}")
    clustering.choose_head(checkpoint, 0, wanted)
    small = _find_small(checkpoint.below("encoder_q.").state, payload_fields(checkpoint.payload).get("arch"), None)
    backbone, matched, why = clustering.load_resnet(checkpoint, wanted, "MoCo", prefix, small, known=("mean", "std"))
    why |= dict.fromkeys(("mean", "std"), "ImageNet's, as in MoCo's code") | {"branch": branch}
    return Loaded(backbone, Origin("MoCo", clustering.read_epoch(checkpoint), why), matched=matched)


def load_self(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return backbone and head of SPICE-Self; selected checkpoints have one head, those saved in training ten."""
    clustering.refuse_branch(wanted, checkpoint)
    clusters = clustering.count_rows(checkpoint.state, "head.head_0.classifier.lin2.weight")
    small = _find_small(checkpoint.below("feature_module.").state, None, clusters)
    backbone, matched, why = clustering.load_resnet(
        checkpoint, wanted, "SPICE-Self", "feature_module.", small, known=("mean", "std")
    )
    why |= dict.fromkeys(("mean", "std"), "ImageNet's, in all settings of SPICE-Self")
    count = len({key.split(".")[1] for key in checkpoint.state if key.startswith("head.")})
    number, why["head"] = clustering.choose_head(checkpoint, count, wanted)
    heads: tuple[nn.Module, ...] = ()
    if number is not None:
        state = checkpoint.below(f"head.head_{number}.classifier.").state
        state = {re.sub(r"^lin(\d)\.", lambda m: f"{2 * int(m[1]) - 2}.", key): v for key, v in state.items()}
        source = f"{checkpoint.path} (head {number})"
        heads = (clustering.load_layered_head(state, SELF_HEAD, backbone.feature_dim, source),)
    return Loaded(backbone, Origin("SPICE-Self", clustering.read_epoch(checkpoint), why), heads, matched)


def load_semi(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return network and classifier of FixMatch: the moving average, which it evaluates, unless requested otherwise."""
    branch = wanted.branch or "momentum"
    name = "eval_model" if branch == "momentum" else "train_model"
    state = find_state_dict(payload_fields(checkpoint.payload).get(name), f"{name} of {checkpoint.path}")
    check_finite(state, str(checkpoint.path))
    if all(key.startswith("model.") for key in state):
        state = strip_prefix(state, "model.")
    network = replace(checkpoint, state=state)
    _, head_reason = clustering.choose_head(checkpoint, 1, wanted)
    small = clustering.find_cifar(clustering.count_rows(state, "fc.weight"), SEMI_CIFARS)
    if any(key.startswith("block1.layer.0.") for key in state):
        backbone, matched = _load_wide_resnet(network, wanted, small[0])
        why = dict.fromkeys(INPUT_FACTS, "SPICE-Semi's for its data set with this network; the file does not say")
    else:
        data_sets = ((*small, STL10), (IMAGENET, STL10))
        backbone, matched, why = clustering.load_resnet(network, wanted, "SPICE-Semi", "", *data_sets)
    why |= {"branch": f"{branch}{'' if wanted.branch else ', which FixMatch itself evaluates'}", "head": head_reason}
    source = f"{checkpoint.path} (classifier)"
    head = clustering.load_linear(strip_prefix(state, "fc."), backbone.feature_dim, source)
    return Loaded(backbone, Origin("SPICE-Semi (FixMatch)", why=why), (head,), matched)


def _find_small(original: Mapping[str, Tensor], arch: Any, clusters: int | None) -> Sequence[Convention]:
    """Return the data sets that SPICE uses with a small ResNet; ``arch`` is what MoCo's script stores, if anything."""
    if not any(".shortcut." in key for key in original):  # its ClusterResNet, which pools for every data set
        pooled = (STL10, replace(CIFAR, stem=STL_STEM), TINY_IMAGENET)
        return {20: pooled[1:2], 200: pooled[2:]}.get(clusters or 0, pooled)
    return {"resnet18": (STL10,), "resnet18_cifar": (CIFAR,)}.get(str(arch), (CIFAR, STL10))


def _load_wide_resnet(checkpoint: Checkpoint, wanted: Wanted, cifar: Convention) -> tuple[Backbone, float]:
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
    fed = cifar if stages == 3 else STL10
    facts = (str(checkpoint.path), fed.mean, fed.std, fed.size, INPUT_FACTS, wanted.partial)
    return build_backbone(spec, state, *facts)


def matches_moco(checkpoint: Checkpoint) -> bool:
    """Return whether this is MoCo's query encoder, with or without its key encoder and queue."""
    names = {key.split(".")[0] for key in checkpoint.state}
    return "encoder_q" in names and names <= MOCO_PARTS and "encoder_q.conv1.weight" in checkpoint.state


def matches_self(checkpoint: Checkpoint) -> bool:
    """Return whether this is a feature module with numbered heads."""
    return clustering.top_names(checkpoint.state) == {"feature_module", "head"} and any(
        key.startswith("head.head_0.classifier.") for key in checkpoint.state
    )


def matches_semi(checkpoint: Checkpoint) -> bool:
    """Return whether the file has FixMatch's network and its moving average."""
    return {"train_model", "eval_model"} <= set(payload_fields(checkpoint.payload))
