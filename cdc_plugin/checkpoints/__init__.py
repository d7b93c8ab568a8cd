"""From a checkpoint of any known format to a backbone."""

from cdc_plugin.checkpoints.formats.base import CheckpointFormat, Loaded, Origin, Wanted
from cdc_plugin.checkpoints.infer.resolve import infer_input
from cdc_plugin.checkpoints.load import load_backbone, load_checkpoint
from cdc_plugin.checkpoints.read import Checkpoint, read_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointFormat",
    "Loaded",
    "Origin",
    "Wanted",
    "infer_input",
    "load_backbone",
    "load_checkpoint",
    "read_checkpoint",
]
