"""Checkpoint formats by name, and the one call that turns a path into a network.

A new format is a module that registers a ``CheckpointFormat``; ``load_checkpoint`` needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from cdc_plugin.checkpoints.read import Checkpoint, read_checkpoint
from cdc_plugin.core.registry import Registry
from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone


@dataclass(frozen=True)
class Wanted:
    """What the user says of a checkpoint; None where the file shall tell.

    Args:
        arch: name of the network.
        branch: ``online`` or ``momentum``, where a file holds a network and its moving average (also called
            EMA, teacher or target); None: the one that the framework itself evaluates.
        head: which of several clustering heads.
        clusters: number of clusters of the head that is meant.
        partial: take a backbone although some of its weights are missing.
    """

    arch: str | None = None
    branch: str | None = None
    head: int | None = None
    clusters: int | None = None
    partial: bool = False


@dataclass(frozen=True)
class Origin:
    """What a checkpoint says of itself, for people.

    Args:
        writer: framework, version and method, as far as known: "solo-learn (mocov2plus)".
        network: the network in words: "resnet18, 3x3 stem with padding 2, no max-pool".
        epoch: epochs trained.
        why: where a fact comes from, by name (mean, std, input_size, stem, head, branch, ...).
    """

    writer: str
    network: str = ""
    epoch: int | None = None
    why: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """A network out of a checkpoint.

    Args:
        heads: none, one (an old clustering model's), or two (clustering and calibration).
        matched: share of the backbone's weights that the checkpoint gave; below 1 only if the user allowed it.
        format: name of the format that read it.
    """

    backbone: Backbone
    origin: Origin
    heads: tuple[nn.Module, ...] = ()
    matched: float = 1.0
    format: str = ""


def _any_arch(_arch: str) -> bool:
    return True


@dataclass(frozen=True)
class CheckpointFormat:
    """How one framework writes its networks.

    Args:
        name: what the user types to force it.
        matches: whether a checkpoint is of this format; never raises for a foreign one.
        load: the network inside.
        rank: formats are asked in rising rank, unmistakable marks before mere plausibility.
        knows: whether an architecture name means something to the format.
    """

    name: str
    matches: Callable[[Checkpoint], bool]
    load: Callable[[Checkpoint, Wanted], Loaded]
    rank: int = 30
    knows: Callable[[str], bool] = _any_arch


formats: Registry[CheckpointFormat] = Registry("checkpoint format")
BRANCHES = ("online", "momentum")
SYNONYMS = {"ema": "momentum", "teacher": "momentum", "target": "momentum", "student": "online"}
# Formats of weights without a frame around them; the others look inside theirs with ``load_bare``.
BARE = ("timm", "torchvision")


def load_checkpoint(
    path: str | Path, format: str | None = None, wanted: Wanted | None = None, trust: bool = False
) -> Loaded:
    """The network in a checkpoint with all that is known of it, every weight accounted for.

    Args:
        path: a checkpoint file, a run folder, ``timm:NAME`` or ``hf-hub:NAME`` for published weights.
        format: one of ``formats.names()``; found from the content when left out.
        trust: open pickled modules, which runs the code they name.
    """
    wanted = wanted or Wanted()
    if wanted.branch is not None:
        wanted = replace(wanted, branch=SYNONYMS.get(wanted.branch, wanted.branch))
    if wanted.branch not in (None, *BRANCHES):
        raise UserError(f"branch is one of {', '.join(BRANCHES)}; found {wanted.branch!r}")
    if str(path).startswith(("timm:", "hf-hub:")):
        from cdc_plugin.checkpoints.formats.timm import published

        return published(str(path))
    chosen = formats.get(format) if format is not None else None
    checkpoint = read_checkpoint(path, trust)
    chosen = chosen or find_format(checkpoint, wanted.arch)
    return replace(chosen.load(checkpoint, wanted), format=chosen.name)


def load_backbone(
    path: str | Path,
    format: str | None = None,
    arch: str | None = None,
    *,
    branch: str | None = None,
    trust: bool = False,
) -> Backbone:
    """The backbone in a checkpoint, every weight accounted for; see ``load_checkpoint`` and ``Wanted``."""
    return load_checkpoint(path, format, Wanted(arch=arch, branch=branch), trust).backbone


def load_bare(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """The backbone whose names and shapes are those of ``checkpoint.state``, told by them alone."""
    return find_format(checkpoint, wanted.arch, BARE).load(checkpoint, wanted)


def find_format(checkpoint: Checkpoint, arch: str | None = None, among: tuple[str, ...] = ()) -> CheckpointFormat:
    """The first format, by rank, that recognises the checkpoint and the architecture's name."""
    known = sorted((formats.get(name) for name in among or formats.names()), key=lambda entry: entry.rank)
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
