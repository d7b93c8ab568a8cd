"""SeCu (Qian, 2023), with size or entropy constraint: an encoder with projection, and cluster centres of many sizes."""

import re
from collections.abc import Sequence

import torch

from cdc_plugin.checkpoints.formats import _clustering as clustering
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.read import Checkpoint
from cdc_plugin.checkpoints.weights import load_strictly
from cdc_plugin.errors import CheckpointError
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
    clustering.refuse_branch(wanted, checkpoint)
    sizes = _read_sizes(checkpoint)
    cifar = clustering.find_cifar(sizes[0] if sizes else None)
    labels = clustering.count_rows(checkpoint.state, "assign_labels_0")
    trained_on = {CIFAR_IMAGES: cifar, STL_IMAGES: (clustering.STL10,)}
    small = trained_on.get(labels or 0, (*cifar, clustering.STL10))
    backbone, matched, why = clustering.load_resnet(checkpoint, wanted, "SeCu", "encoder.", small, shortcuts=True)
    number, why["head"] = _choose_center(sizes, wanted, checkpoint)
    why["temperature"] = f"{TEMPERATURE}, the default of SeCu's scripts; files do not state it"
    head = _build_cosine_head(checkpoint, number, backbone.feature_dim)
    writer = f"SeCu ({'size' if 'ldual_0' in checkpoint.state else 'entropy'} constraint)"
    return Loaded(backbone, Origin(writer, clustering.read_epoch(checkpoint), why), (head,), matched)


def _read_sizes(checkpoint: Checkpoint) -> list[int]:
    """Return the number of clusters of each head, after a check against its counter of images."""
    count = sum(bool(re.fullmatch(r"center_\d+", key)) for key in checkpoint.state)
    sizes = []
    for number in range(count):
        center = checkpoint.state.get(f"center_{number}")
        counter = checkpoint.state.get(f"counter_{number}")
        shaped = center is not None and center.ndim == 2 and 0 not in center.shape
        if center is None or not shaped or (counter is not None and counter.shape != center.shape[1:]):
            raise CheckpointError(f"center_{number} of {checkpoint.path} is missing or misshapen; copy it again")
        sizes.append(center.shape[1])
    return sizes


def _choose_center(sizes: Sequence[int], wanted: Wanted, checkpoint: Checkpoint) -> tuple[int, str]:
    if wanted.head is None and wanted.clusters is not None and wanted.clusters in sizes:
        fitting = sizes.index(wanted.clusters)
        return fitting, f"head {fitting} of {len(sizes)}, the one with {wanted.clusters} clusters"
    # SeCu's scripts name the number of classes first and multiples of it after.
    number = clustering.choose_head(checkpoint, len(sizes), wanted, 0)[0] or 0
    usual = "the first, for which SeCu's scripts use the number of classes"
    reason = usual if wanted.head is None else "as requested"
    return number, f"head {number} of {len(sizes)} ({sizes[number]} clusters), {reason}"


def _build_cosine_head(checkpoint: Checkpoint, number: int, features: int) -> CosineHead:
    state = checkpoint.below("encoder.fc.").state
    source = f"{checkpoint.path} (projection)"
    kinds = PROJECTION if "predictor" not in clustering.top_names(checkpoint.state) else PROJECTION_IMAGENET
    projection = clustering.load_layered_head(state, kinds, features, source)
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
    names = clustering.top_names(checkpoint.state)
    return {"encoder", "center"} <= names <= PARTS
