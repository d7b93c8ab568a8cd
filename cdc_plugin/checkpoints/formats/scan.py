"""SCAN (Van Gansbeke et al., 2020): pretext networks, clustering networks with their heads, self-labelled ones.

NNM and others that started from its code write the same names.
"""

from __future__ import annotations

from torch import nn

from cdc_plugin.checkpoints.formats._clustering import (
    IMAGENET,
    STL10,
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
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, whole_number
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import describe

PARTS = {"backbone", "contrastive_head", "cluster_head"}


def load_scan(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Backbone and, after SCAN's second and third stage, the linear clustering head that did best."""
    refuse_branch(wanted, checkpoint)
    inner = torchvision_names(checkpoint, "backbone.")
    spec = resnet_shape(inner, wanted, "SCAN")
    sizes = _head_sizes(checkpoint)
    candidates = (*cifar_by_clusters(sizes[0] if sizes else None), STL10) if is_small_stem(spec) else (IMAGENET,)
    choice = choose_for_shortcuts("SCAN", candidates, spec, checkpoint, "backbone.")
    why = choice.why
    backbone, matched = load_resnet(inner, wanted, choice)
    heads: tuple[nn.Module, ...] = ()
    if sizes:
        payload = payload_fields(checkpoint.payload)
        stated = whole_number(payload.get("head", payload.get("best_loss_head")))
        number, why["head"] = head_number(len(sizes), wanted, stated, checkpoint.path)
        if number is not None:
            state = {f"0.{key}": value for key, value in checkpoint.below(f"cluster_head.{number}.").state.items()}
            heads = (layered_head(state, ["linear"], backbone.feature_dim, f"{checkpoint.path} (head {number})"),)
    stage = "clustering" if sizes else "pretext"
    return Loaded(
        backbone, Origin(f"SCAN ({stage})", describe(choice.spec), stated_epoch(checkpoint), why), heads, matched
    )


def _head_sizes(checkpoint: Checkpoint) -> list[int]:
    """Number of clusters of each head, in their order."""
    state = checkpoint.below("cluster_head.").state
    count = len({key.split(".")[0] for key in state})
    weights = [state.get(f"{number}.weight") for number in range(count)]
    if any(weight is None or weight.ndim != 2 for weight in weights):
        raise UserError(f"{checkpoint.path} has {count} clustering heads, not all of them whole; copy it again")
    return [len(weight) for weight in weights if weight is not None]


def _matches(checkpoint: Checkpoint) -> bool:
    names = top_names(checkpoint.state)
    linear = all(key.count(".") == 2 for key in checkpoint.state if key.startswith("cluster_head."))
    return "backbone" in names and len(names) > 1 and names <= PARTS and linear


formats.register("scan")(CheckpointFormat("scan", _matches, load_scan, rank=22))
