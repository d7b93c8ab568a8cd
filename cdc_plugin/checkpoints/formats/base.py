"""The contract between the loader and a format: what a format is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from cdc_plugin.checkpoints.read import Checkpoint
from cdc_plugin.errors import CheckpointError, option
from cdc_plugin.models.backbone import Backbone


@dataclass(frozen=True)
class Wanted:
    """What the user asks of a checkpoint; None leaves the choice to the file.

    Args:
        arch: name of the network.
        branch: ``online`` or ``momentum``, where a file holds a network and its moving average (also called
            EMA, teacher or target); None: the one that the framework itself evaluates.
        head: which of several clustering heads.
        clusters: number of clusters of the head to take.
        partial: accept a backbone although some of its weights are missing.
    """

    arch: str | None = None
    branch: str | None = None
    head: int | None = None
    clusters: int | None = None
    partial: bool = False


@dataclass(frozen=True)
class Origin:
    """What a checkpoint states about itself, in words.

    Args:
        writer: framework, version and method, as far as known: "solo-learn (mocov2plus)".
        network: the network in words: "resnet18, 3x3 stem with padding 2, no max-pool".
        epoch: number of epochs trained.
        why: where a fact comes from, by name (mean, std, input_size, stem, head, branch, ...).
    """

    writer: str
    network: str = ""
    epoch: int | None = None
    why: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """A network read from a checkpoint.

    Args:
        heads: none, one (of another clustering method), or two (clustering and calibration).
        matched: share of the backbone's weights that the checkpoint has; below 1 only if the user allowed it.
        format: name of the format that read it.
    """

    backbone: Backbone
    origin: Origin
    heads: tuple[nn.Module, ...] = ()
    matched: float = 1.0
    format: str = ""

    @property
    def head_clusters(self) -> tuple[int, ...]:
        """For every head, how many clusters it has."""
        return tuple(int(head.clusters) for head in self.heads)  # type: ignore[arg-type]


@dataclass(frozen=True)
class CheckpointFormat:
    """How one framework writes its networks.

    Args:
        matches: whether a checkpoint is of this format; never raises for a foreign one.
        load: build the network inside.
        knows: whether an architecture name belongs to the format; None where names play no role.
    """

    matches: Callable[[Checkpoint], bool]
    load: Callable[[Checkpoint, Wanted], Loaded]
    knows: Callable[[str], bool] | None = None


def recognise(checkpoint: Checkpoint, arch: str | None, candidates: Mapping[str, CheckpointFormat]) -> str:
    """Return the name of the first candidate that recognises the checkpoint and the architecture's name."""
    for name, entry in candidates.items():
        if entry.matches(checkpoint) and (arch is None or entry.knows is None or entry.knows(arch)):
            return name
    if arch is not None:
        for name, entry in candidates.items():
            if entry.knows is not None and entry.knows(arch):
                return name
        raise CheckpointError(f"neither torchvision nor timm has an architecture {arch!r}; check the name")
    sample = ", ".join(list(checkpoint.state)[:4])
    raise CheckpointError(
        f"cannot recognise the network of {checkpoint.path} by its {len(checkpoint.state)} weights ({sample}); "
        f"pass {option('arch', 'NAME')} (a torchvision or timm name) or {option('format', 'FORMAT')}, one of "
        f"{', '.join(sorted(candidates))}"
    )
