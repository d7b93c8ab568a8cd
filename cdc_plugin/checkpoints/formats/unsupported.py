"""Heads that stand on embeddings computed elsewhere: no image can reach them, so they are named and refused."""

from __future__ import annotations

from cdc_plugin.checkpoints.formats._clustering import top_names
from cdc_plugin.checkpoints.load import CheckpointFormat, Loaded, Wanted, formats
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields
from cdc_plugin.errors import UserError


def refuse_temi(checkpoint: Checkpoint, _wanted: Wanted) -> Loaded:
    """TEMI trains heads on precomputed embeddings of a published network."""
    arch = payload_fields(payload_fields(checkpoint.payload).get("args")).get("arch")
    named = f" ({arch})" if isinstance(arch, str) else ""
    raise UserError(
        f"{checkpoint.path} holds heads of TEMI, trained on the embeddings of another network{named}, not that "
        "network; give the network itself, as --backbone timm:NAME, and the number of clusters"
    )


def refuse_turtle(checkpoint: Checkpoint, _wanted: Wanted) -> Loaded:
    """TURTLE saves a linear layer for each space of precomputed representations."""
    raise UserError(
        f"{checkpoint.path} holds linear heads of TURTLE on representations of other networks, not those networks; "
        "give one of them, as --backbone timm:NAME, and the number of clusters"
    )


def _is_temi(checkpoint: Checkpoint) -> bool:
    names = top_names(checkpoint.state)
    return "head.best_head_idx" in checkpoint.state or {"embed_mean", "embed_std", "head"} <= names


def _is_turtle(checkpoint: Checkpoint) -> bool:
    spaces = payload_fields(checkpoint.payload)
    return "phi1" in spaces and all(str(name).startswith("phi") for name in spaces)


formats.register("temi")(CheckpointFormat("temi", _is_temi, refuse_temi, rank=28))
formats.register("turtle")(CheckpointFormat("turtle", _is_turtle, refuse_turtle, rank=28))
