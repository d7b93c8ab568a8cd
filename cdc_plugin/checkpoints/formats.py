"""Checkpoint formats by name, and the one call that turns a path into a backbone.

A new format is a module that registers a ``CheckpointFormat``; ``load_backbone`` needs no change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cdc_plugin.checkpoints.reader import Checkpoint, read_checkpoint
from cdc_plugin.errors import UserError
from cdc_plugin.model import Backbone
from cdc_plugin.registry import Registry


def _any_arch(_arch: str) -> bool:
    return True


@dataclass(frozen=True)
class CheckpointFormat:
    """How one framework writes its networks.

    Args:
        name: what the user types to force it.
        matches: whether a checkpoint is of this format; never raises for a foreign one.
        load: the backbone inside, given the architecture the user named, if any.
        rank: formats are asked in rising rank, unmistakable marks before mere plausibility.
        knows: whether an architecture name means something to the format.
    """

    name: str
    matches: Callable[[Checkpoint], bool]
    load: Callable[[Checkpoint, str | None], Backbone]
    rank: int = 30
    knows: Callable[[str], bool] = _any_arch


formats: Registry[CheckpointFormat] = Registry("checkpoint format")


def load_backbone(path: str | Path, format: str | None = None, arch: str | None = None) -> Backbone:
    """The backbone in a checkpoint, every weight accounted for.

    Args:
        path: a checkpoint file, a result folder, or ``timm:NAME`` for timm's own pretrained weights.
        format: one of ``formats.names()``; found from the content when left out.
        arch: architecture, where the checkpoint does not tell.
    """
    if str(path).startswith("timm:"):
        from cdc_plugin.checkpoints.timm_nets import pretrained_backbone

        return pretrained_backbone(str(path).removeprefix("timm:"))
    chosen = formats.get(format) if format is not None else None
    checkpoint = read_checkpoint(path)
    return (chosen or find_format(checkpoint, arch)).load(checkpoint, arch)


def find_format(checkpoint: Checkpoint, arch: str | None = None) -> CheckpointFormat:
    """The first format, by rank, that recognises the checkpoint and the architecture's name."""
    known = sorted((formats.get(name) for name in formats.names()), key=lambda entry: entry.rank)
    for entry in known:
        if entry.matches(checkpoint) and (arch is None or entry.knows(arch)):
            return entry
    if arch is not None:
        named = [entry for entry in known if entry.knows is not _any_arch and entry.knows(arch)]
        if named:
            return named[0]
        raise UserError(f"neither torchvision nor timm has an architecture {arch!r}; check --arch")
    sample = ", ".join(list(checkpoint.state)[:4])
    raise UserError(
        f"cannot tell the network of {checkpoint.path} from its {len(checkpoint.state)} weights ({sample}); "
        f"pass --arch NAME (a torchvision or timm name) or --format, one of {', '.join(formats.names())}"
    )
