"""Contrastive Clustering (CC; Li et al., 2021) and its successor TCL (2022)."""

from collections.abc import Sequence
from dataclasses import replace

from cdc_plugin.checkpoints.formats import _clustering as clustering
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields
from cdc_plugin.checkpoints.weights import build_backbone
from cdc_plugin.config.schema import INPUT_FACTS
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.heads import LayeredHead

PARTS = {"resnet", "instance_projector", "cluster_projector"}
CC_HEAD = ("linear", "relu", "linear")
TCL_HEAD = ("batchnorm", "relu", "linear", "batchnorm", "relu", "linear")
# CC never normalises, and resizes all images to one size, 224 unless set otherwise.
CC_INPUTS = tuple(
    clustering.Convention((f"{size} pixels",), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), size, clustering.CIFAR_STEM)
    for size in (224, 128, 96, 64, 32)
)
TCL_DATASETS = {
    **{"CIFAR-10": clustering.CIFAR10, "CIFAR-100": clustering.CIFAR20},
    **{"ImageNet-10": clustering.IMAGENET, "ImageNet": clustering.IMAGENET},
}


def load_cc(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return backbone and cluster projector of Contrastive Clustering."""
    clustering.refuse_branch(wanted, checkpoint)
    backbone, matched, why = clustering.load_resnet(
        checkpoint, wanted, "CC", "resnet.", CC_INPUTS, CC_INPUTS, known=("mean", "std")
    )
    if clustering.is_small_stem(backbone.spec or {}):  # not CC's own, so its details are open
        backbone.inferred += ("stem.pool", "stem.padding")
    why |= dict.fromkeys(("mean", "std"), "CC does not normalise")
    head = _load_projector(checkpoint, wanted, CC_HEAD, backbone.feature_dim)
    return Loaded(backbone, Origin("CC", clustering.read_epoch(checkpoint), why), (head,), matched)


def load_tcl(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the backbone, including the linear layer that ends TCL's, and the cluster projector."""
    clustering.refuse_branch(wanted, checkpoint)
    inner = clustering.rename_to_torchvision(checkpoint, "resnet.")
    resnet = clustering.resnet_shape(inner, wanted, "TCL")
    spec = {"family": "resnet_linear", "name": describe(resnet), "resnet": resnet}
    layer = {key: value for key, value in checkpoint.below("resnet.").state.items() if key.startswith("fc.")}
    dataset = payload_fields(payload_fields(checkpoint.payload).get("args")).get("dataset")
    stated = TCL_DATASETS.get(dataset) if isinstance(dataset, str) else None
    clusters = clustering.count_rows(checkpoint.state, "cluster_projector.5.weight")
    candidates = (stated,) if stated else (*clustering.find_cifar(clusters), clustering.IMAGENET)
    # TCL enlarges small images.
    choice = clustering.choose_convention("TCL", [replace(c, size=224) for c in candidates], resnet, inner)
    fed, why, inferred = choice.fed, choice.why, choice.inferred
    if stated:
        why, inferred = dict.fromkeys(INPUT_FACTS, f"TCL's for {dataset}, which the run states"), ()
    facts = (str(checkpoint.path), fed.mean, fed.std, fed.size, inferred, wanted.partial)
    backbone, matched = build_backbone(spec, inner.state | layer, *facts)
    head = _load_projector(checkpoint, wanted, TCL_HEAD, backbone.feature_dim)
    return Loaded(backbone, Origin("TCL", clustering.read_epoch(checkpoint), why), (head,), matched)


def matches_cc(checkpoint: Checkpoint) -> bool:
    """Return whether these are CC's parts, without TCL's last layer."""
    names = clustering.top_names(checkpoint.state)
    return "resnet" in names and len(names) > 1 and names <= PARTS and not _has_last_layer(checkpoint)


def matches_tcl(checkpoint: Checkpoint) -> bool:
    """Return whether these are CC's parts with TCL's last layer."""
    names = clustering.top_names(checkpoint.state)
    return len(names) > 1 and names <= PARTS and _has_last_layer(checkpoint)


def _has_last_layer(checkpoint: Checkpoint) -> bool:
    return any(key.startswith("resnet.fc.") for key in checkpoint.state)


def _load_projector(checkpoint: Checkpoint, wanted: Wanted, kinds: Sequence[str], features: int) -> LayeredHead:
    clustering.choose_head(checkpoint, 1, wanted)
    state = checkpoint.below("cluster_projector.").state
    return clustering.load_layered_head(state, kinds, features, f"{checkpoint.path} (cluster projector)")
