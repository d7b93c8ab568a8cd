"""SCAN (Van Gansbeke et al., 2020): pretext networks, clustering networks with their heads, self-labelled ones.

NNM and other methods built on its code use the same names.
"""

from __future__ import annotations

from torch import nn

from cdc_plugin.checkpoints.formats._clustering import (
    IMAGENET,
    STL10,
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
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, whole_number
from cdc_plugin.errors import CheckpointError
from cdc_plugin.models.architectures import describe

PARTS = {"backbone", "contrastive_head", "cluster_head"}


def load_scan(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the backbone and, after SCAN's second and third stage, its best linear clustering head."""
    refuse_branch(wanted, checkpoint)
    inner = rename_to_torchvision(checkpoint, "backbone.")
    spec = resnet_shape(inner, wanted, "SCAN")
    sizes = _head_sizes(checkpoint)
    candidates = (*find_cifar(sizes[0] if sizes else None), STL10) if is_small_stem(spec) else (IMAGENET,)
    choice = choose_for_shortcuts("SCAN", candidates, spec, checkpoint, "backbone.")
    why = choice.why
    backbone, matched = load_resnet(inner, wanted, choice)
    heads: tuple[nn.Module, ...] = ()
    if sizes:
        payload = payload_fields(checkpoint.payload)
        stated = whole_number(payload.get("head", payload.get("best_loss_head")))
        number, why["head"] = choose_head(len(sizes), wanted, stated, checkpoint.path)
        if number is not None:
            state = {f"0.{key}": value for key, value in checkpoint.below(f"cluster_head.{number}.").state.items()}
            heads = (load_layered_head(state, ["linear"], backbone.feature_dim, f"{checkpoint.path} (head {number})"),)
    stage = "clustering" if sizes else "pretext"
    return Loaded(
        backbone, Origin(f"SCAN ({stage})", describe(choice.spec), read_epoch(checkpoint), why), heads, matched
    )


def _head_sizes(checkpoint: Checkpoint) -> list[int]:
    """Return the number of clusters of each head, in their order."""
    state = checkpoint.below("cluster_head.").state
    count = len({key.split(".")[0] for key in state})
    weights = [state.get(f"{number}.weight") for number in range(count)]
    if any(weight is None or weight.ndim != 2 for weight in weights):
        raise CheckpointError(f"{checkpoint.path} has {count} clustering heads, some of them incomplete; copy it again")
    return [len(weight) for weight in weights if weight is not None]


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether this is a backbone with linear clustering heads or a contrastive head, and nothing else."""
    names = top_names(checkpoint.state)
    linear = all(key.count(".") == 2 for key in checkpoint.state if key.startswith("cluster_head."))
    return "backbone" in names and len(names) > 1 and names <= PARTS and linear
