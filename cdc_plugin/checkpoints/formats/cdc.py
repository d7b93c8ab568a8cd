"""Files of the code that CDC's authors released: clustering network in ``model``, calibration head in ``cali_mlp``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from cdc_plugin.checkpoints.formats._clustering import (
    CIFAR10,
    CIFAR_STEM,
    IMAGENET,
    TINY_IMAGENET,
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
from cdc_plugin.checkpoints.read import Checkpoint, check_finite, find_state_dict, payload_fields, strip_prefix
from cdc_plugin.errors import CheckpointError
from cdc_plugin.models.architectures import describe

MLP = ("linear", "batchnorm", "relu", "linear")
# Its settings give these two data sets other statistics than SCAN's.
CIFAR20 = Convention(("CIFAR-20", "CIFAR-100"), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), 32, CIFAR_STEM)
STL10 = Convention(("STL-10",), (0.4914, 0.4823, 0.4466), (0.247, 0.243, 0.261), 96)


def load_cdc(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return backbone, clustering head and, where it was saved, calibration head."""
    refuse_branch(wanted, checkpoint)
    inner = rename_to_torchvision(checkpoint, "backbone.")
    spec = resnet_shape(inner, wanted, "CDC")
    source = str(checkpoint.path)
    count = len({key.split(".")[1] for key in checkpoint.state if key.startswith("cluster_head.")})
    # The released code trains and evaluates its first head, whatever their number.
    number, reason = choose_head(count, wanted, 0, checkpoint.path)
    features = 4 * spec["widths"][3] if spec["block"] == "bottleneck" else spec["widths"][3]
    clustering = load_layered_head(
        checkpoint.below(f"cluster_head.{number}.").state, MLP, features, f"{source} (clustering head)"
    )
    heads: tuple[nn.Module, ...] = (clustering,)
    saved = payload_fields(checkpoint.payload).get("cali_mlp")
    if saved is not None:
        state = strip_prefix(find_state_dict(saved, source), "calibration_head.")
        check_finite(state, source)
        calibration = load_layered_head(state, MLP, features, f"{source} (calibration head)")
        if calibration.clusters != clustering.clusters:
            raise CheckpointError(
                f"{source} has heads of {clustering.clusters} and {calibration.clusters} clusters; copy it again"
            )
        heads = (clustering, calibration)
        reason = "clustering and calibration head"
    candidates = _find_data_sets(clustering.clusters, is_small_stem(spec))
    choice = choose_convention("CDC", candidates, spec, inner)
    backbone, matched = load_resnet(inner, wanted, choice)
    why = choice.why | {"head": reason}
    return Loaded(
        backbone, Origin("CDC (released code)", describe(choice.spec), read_epoch(checkpoint), why), heads, matched
    )


def _find_data_sets(clusters: int, small: bool) -> Sequence[Convention]:
    if small:
        return {10: (CIFAR10,), 20: (CIFAR20,), 100: (CIFAR20,)}.get(clusters, (CIFAR10, CIFAR20))
    return {10: (STL10, IMAGENET), 15: (IMAGENET,), 200: (TINY_IMAGENET,)}.get(
        clusters, (IMAGENET, STL10, TINY_IMAGENET)
    )


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether this is a backbone with clustering heads of several layers."""
    names = top_names(checkpoint.state)
    return names == {"backbone", "cluster_head"} and any(
        key.startswith("cluster_head.0.0.") for key in checkpoint.state
    )
