"""Contrastive Clustering (CC; Li et al., 2021) and its successor TCL (2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cdc_plugin.checkpoints.formats._clustering import (
    CIFAR10,
    CIFAR20,
    CIFAR_STEM,
    IMAGENET,
    Convention,
    choose_convention,
    choose_head,
    find_cifar,
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
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields
from cdc_plugin.checkpoints.weights import build_with_weights
from cdc_plugin.config.schema import INPUT_FACTS
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.heads import LayeredHead

PARTS = {"resnet", "instance_projector", "cluster_projector"}
CC_HEAD = ("linear", "relu", "linear")
TCL_HEAD = ("batchnorm", "relu", "linear", "batchnorm", "relu", "linear")
# CC never normalises, and resizes all images to one size, 224 unless set otherwise.
CC_INPUTS = tuple(
    Convention((f"{size} pixels",), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), size, CIFAR_STEM)
    for size in (224, 128, 96, 64, 32)
)
TCL_DATASETS = {"CIFAR-10": CIFAR10, "CIFAR-100": CIFAR20, "ImageNet-10": IMAGENET, "ImageNet": IMAGENET}


def load_cc(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return backbone and cluster projector of Contrastive Clustering."""
    refuse_branch(wanted, checkpoint)
    inner = rename_to_torchvision(checkpoint, "resnet.")
    spec = resnet_shape(inner, wanted, "CC")
    choice = choose_convention("CC", CC_INPUTS, spec, inner)
    why = choice.why | {"mean": "CC does not normalise", "std": "CC does not normalise"}
    # A small stem is not CC's own, so its details are open.
    inferred = ("input_size", *(("stem.pool", "stem.padding") if is_small_stem(spec) else ()))
    backbone, matched = load_resnet(inner, wanted, replace(choice, inferred=inferred))
    head = _load_projector(checkpoint, wanted, CC_HEAD, backbone.feature_dim)
    return Loaded(backbone, Origin("CC", describe(choice.spec), read_epoch(checkpoint), why), (head,), matched)


def load_tcl(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the backbone, including the linear layer that ends TCL's, and the cluster projector."""
    refuse_branch(wanted, checkpoint)
    inner = rename_to_torchvision(checkpoint, "resnet.")
    resnet = resnet_shape(inner, wanted, "TCL")
    spec = {"family": "resnet_linear", "name": describe(resnet), "resnet": resnet}
    layer = {key: value for key, value in checkpoint.below("resnet.").state.items() if key.startswith("fc.")}
    network, feature_dim, matched = build_with_weights(spec, inner.state | layer, str(checkpoint.path), wanted.partial)
    head = _load_projector(checkpoint, wanted, TCL_HEAD, feature_dim)
    dataset = payload_fields(payload_fields(checkpoint.payload).get("args")).get("dataset")
    stated = TCL_DATASETS.get(dataset) if isinstance(dataset, str) else None
    candidates = (stated,) if stated else (*find_cifar(head.clusters), IMAGENET)
    # TCL enlarges small images.
    choice = choose_convention("TCL", [replace(c, size=224) for c in candidates], resnet, inner)
    fed, why, inferred = choice.fed, choice.why, choice.inferred
    if stated:
        why, inferred = dict.fromkeys(INPUT_FACTS, f"TCL's for {dataset}, which the run states"), ()
    backbone = Backbone(network, feature_dim, fed.mean, fed.std, fed.size, spec, inferred)
    origin = Origin("TCL", describe(spec), read_epoch(checkpoint), why)
    return Loaded(backbone, origin, (head,), matched)


def matches_cc(checkpoint: Checkpoint) -> bool:
    """Return whether these are CC's parts, without TCL's last layer."""
    return _has_parts(checkpoint) and not _has_last_layer(checkpoint)


def matches_tcl(checkpoint: Checkpoint) -> bool:
    """Return whether these are CC's parts with TCL's last layer."""
    return _has_parts(checkpoint) and _has_last_layer(checkpoint)


def _has_parts(checkpoint: Checkpoint) -> bool:
    names = top_names(checkpoint.state)
    return "resnet" in names and len(names) > 1 and names <= PARTS


def _has_last_layer(checkpoint: Checkpoint) -> bool:
    return any(key.startswith("resnet.fc.") for key in checkpoint.state)


def _load_projector(checkpoint: Checkpoint, wanted: Wanted, kinds: Sequence[str], features: int) -> LayeredHead:
    choose_head(1, wanted, None, checkpoint.path)
    state = checkpoint.below("cluster_projector.").state
    return load_layered_head(state, kinds, features, f"{checkpoint.path} (cluster projector)")
