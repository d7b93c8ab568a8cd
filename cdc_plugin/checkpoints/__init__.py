"""From a checkpoint of any known format to a backbone."""

from cdc_plugin.checkpoints.formats.base import CheckpointFormat, Loaded, Origin, Wanted
from cdc_plugin.checkpoints.formats.native import read_native
from cdc_plugin.checkpoints.infer.batchnorm import batchnorm_mismatch
from cdc_plugin.checkpoints.infer.resolve import Resolution, infer_input
from cdc_plugin.checkpoints.load import find_format, load_backbone, load_checkpoint
from cdc_plugin.checkpoints.read import Checkpoint, read_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointFormat",
    "Loaded",
    "Origin",
    "Resolution",
    "Wanted",
    "batchnorm_mismatch",
    "find_format",
    "infer_input",
    "load_backbone",
    "load_checkpoint",
    "read_checkpoint",
    "read_native",
]
