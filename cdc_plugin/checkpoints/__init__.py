"""From a checkpoint of any known format to a backbone; importing this package registers the formats."""

from cdc_plugin.checkpoints import (  # noqa: F401  (they register themselves)
    cdc_released,
    clustering_nets,
    contrastive,
    lightly_nets,
    lightly_train,
    native,
    refusals,
    scan,
    secu,
    solo_learn,
    spice,
    timm_nets,
    torchvision_nets,
)
from cdc_plugin.checkpoints.formats import (
    CheckpointFormat,
    Loaded,
    Origin,
    Wanted,
    find_format,
    formats,
    load_backbone,
    load_checkpoint,
)
from cdc_plugin.checkpoints.native import read_native
from cdc_plugin.checkpoints.probe import Settlement, batchnorm_mismatch, settle
from cdc_plugin.checkpoints.reader import Checkpoint, read_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointFormat",
    "Loaded",
    "Origin",
    "Settlement",
    "Wanted",
    "batchnorm_mismatch",
    "find_format",
    "formats",
    "load_backbone",
    "load_checkpoint",
    "read_checkpoint",
    "read_native",
    "settle",
]
