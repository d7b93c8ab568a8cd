"""A finished model: backbone, both heads, and the files they are kept in."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from cdc_plugin.checkpoints.formats.native import (
    DESCRIPTION,
    VERSION,
    WEIGHTS,
    description_file,
    native_backbone,
    native_heads,
    native_prototypes,
    prototype_tensors,
    read_native,
)
from cdc_plugin.checkpoints.load import Loaded, Wanted, load_checkpoint
from cdc_plugin.checkpoints.read import strip_prefix
from cdc_plugin.checkpoints.weights import load_strictly
from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.data.images import open_images
from cdc_plugin.data.views import plain_view, view_settings
from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone


class Clusterer(nn.Module):
    """Normalised images (N, 3, H, W) to the (N, C) logits of the calibration head, which predicts (Sec. 3.4).

    ``prototypes`` tell images that are unlike those refined on; None for models that do not have them.
    """

    def __init__(
        self,
        backbone: Backbone,
        clustering_head: nn.Module,
        calibration_head: nn.Module,
        prototypes: Prototypes | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.clustering_head = clustering_head
        self.calibration_head = calibration_head
        self.prototypes = prototypes

    @property
    def clusters(self) -> int:
        return int(self.calibration_head.clusters)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        return self.calibration_head(self.backbone(images))

    @torch.no_grad()
    def predict_proba(self, images: Any, batch_size: int = 256) -> NDArray[np.float32]:
        """Calibrated probabilities (N, C) of uint8 arrays, PIL images or paths; one image gives one row.

        Args:
            images: (H, W, 3) or (N, H, W, 3) uint8, a PIL image, a path of an image or folder, or a list.
        """
        found = open_images(_several(images), self.backbone.input_size, labels=False)
        if found.skipped:
            name, reason = found.skipped[0]
            raise UserError(f"cannot read {name}: {reason}")
        settings = view_settings(self.backbone)
        self.eval()
        device = next(self.parameters()).device
        rows = []
        for part in torch.arange(len(found)).split(batch_size):
            views = plain_view(found.batch(part).to(device), settings)
            rows.append(F.softmax(self(views), dim=1).cpu())
        return torch.cat(rows).numpy()

    def save(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write ``model.safetensors`` and ``model.json``, each whole or not at all."""
        from safetensors.torch import save_file

        backbone = self.backbone
        description = {
            "format": "cdc_plugin",
            "version": VERSION,
            "backbone": {
                "spec": backbone.spec,
                "feature_dim": backbone.feature_dim,
                "mean": [round(value, 6) for value in backbone.mean.tolist()],
                "std": [round(value, 6) for value in backbone.std.tolist()],
                "input_size": backbone.input_size,
            },
            "heads": self.calibration_head.spec,
            "provenance": provenance,
        }
        tensors = {
            f"{part}.{name}": tensor.detach().cpu().contiguous()
            for part, module in (
                ("backbone", backbone.module),
                ("clustering_head", self.clustering_head),
                ("calibration_head", self.calibration_head),
            )
            for name, tensor in module.state_dict().items()
        }
        if self.prototypes is not None:
            tensors |= prototype_tensors(self.prototypes)
        write_atomically(folder / WEIGHTS, lambda path: save_file(tensors, path))
        text = json.dumps(description, indent=2) + "\n"
        write_atomically(folder / DESCRIPTION, lambda path: path.write_text(text, encoding="utf-8"))


def _several(images: Any) -> Any:
    """One image of any kind as a list or array of one; arrays of different sizes as PIL images."""
    if isinstance(images, (str, Path)):
        return images
    if isinstance(images, (np.ndarray, Tensor)):
        single = images.ndim == 2 or (images.ndim == 3 and 3 in (images.shape[0], images.shape[-1]))
        return images[None] if single else images
    if not isinstance(images, (list, tuple)):
        return [images]
    return [Image.fromarray(image) if isinstance(image, np.ndarray) else image for image in images]


def load_model(
    path: str | Path,
    module: nn.Module | None = None,
    *,
    format: str | None = None,
    arch: str | None = None,
    head: int | None = None,
    clusters: int | None = None,
) -> Clusterer:
    """A clustering model in evaluation mode: a result of ``cdc-refine``, or a checkpoint of SCAN, SeCu and others.

    Args:
        module: the network it was refined from, where that was one of your own class; its weights are not
            used and not changed.
        format, arch, head, clusters: for checkpoints of others, where the file does not tell.
    """
    if module is None and Path(path).exists() and not is_result(Path(path)):
        return clusterer_of(load_checkpoint(path, format, Wanted(arch, head=head, clusters=clusters)), path)
    description, tensors = read_native(path)
    if module is None:
        backbone = native_backbone(description, tensors, str(path))
    else:
        network = copy.deepcopy(module.module if isinstance(module, Backbone) else module)
        load_strictly(network, strip_prefix(tensors, "backbone."), str(path))
        backbone = Backbone(network, **description["backbone"])
    heads = native_heads(description, tensors, backbone.feature_dim, str(path))
    return Clusterer(backbone, *heads, native_prototypes(tensors, backbone.feature_dim, str(path))).eval()


def is_result(path: Path) -> bool:
    """Whether a path is a result folder of ``cdc-refine``, or the weights inside one."""
    folder = path if path.is_dir() else path.parent
    found = [file.is_file() for file in (description_file(folder), folder / WEIGHTS)]
    # A half of a result is told as such; a folder with neither may be a run of somebody else's.
    return any(found) if path.is_dir() else path.name == WEIGHTS and found[0]


def clusterer_of(loaded: Loaded, path: str | Path) -> Clusterer:
    """The model in somebody else's checkpoint; with one head, that is both the clustering and calibration head."""
    if not loaded.heads and "head" in loaded.origin.why:
        raise UserError(f"{path} ({loaded.origin.writer}) has {loaded.origin.why['head']}")
    if not loaded.heads:
        raise UserError(
            f"{path} ({loaded.origin.writer}) has no clustering head; refine it first: cdc-refine --backbone {path}"
        )
    return Clusterer(loaded.backbone, loaded.heads[0], loaded.heads[-1]).eval()
