"""The bare weights of a network, as they lie inside files of other formats."""

from __future__ import annotations

from cdc_plugin.checkpoints.formats.base import Loaded, Wanted, recognise
from cdc_plugin.checkpoints.formats.timm import TIMM
from cdc_plugin.checkpoints.formats.torchvision import TORCHVISION
from cdc_plugin.checkpoints.read import Checkpoint

BARE = {"timm": TIMM, "torchvision": TORCHVISION}


def load_bare(checkpoint: Checkpoint, wanted: Wanted) -> Loaded:
    """Return the backbone that the names and shapes of ``checkpoint.state`` belong to."""
    return BARE[recognise(checkpoint, wanted.arch, BARE)].load(checkpoint, wanted)
