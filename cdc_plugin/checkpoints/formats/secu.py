"""SeCu (Qian, 2023), with size or entropy constraint: an encoder with projection, and cluster centres of many sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from cdc_plugin.checkpoints.formats._clustering import (
    IMAGENET,
    STL10,
    Convention,
    choose_for_shortcuts,
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
from cdc_plugin.checkpoints.read import Checkpoint
from cdc_plugin.checkpoints.weights import load_strictly
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.heads import CosineHead

PARTS = {"encoder", "predictor", "center", "assign_labels", "counter", "ldual"}
# All scripts leave the temperature at its default, and no file has it.
TEMPERATURE = 0.05
PROJECTION = ("linear", "batchnorm", "relu", "linear")
PROJECTION_IMAGENET = (*PROJECTION[:3], *PROJECTION[:3], "linear", "batchnorm")
# How many labels it keeps, one for each image, tells the data set.
CIFAR_IMAGES, STL_IMAGES = 50_000, 105_000


def load_secu(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """The encoder without its projection, and projection with centres as a cosine head."""
    refuse_branch(wanted, checkpoint)
    inner = torchvision_names(checkpoint, "encoder.")
    spec = resnet_shape(inner, wanted, "SeCu")
    sizes = _sizes(checkpoint)
    candidates: Sequence[Convention] = (IMAGENET,)
    if is_small_stem(spec):
        labels = checkpoint.state.get("assign_labels_0")
        trained_on = {CIFAR_IMAGES: cifar_by_clusters(sizes[0]), STL_IMAGES: (STL10,)}
        either = (*cifar_by_clusters(sizes[0]), STL10)
        candidates = trained_on.get(labels.numel() if labels is not None else 0, either)
    choice = choose_for_shortcuts("SeCu", candidates, spec, checkpoint, "encoder.")
    why = choice.why
    backbone, matched = load_resnet(inner, wanted, choice)
    number, why["head"] = _choose(sizes, wanted, checkpoint)
    why["temperature"] = f"{TEMPERATURE}, the default of SeCu's scripts; files do not hold it"
    head = _cosine_head(checkpoint, number, backbone.feature_dim)
    size = "ldual_0" in checkpoint.state
    writer = f"SeCu ({'size' if size else 'entropy'} constraint)"
    return Loaded(backbone, Origin(writer, describe(choice.spec), stated_epoch(checkpoint), why), (head,), matched)


def _sizes(checkpoint: Checkpoint) -> list[int]:
    """Number of clusters of each head; its counter of images must agree."""
    count = sum(bool(re.fullmatch(r"center_\d+", key)) for key in checkpoint.state)
    sizes = []
    for number in range(count):
        center = checkpoint.state.get(f"center_{number}")
        counter = checkpoint.state.get(f"counter_{number}")
        whole = center is not None and center.ndim == 2 and min(center.shape) > 0
        if center is None or not whole or (counter is not None and counter.shape != center.shape[1:]):
            raise UserError(f"center_{number} of {checkpoint.path} is missing or misshapen; copy it again")
        sizes.append(center.shape[1])
    return sizes


def _choose(sizes: Sequence[int], wanted: Wanted, checkpoint: Checkpoint) -> tuple[int, str]:
    if wanted.head is None and wanted.clusters is not None and wanted.clusters in sizes:
        fitting = sizes.index(wanted.clusters)
        return fitting, f"head {fitting} of {len(sizes)}, the one with {wanted.clusters} clusters"
    # SeCu's scripts name the number of classes first and multiples of it after.
    number, _ = head_number(len(sizes), wanted, 0, checkpoint.path)
    assert number is not None
    reason = "asked for" if wanted.head is not None else "the first, which SeCu's scripts give the number of classes"
    return number, f"head {number} of {len(sizes)} ({sizes[number]} clusters), {reason}"


def _cosine_head(checkpoint: Checkpoint, number: int, features: int) -> CosineHead:
    state = checkpoint.below("encoder.fc.").state
    source = f"{checkpoint.path} (projection)"
    kinds = PROJECTION if "predictor" not in top_names(checkpoint.state) else PROJECTION_IMAGENET
    projection = layered_head(state, kinds, features, source)
    centers = checkpoint.state[f"center_{number}"].float().T  # (K, dim); the file has (dim, K)
    if centers.shape[1] != projection.clusters:
        raise UserError(
            f"center_{number} of {checkpoint.path} has {centers.shape[1]} numbers a cluster, "
            f"its projection {projection.clusters}; copy it again"
        )
    head = CosineHead(projection.layers, centers.shape[1], len(centers), TEMPERATURE)
    load_strictly(head.projection, projection.state_dict(), source)
    with torch.no_grad():
        head.centers.copy_(centers)
    return head


def _matches(checkpoint: Checkpoint) -> bool:
    names = top_names(checkpoint.state)
    return {"encoder", "center"} <= names <= PARTS


formats.register("secu")(CheckpointFormat("secu", _matches, load_secu, rank=23))
