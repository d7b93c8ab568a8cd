"""The contract between the loader and a format: what a format is given, and what it returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from cdc_plugin.checkpoints.read import Checkpoint
from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.models.backbone import Backbone


@dataclass(frozen=True)
class Wanted:
    """What the user asks of a checkpoint; None leaves the choice to the file."""

    arch: str | None = None
    # ``online`` or ``momentum``, the moving average (EMA, teacher, target); None: what the framework itself evaluates.
    branch: str | None = None
    head: int | None = None  # which of several clustering heads
    clusters: int | None = None  # of the head to take
    partial: bool = False  # accept a backbone although some of its weights are missing
    input_size: int | None = None  # side of the images; position embeddings are resized for it
    pool: str | None = None  # which vector is the embedding, a word of `checkpoints.pool`


@dataclass(frozen=True)
class Origin:
    """What a checkpoint states about itself, in words."""

    writer: str  # framework, version and method, as far as known: "solo-learn (mocov2plus)"
    epoch: int | None = None
    why: Mapping[str, str] = field(default_factory=dict)  # source of a fact: mean, std, input_size, stem, head, ...
    network: str = ""  # if not in the words of `describe`


@dataclass(frozen=True)
class Loaded:
    """A network read from a checkpoint; ``load_checkpoint`` sets ``format`` and ``head_clusters``."""

    backbone: Backbone
    origin: Origin
    heads: tuple[nn.Module, ...] = ()  # none, one (of another clustering method), or clustering and calibration
    matched: float = 1.0  # share of the backbone's weights that the checkpoint has; below 1 only if the user allowed it
    format: str = ""
    head_clusters: tuple[int, ...] = ()
    prototypes: Prototypes | None = None  # of the clusters, in a result of cdc-refine


@dataclass(frozen=True)
class CheckpointFormat:
    """How one framework writes its networks."""

    matches: Callable[[Checkpoint], bool]  # never raises for a foreign checkpoint
    load: Callable[[Checkpoint, Wanted], Loaded]
    knows: Callable[[str], bool] | None = None  # whether it has an architecture; None where names play no role
