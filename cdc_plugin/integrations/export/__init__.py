"""Write a refined network so that other libraries load it; every export is read back and compared first."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from cdc_plugin.core.torch_defaults import torch_defaults
from cdc_plugin.errors import ConfigError
from cdc_plugin.integrations.export.base import Export, Source, open_source
from cdc_plugin.integrations.export.hub import export_hub
from cdc_plugin.integrations.export.onnx import export_onnx
from cdc_plugin.integrations.export.solo_learn import export_solo_learn
from cdc_plugin.integrations.export.timm import export_timm
from cdc_plugin.integrations.export.torchvision import export_torchvision
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer

__all__ = ["TARGETS", "Export", "export_model"]

TARGETS: Mapping[str, Callable[[Source, Path, bool], Export]] = {
    "solo-learn": export_solo_learn,
    "timm": export_timm,
    "torchvision": export_torchvision,
    "onnx": export_onnx,
    "hub": export_hub,
}


@torch_defaults()
def export_model(
    model: str | Path | Clusterer | Backbone,
    to: str,
    out: str | Path,
    overwrite: bool = False,
    format: str | None = None,
    arch: str | None = None,
) -> Export:
    """Write a model for another library, one of ``TARGETS``, and return what was written.

    Args:
        model: result folder, checkpoint, or a model in memory, which may be of your own class.
        out: a folder for solo-learn, timm and hub, a file for torchvision (``.pth``) and onnx (``.onnx``).
        overwrite: replace the files of an earlier export.
        format, arch: what wrote the checkpoint and its network, where the file does not say.

    >>> import tempfile, torch, torchvision
    >>> network = torchvision.models.resnet18()
    >>> network.fc = torch.nn.Identity()
    >>> backbone = Backbone(network, 512, mean=[0.5] * 3, std=[0.25] * 3, input_size=32)
    >>> export_model(backbone, "timm", tempfile.mkdtemp()).network
    'resnet18'
    """
    if to not in TARGETS:
        raise ConfigError(f"expected a target of {', '.join(TARGETS)}; found {to!r}")
    return TARGETS[to](open_source(model, format, arch), Path(os.path.expanduser(out)), overwrite)
