"""TURTLE (Gadetsky et al., 2024): one linear layer for each of several spaces of embeddings side by side."""

import torch
from torch import Tensor

from cdc_plugin.checkpoints.formats.base import Loaded, Origin, Wanted
from cdc_plugin.checkpoints.read import Checkpoint, payload_fields
from cdc_plugin.checkpoints.weights import load_strictly
from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.heads import MixtureHead

MOST_SPACES = 8


def load_turtle(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the spaces, as they are, as the backbone, and the layers as one head with the mean of their chances."""
    source, parts = str(checkpoint.path), list(payload_fields(checkpoint.payload).values())
    given = {name: value for name, value in (("arch", wanted.arch), ("branch", wanted.branch)) if value is not None}
    for name, value in given.items():
        raise CheckpointError(f"{source} states its own layers; leave out {option(name, value)}")
    weights: dict[str, Tensor] = {}
    sizes: list[tuple[int, ...]] = []
    for number, part in enumerate(map(payload_fields, parts)):
        values = [part.get(name) for name in ("weight", "bias")]
        if part.keys() != {"weight", "bias"} or not all(isinstance(value, Tensor) for value in values):
            raise CheckpointError(f"{source}: expected weight and bias of each space, found {', '.join(part)[:80]}")
        weights |= {f"parts.{number}.{name}": value for name, value in part.items()}
        sizes.append(tuple(part["weight"].shape))
    if len(parts) > MOST_SPACES or any(len(size) != 2 or size[0] != sizes[0][0] for size in sizes):
        raise CheckpointError(
            f"{source}: expected linear layers of as many clusters for at most {MOST_SPACES} spaces; found {sizes[:8]}"
        )
    spaces, clusters = [size[1] for size in sizes], sizes[0][0]
    with torch.device("meta"):  # without memory first
        load_strictly(MixtureHead(spaces, clusters), {key: each.to("meta") for key, each in weights.items()}, source)
    head, spec = MixtureHead(spaces, clusters), {"family": "features", "spaces": spaces}
    load_strictly(head, weights, source)
    scaler, width = build(spec)
    why = {"head": "the mean of the layers of all spaces", "features": "embeddings of other networks, in their order"}
    return Loaded(Backbone(scaler, width, [0.0] * 3, [1.0] * 3, 1, spec), Origin("TURTLE", why=why), (head,))


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether these are linear layers, one per space."""
    spaces = payload_fields(checkpoint.payload)
    return "phi1" in spaces and all(str(name).startswith("phi") for name in spaces)
