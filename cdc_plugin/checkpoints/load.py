"""The one call that turns a path into a network; the formats it asks are in the table of ``formats``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cdc_plugin.checkpoints.formats import formats
from cdc_plugin.checkpoints.formats.base import Loaded, Wanted, recognise
from cdc_plugin.checkpoints.read import Checkpoint, read_checkpoint
from cdc_plugin.errors import ConfigError
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

        return load_published(str(path))
    if format is not None:
        formats.get(format)  # refuse an unknown name before reading a large file
    checkpoint = read_checkpoint(path, trust)
    name = format or find_format(checkpoint, wanted.arch)
    return replace(formats.get(name).load(checkpoint, wanted), format=name)


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
    """Return the name of the first format that recognises a checkpoint: plug-ins, then the order of the table."""
    plugins = [name for name in formats.names() if name not in BUILT_IN]
    return recognise(checkpoint, arch, {name: formats.get(name) for name in (*plugins, *BUILT_IN)})
