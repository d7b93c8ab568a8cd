"""The one call that turns a path into a network; the formats it asks are in the table of ``formats``."""

from dataclasses import replace
from pathlib import Path

from cdc_plugin.checkpoints.formats import formats
from cdc_plugin.checkpoints.formats.base import Loaded, Wanted
from cdc_plugin.checkpoints.read import Checkpoint, read_checkpoint
from cdc_plugin.errors import CheckpointError, ConfigError, option
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.backbone import Backbone

BRANCHES = ("online", "momentum")
SYNONYMS = {"ema": "momentum", "teacher": "momentum", "target": "momentum", "student": "online"}
BUILT_IN = tuple(formats.entries)


def load_checkpoint(
    path: str | Path, format: str | None = None, wanted: Wanted | None = None, trust: bool = False
) -> Loaded:
    """Return the network in a checkpoint with all that is known about it, every weight accounted for.

    Args:
        path: a checkpoint file, a run folder, ``timm:NAME`` or ``hf-hub:NAME`` for published weights.
        format: one of ``formats.names()``; recognised by the content when left out.
        trust: open pickled modules, which runs the code they name.
    """
    wanted = wanted or Wanted()
    if wanted.branch is not None:
        wanted = replace(wanted, branch=SYNONYMS.get(wanted.branch, wanted.branch))
    if wanted.branch not in (None, *BRANCHES):
        raise ConfigError(f"branch is one of {', '.join(BRANCHES)}; found {wanted.branch!r}")
    if str(path).startswith(("timm:", "hf-hub:")):
        from cdc_plugin.checkpoints.formats.timm import load_published

        name, loaded = "timm", load_published(str(path))
    else:
        if format is not None:
            formats.get(format)  # refuse an unknown name before reading a large file
        checkpoint = read_checkpoint(path, trust)
        name = format or find_format(checkpoint, wanted.arch)
        loaded = formats.entries[name].load(checkpoint, wanted)
    network = loaded.origin.network or describe(loaded.backbone.spec)
    clusters = tuple(int(head.clusters) for head in loaded.heads)  # type: ignore[arg-type]
    return replace(loaded, format=name, head_clusters=clusters, origin=replace(loaded.origin, network=network))


def load_backbone(
    path: str | Path,
    format: str | None = None,
    arch: str | None = None,
    *,
    branch: str | None = None,
    trust: bool = False,
) -> Backbone:
    """Return the backbone in a checkpoint, every weight accounted for; see ``load_checkpoint`` and ``Wanted``."""
    return load_checkpoint(path, format, Wanted(arch=arch, branch=branch), trust).backbone


def find_format(checkpoint: Checkpoint, arch: str | None = None) -> str:
    """Return the first format that recognises a checkpoint and an architecture: plug-ins, then the table's order."""
    plugins = [name for name in formats.names() if name not in BUILT_IN]
    candidates = {name: formats.entries[name] for name in (*plugins, *BUILT_IN)}
    knowing = [name for name, entry in candidates.items() if arch and entry.knows and entry.knows(arch)]
    for name, entry in candidates.items():
        if (arch is None or entry.knows is None or name in knowing) and entry.matches(checkpoint):
            return name
    if knowing:
        return knowing[0]
    if arch is not None:
        raise CheckpointError(f"neither torchvision nor timm has an architecture {arch!r}; check the name")
    sample = ", ".join(list(checkpoint.state)[:4])
    raise CheckpointError(
        f"cannot recognise the network of {checkpoint.path} by its {len(checkpoint.state)} weights ({sample}); "
        f"pass {option('arch', 'NAME')} (a torchvision or timm name) or {option('format', 'FORMAT')}, one of "
        f"{', '.join(sorted(candidates))}"
    )
