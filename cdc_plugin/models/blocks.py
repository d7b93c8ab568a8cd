"""Train the last blocks of a large network alone, and recompute its blocks in the backward pass to save memory."""

import re
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cdc_plugin.errors import ConfigError

# How timm, torchvision and those after them name what is repeated: blocks.11, layer3.1, stages.2.blocks.5, features.4.
BLOCK = re.compile(
    r"(?:.*?\.)??(?:(?:blocks|layers|stages|features|encoder_layer)[._]\d+|layer\d|s\d)(?:(?:\.blocks)?\.b?\d+)?\."
)


def train_last_blocks(network: nn.Module, count: int) -> None:
    """Let nothing of a network change but its last blocks and what follows them."""
    names = [name for name, _ in network.named_parameters()]
    blocks = list(dict.fromkeys(found[0] for found in map(BLOCK.match, names) if found))
    if not blocks:
        raise ConfigError("train_blocks: this network has no blocks under known names; freeze it, or train all of it")
    if count > len(blocks):
        raise ConfigError(f"train_blocks is at most {len(blocks)}, the blocks of this network; found {count}")
    first = next(place for place, name in enumerate(names) if name.startswith(blocks[-count]))
    for place, parameter in enumerate(network.parameters()):
        parameter.requires_grad_(place >= first)


def find_unchanged(network: nn.Module) -> list[nn.Module]:
    """Return the parts of a network that have weights, none of which training may change."""
    parts = ((part, list(part.parameters())) for part in network.modules())
    return [part for part, weights in parts if weights and not any(weight.requires_grad for weight in weights)]


def recompute_blocks(network: nn.Module) -> None:
    """Let a network of timm forget what its blocks computed until the backward pass needs it."""
    able: Any = next((part for part in network.modules() if hasattr(part, "set_grad_checkpointing")), None)
    if able is None or any(isinstance(part, _BatchNorm) for part in network.modules()):
        reason = "its BatchNorm layers would see all images twice" if able else "it is none of timm's"
        raise ConfigError(f"recompute_blocks does not suit this network, as {reason}; leave it out")
    able.set_grad_checkpointing()
