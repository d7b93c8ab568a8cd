"""From a checkpoint of any known format to a backbone; importing this package registers the formats."""

from cdc_plugin.checkpoints import native, timm_nets, torchvision_nets  # noqa: F401  (they register themselves)
from cdc_plugin.checkpoints.formats import CheckpointFormat, find_format, formats, load_backbone
from cdc_plugin.checkpoints.native import read_native
from cdc_plugin.checkpoints.probe import Settlement, batchnorm_mismatch, settle
from cdc_plugin.checkpoints.reader import Checkpoint, read_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointFormat",
    "Settlement",
    "batchnorm_mismatch",
    "find_format",
    "formats",
    "load_backbone",
    "read_checkpoint",
    "read_native",
    "settle",
]
