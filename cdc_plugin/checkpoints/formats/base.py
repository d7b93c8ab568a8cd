"""The contract between the loader and a format: what a format is given, and what it returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from cdc_plugin.checkpoints.read import Checkpoint
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
        epoch: number of epochs trained.
        why: where a fact comes from, by name (mean, std, input_size, stem, head, branch, ...).
        network: the network in words, if not those of `describe`.
    """

    writer: str
    epoch: int | None = None
    why: Mapping[str, str] = field(default_factory=dict)
    network: str = ""


@dataclass(frozen=True)
class Loaded:
    """A network read from a checkpoint.

    Args:
        heads: none, one (of another clustering method), or two (clustering and calibration).
        matched: share of the backbone's weights that the checkpoint has; below 1 only if the user allowed it.
        format, head_clusters: set by ``load_checkpoint``: the format that read it, the number of clusters of each head.
    """

    backbone: Backbone
    origin: Origin
    heads: tuple[nn.Module, ...] = ()
    matched: float = 1.0
    format: str = ""
    head_clusters: tuple[int, ...] = ()


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
