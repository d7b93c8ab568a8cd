"""The one call that turns a path into a network; the formats it asks are in the table of ``formats``."""

import logging
from dataclasses import replace
from pathlib import Path

from cdc_plugin.checkpoints.formats import formats
from cdc_plugin.checkpoints.formats.base import Loaded, Wanted
from cdc_plugin.checkpoints.read import Checkpoint, find_run, read_checkpoint
from cdc_plugin.core.torch_defaults import torch_defaults
from cdc_plugin.errors import CheckpointError, ConfigError, option
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.backbone import Backbone

BRANCHES = ("online", "momentum")
SYNONYMS = {"ema": "momentum", "teacher": "momentum", "target": "momentum", "student": "online"}
BUILT_IN = tuple(formats.entries)
DINOV2_SIZE, USUAL_SIZE = 518, 224
log = logging.getLogger(__name__)


@torch_defaults()
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
    if str(path).startswith("timm:"):
        from cdc_plugin.checkpoints.formats.timm.published import load_from_timm

        name, checkpoint, loaded = "timm", None, load_from_timm(str(path))
    else:
        if str(path).startswith("hf-hub:"):
            from cdc_plugin.checkpoints.formats.timm.published import fetch_from_hub

            path = fetch_from_hub(str(path))
        if format is not None:
            formats.get(format)  # refuse an unknown name before reading a large file
        checkpoint = read_checkpoint(find_run(path), trust)
        name = format or find_format(checkpoint, wanted.arch)
        loaded = formats.entries[name].load(checkpoint, wanted)
    stated_size = loaded.backbone.input_size if name == "native" else None
    loaded = fit_size(loaded, wanted.input_size or stated_size, checkpoint)
    if wanted.pool is not None:
        from cdc_plugin.checkpoints.pool import choose_pool

        loaded = choose_pool(loaded, wanted.pool)
    network = loaded.origin.network or describe(loaded.backbone.spec)
    clusters = tuple(int(head.clusters) for head in loaded.heads)  # type: ignore[arg-type]
    return replace(loaded, format=name, head_clusters=clusters, origin=replace(loaded.origin, network=network))


def load_backbone(
    path: str | Path,
    format: str | None = None,
    arch: str | None = None,
    *,
    branch: str | None = None,
    input_size: int | None = None,
    trust: bool = False,
) -> Backbone:
    """Return the backbone in a checkpoint, every weight accounted for; see ``load_checkpoint`` and ``Wanted``."""
    return load_checkpoint(path, format, Wanted(arch=arch, branch=branch, input_size=input_size), trust).backbone


def fit_size(loaded: Loaded, size: int | None, checkpoint: Checkpoint | None = None) -> Loaded:
    """Return a transformer for images of the size that is asked for, or of 224 px instead of DINOv2's costly 518."""
    old, dear = loaded.backbone.input_size, loaded.backbone.input_size == DINOV2_SIZE and not loaded.heads
    new = size or (USUAL_SIZE if dear else old)
    if new == old:
        return loaded
    from cdc_plugin.checkpoints.formats._vit import RESIZING, find_authors, resize_positions

    authors = find_authors(checkpoint) if checkpoint else ""
    backbone = resize_positions(loaded.backbone, new, authors)
    if backbone is None:
        return loaded
    why = f"its position embeddings, for {old} px, are resized as {authors if authors in RESIZING else 'timm'} does"
    if size is None:
        tokens, width = [(side // 14) ** 2 for side in (old, new)], 6 * backbone.feature_dim
        cost = tokens[0] * (width + tokens[0]) / (tokens[1] * (width + tokens[1]))
        why += f"; input_size={old} keeps them and costs {cost:.1f} times as much"
        log.info("images of %d px: %s", new, why)
    origin = replace(loaded.origin, why={**loaded.origin.why, "input_size": why})
    return replace(loaded, backbone=backbone, origin=origin)


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
