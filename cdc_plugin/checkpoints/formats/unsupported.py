"""Heads on embeddings that another network computed: images cannot reach them, so they are named and refused."""

from cdc_plugin.checkpoints.formats._clustering import top_names
from cdc_plugin.checkpoints.formats.base import Loaded, Wanted
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields
from cdc_plugin.errors import CheckpointError, option


def refuse_temi(checkpoint: Checkpoint, _wanted: Wanted) -> Loaded:
    """Refuse the heads of TEMI."""
    arch = payload_fields(payload_fields(checkpoint.payload).get("args")).get("arch")
    network = f" ({arch})" if isinstance(arch, str) else ""
    raise CheckpointError(
        f"{checkpoint.path} holds heads of TEMI, trained on the embeddings of another network{network}, not that "
        f"network; pass the network itself, as {option('backbone', 'timm:NAME')}, and the number of clusters"
    )


def refuse_turtle(checkpoint: Checkpoint, _wanted: Wanted) -> Loaded:
    """Refuse the heads of TURTLE."""
    raise CheckpointError(
        f"{checkpoint.path} holds linear heads of TURTLE on representations of other networks, not those networks; "
        f"pass one of them, as {option('backbone', 'timm:NAME')}, and the number of clusters"
    )


def matches_temi(checkpoint: Checkpoint) -> bool:
    """Return whether these are heads with the statistics of embeddings."""
    names = top_names(checkpoint.state)
    return "head.best_head_idx" in checkpoint.state or {"embed_mean", "embed_std", "head"} <= names


def matches_turtle(checkpoint: Checkpoint) -> bool:
    """Return whether these are linear layers, one per space."""
    spaces = payload_fields(checkpoint.payload)
    return "phi1" in spaces and all(str(name).startswith("phi") for name in spaces)
