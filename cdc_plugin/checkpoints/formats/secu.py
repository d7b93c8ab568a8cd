"""SeCu (Qian, 2023), with size or entropy constraint: an encoder with projection, and cluster centres of many sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from cdc_plugin.checkpoints.formats._clustering import (
    IMAGENET,
    STL10,
    Convention,
    choose_for_shortcuts,
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
from cdc_plugin.checkpoints.read import Checkpoint
from cdc_plugin.checkpoints.weights import load_strictly
from cdc_plugin.errors import CheckpointError
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.heads import CosineHead

PARTS = {"encoder", "predictor", "center", "assign_labels", "counter", "ldual"}
# All scripts leave the temperature at its default, and no file states it.
TEMPERATURE = 0.05
PROJECTION = ("linear", "batchnorm", "relu", "linear")
PROJECTION_IMAGENET = (*PROJECTION[:3], *PROJECTION[:3], "linear", "batchnorm")
# It stores one label per image, so their number identifies the data set.
CIFAR_IMAGES, STL_IMAGES = 50_000, 105_000


def load_secu(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the encoder without its projection, and projection and centres as a cosine head."""
    refuse_branch(wanted, checkpoint)
    inner = rename_to_torchvision(checkpoint, "encoder.")
    spec = resnet_shape(inner, wanted, "SeCu")
    sizes = _read_sizes(checkpoint)
    candidates: Sequence[Convention] = (IMAGENET,)
    if is_small_stem(spec):
        labels = checkpoint.state.get("assign_labels_0")
        trained_on = {CIFAR_IMAGES: find_cifar(sizes[0]), STL_IMAGES: (STL10,)}
        either = (*find_cifar(sizes[0]), STL10)
        candidates = trained_on.get(labels.numel() if labels is not None else 0, either)
    choice = choose_for_shortcuts("SeCu", candidates, spec, checkpoint, "encoder.")
    why = choice.why
    backbone, matched = load_resnet(inner, wanted, choice)
    number, why["head"] = _choose_center(sizes, wanted, checkpoint)
    why["temperature"] = f"{TEMPERATURE}, the default of SeCu's scripts; files do not state it"
    head = _build_cosine_head(checkpoint, number, backbone.feature_dim)
    constraint = "size" if "ldual_0" in checkpoint.state else "entropy"
    writer = f"SeCu ({constraint} constraint)"
    return Loaded(backbone, Origin(writer, describe(choice.spec), read_epoch(checkpoint), why), (head,), matched)


def _read_sizes(checkpoint: Checkpoint) -> list[int]:
    """Return the number of clusters of each head, after a check against its counter of images."""
    count = sum(bool(re.fullmatch(r"center_\d+", key)) for key in checkpoint.state)
    sizes = []
    for number in range(count):
        center = checkpoint.state.get(f"center_{number}")
        counter = checkpoint.state.get(f"counter_{number}")
        if center is None or center.ndim != 2 or 0 in center.shape or _disagree(center, counter):
            raise CheckpointError(f"center_{number} of {checkpoint.path} is missing or misshapen; copy it again")
        sizes.append(center.shape[1])
    return sizes


def _disagree(center: Tensor, counter: Tensor | None) -> bool:
    return counter is not None and counter.shape != center.shape[1:]


def _choose_center(sizes: Sequence[int], wanted: Wanted, checkpoint: Checkpoint) -> tuple[int, str]:
    if wanted.head is None and wanted.clusters is not None and wanted.clusters in sizes:
        fitting = sizes.index(wanted.clusters)
        return fitting, f"head {fitting} of {len(sizes)}, the one with {wanted.clusters} clusters"
    # SeCu's scripts name the number of classes first and multiples of it after.
    number, _ = choose_head(len(sizes), wanted, 0, checkpoint.path)
    assert number is not None
    reason = (
        "as requested" if wanted.head is not None else "the first, for which SeCu's scripts use the number of classes"
    )
    return number, f"head {number} of {len(sizes)} ({sizes[number]} clusters), {reason}"


def _build_cosine_head(checkpoint: Checkpoint, number: int, features: int) -> CosineHead:
    state = checkpoint.below("encoder.fc.").state
    source = f"{checkpoint.path} (projection)"
    kinds = PROJECTION if "predictor" not in top_names(checkpoint.state) else PROJECTION_IMAGENET
    projection = load_layered_head(state, kinds, features, source)
    centers = checkpoint.state[f"center_{number}"].float().T  # (K, dim); the file has (dim, K)
    if centers.shape[1] != projection.clusters:
        raise CheckpointError(
            f"center_{number} of {checkpoint.path} has {centers.shape[1]} numbers per cluster, "
            f"its projection {projection.clusters}; copy it again"
        )
    head = CosineHead(projection.layers, centers.shape[1], len(centers), TEMPERATURE)
    load_strictly(head.projection, projection.state_dict(), source)
    with torch.no_grad():
        head.centers.copy_(centers)
    return head


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether this is an encoder with cluster centres, and nothing that SeCu does not write."""
    names = top_names(checkpoint.state)
    return {"encoder", "center"} <= names <= PARTS
