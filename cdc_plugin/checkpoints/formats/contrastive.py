"""Clustering by contrast: CC (Li et al., 2021), its successor TCL (2022), and ProPos (Huang et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from cdc_plugin.checkpoints.formats._clustering import (
    CIFAR10,
    CIFAR20,
    CIFAR_STEM,
    IMAGENET,
    STL10,
    Convention,
    choose_convention,
    cifar_by_clusters,
    head_number,
    is_small_stem,
    layered_head,
    load_resnet,
    refuse_branch,
    resnet_shape,
    stated_epoch,
    top_names,
    torchvision_names,
)
from cdc_plugin.checkpoints.load import CheckpointFormat, Loaded, Origin, Wanted, formats
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields
from cdc_plugin.checkpoints.weights import build_with_weights
from cdc_plugin.config.schema import INPUT_FACTS
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.heads import LayeredHead

CC_PARTS = {"resnet", "instance_projector", "cluster_projector"}
CC_HEAD = ("linear", "relu", "linear")
TCL_HEAD = ("batchnorm", "relu", "linear", "batchnorm", "relu", "linear")
PROPOS_PARTS = {"encoder_q", "projector_q", "encoder_k", "projector_k", "predictor"}
PROPOS_EXTRA = {"encoder", "queue", "queue_ptr", "queue_ind"}
# CC never normalises, and resizes whatever it is given to one size, 224 unless told otherwise.
CC_INPUTS = tuple(
    Convention((f"{size} pixels",), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), size, CIFAR_STEM)
    for size in (224, 128, 96, 64, 32)
)


def load_cc(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Backbone and cluster projector of Contrastive Clustering."""
    refuse_branch(wanted, checkpoint)
    inner = torchvision_names(checkpoint, "resnet.")
    spec = resnet_shape(inner, wanted, "CC")
    choice = choose_convention("CC", CC_INPUTS, spec, inner)
    why = choice.why | {"mean": "CC does not normalise", "std": "CC does not normalise"}
    # A small stem is not CC's own, so that its details are open.
    inferred = ("input_size", *(("stem.pool", "stem.padding") if is_small_stem(spec) else ()))
    backbone, matched = load_resnet(inner, wanted, replace(choice, inferred=inferred))
    head = _projector(checkpoint, wanted, CC_HEAD, backbone.feature_dim)
    return Loaded(backbone, Origin("CC", describe(choice.spec), stated_epoch(checkpoint), why), (head,), matched)


def load_tcl(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Backbone, with the linear layer that TCL's ends with, and cluster projector."""
    refuse_branch(wanted, checkpoint)
    inner = torchvision_names(checkpoint, "resnet.")
    resnet = resnet_shape(inner, wanted, "TCL")
    spec = {"family": "resnet_linear", "name": describe(resnet), "resnet": resnet}
    layer = {key: value for key, value in checkpoint.below("resnet.").state.items() if key.startswith("fc.")}
    network, feature_dim, matched = build_with_weights(spec, inner.state | layer, str(checkpoint.path), wanted.partial)
    head = _projector(checkpoint, wanted, TCL_HEAD, feature_dim)
    stated = payload_fields(payload_fields(checkpoint.payload).get("args")).get("dataset")
    known = {"CIFAR-10": CIFAR10, "CIFAR-100": CIFAR20, "ImageNet-10": IMAGENET, "ImageNet": IMAGENET}
    candidates = (known[stated],) if stated in known else (*cifar_by_clusters(head.clusters), IMAGENET)
    # TCL enlarges small images.
    choice = choose_convention("TCL", [replace(c, size=224) for c in candidates], resnet, inner)
    fed, why, inferred = choice.fed, choice.why, choice.inferred
    if stated in known:
        why, inferred = dict.fromkeys(INPUT_FACTS, f"TCL's for {stated}, which the run states"), ()
    backbone = Backbone(network, feature_dim, fed.mean, fed.std, fed.size, spec, inferred)
    origin = Origin("TCL", describe(spec), stated_epoch(checkpoint), why)
    return Loaded(backbone, origin, (head,), matched)


def load_propos(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """The encoder of ProPos; it has no clustering head, its clusters come from k-means."""
    branch = wanted.branch or "momentum"
    encoder = checkpoint.below("encoder_k." if branch == "momentum" else "encoder_q.")
    first = _first_stage(encoder.state)
    inner = _named_children(encoder, first)
    spec = resnet_shape(inner, wanted, "ProPos")
    candidates: Sequence[Convention] = (IMAGENET, STL10)
    if is_small_stem(spec):
        # The numbers of the layers tell whether there is a pool.
        candidates = [replace(c, stem=CIFAR_STEM | {"pool": first == 4}) for c in (CIFAR10, CIFAR20)]
    choice = choose_convention("ProPos", candidates, spec, inner)
    backbone, matched = load_resnet(inner, wanted, choice)
    why = choice.why | {"branch": f"{branch}{'' if wanted.branch else ', which ProPos itself clusters'}"}
    return Loaded(backbone, Origin("ProPos", describe(choice.spec), why=why), matched=matched)


def _projector(checkpoint: Checkpoint, wanted: Wanted, kinds: Sequence[str], features: int) -> LayeredHead:
    head_number(1, wanted, None, checkpoint.path)
    state = checkpoint.below("cluster_projector.").state
    return layered_head(state, kinds, features, f"{checkpoint.path} (cluster projector)")


def _first_stage(state: Mapping[str, Tensor]) -> int:
    """At which place of the sequence the first stage of blocks stands: 3 without a max-pool, 4 with one."""
    return 3 if any(key.startswith("3.") for key in state) else 4


def _named_children(checkpoint: Checkpoint, first: int) -> Checkpoint:
    """Children of a ResNet numbered by nn.Sequential, under their names again."""
    names = {"0": "conv1", "1": "bn1"} | {str(first + stage): f"layer{stage + 1}" for stage in range(4)}
    parts = {key: key.partition(".") for key in checkpoint.state}
    state = {f"{names.get(head, head)}.{rest}": checkpoint.state[key] for key, (head, _, rest) in parts.items()}
    return replace(checkpoint, state=state)


def _is_either(checkpoint: Checkpoint) -> bool:
    names = top_names(checkpoint.state)
    return "resnet" in names and len(names) > 1 and names <= CC_PARTS


def _is_cc(checkpoint: Checkpoint) -> bool:
    return _is_either(checkpoint) and not any(key.startswith("resnet.fc.") for key in checkpoint.state)


def _is_tcl(checkpoint: Checkpoint) -> bool:
    return _is_either(checkpoint) and any(key.startswith("resnet.fc.") for key in checkpoint.state)


def _is_propos(checkpoint: Checkpoint) -> bool:
    return PROPOS_PARTS <= top_names(checkpoint.state) <= PROPOS_PARTS | PROPOS_EXTRA


formats.register("cc")(CheckpointFormat("cc", _is_cc, load_cc, rank=24))
formats.register("tcl")(CheckpointFormat("tcl", _is_tcl, load_tcl, rank=24))
formats.register("propos")(CheckpointFormat("propos", _is_propos, load_propos, rank=25))
