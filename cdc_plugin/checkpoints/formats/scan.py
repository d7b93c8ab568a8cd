"""SCAN (Van Gansbeke et al., 2020), all three stages, and methods built on its code, as NNM."""

from torch import nn

from cdc_plugin.checkpoints.formats import _clustering as clustering
from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields, whole_number
from cdc_plugin.errors import CheckpointError

PARTS = {"backbone", "contrastive_head", "cluster_head"}


def load_scan(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the backbone and, after SCAN's second and third stage, its best linear clustering head."""
    clustering.refuse_branch(wanted, checkpoint)
    sizes = _head_sizes(checkpoint)
    small = (*clustering.find_cifar(sizes[0] if sizes else None), clustering.STL10)
    backbone, matched, why = clustering.load_resnet(checkpoint, wanted, "SCAN", "backbone.", small, shortcuts=True)
    heads: tuple[nn.Module, ...] = ()
    if sizes:
        payload = payload_fields(checkpoint.payload)
        stated = whole_number(payload.get("head", payload.get("best_loss_head")))
        number, why["head"] = clustering.choose_head(checkpoint, len(sizes), wanted, stated)
        if number is not None:
            state = checkpoint.below(f"cluster_head.{number}.").state
            heads = (clustering.load_linear(state, backbone.feature_dim, f"{checkpoint.path} (head {number})"),)
    writer = f"SCAN ({'clustering' if sizes else 'pretext'})"
    return Loaded(backbone, Origin(writer, clustering.read_epoch(checkpoint), why), heads, matched)


def _head_sizes(checkpoint: Checkpoint) -> list[int]:
    state = checkpoint.below("cluster_head.").state
    count = len({key.split(".")[0] for key in state})
    weights = [state[name] for name in (f"{number}.weight" for number in range(count)) if name in state]
    if len(weights) < count or any(weight.ndim != 2 for weight in weights):
        raise CheckpointError(f"{checkpoint.path} has {count} clustering heads, some of them incomplete; copy it again")
    return [len(weight) for weight in weights]


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether this is a backbone with linear clustering heads or a contrastive head, and nothing else."""
    names = clustering.top_names(checkpoint.state)
    linear = all(key.count(".") == 2 for key in checkpoint.state if key.startswith("cluster_head."))
    return "backbone" in names and len(names) > 1 and names <= PARTS and linear
