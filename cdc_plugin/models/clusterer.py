"""Define a refined model: backbone, both heads, and the files it is written to."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from cdc_plugin.core.hierarchy import Hierarchy, sum_groups
from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.core.torch_defaults import torch_defaults
from cdc_plugin.data.atomic import digest_file, write_atomically, write_text
from cdc_plugin.data.images import open_images
from cdc_plugin.data.side import write_side
from cdc_plugin.data.sources.features import describe_features
from cdc_plugin.data.views import plain_view, view_settings
from cdc_plugin.errors import CheckpointError, DataError, option
from cdc_plugin.models.backbone import Backbone

VERSION = 1
WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"


class Clusterer(nn.Module):
    """A model from normalised images (N, 3, H, W) to the (N, C) logits of the calibration head (Sec. 3.4).

    ``prototypes`` recognise images that are unlike those refined on, ``hierarchy`` merges clusters to fewer groups;
    None for models without them.
    """

    def __init__(
        self,
        backbone: Backbone,
        clustering_head: nn.Module,
        calibration_head: nn.Module,
        prototypes: Prototypes | None = None,
        hierarchy: Hierarchy | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.clustering_head = clustering_head
        self.calibration_head = calibration_head
        self.prototypes = prototypes
        self.hierarchy = hierarchy

    @property
    def clusters(self) -> int:
        return int(self.calibration_head.clusters)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        return self.calibration_head(self.backbone(images))

    def groups(self, level: int) -> NDArray[np.int64]:
        """Return the group (C,), from 0, of every cluster where there are ``level`` groups; see `Hierarchy.groups`."""
        if self.hierarchy is None:
            raise CheckpointError(
                f"{option('level', level)} needs a model that states how its clusters merge, as cdc-refine writes it; "
                "refine this one (cdc-refine --backbone MODEL --data DATA), or leave the level out"
            )
        return self.hierarchy.groups(level)

    @torch_defaults()
    @torch.no_grad()
    def predict_proba(self, images: Any, batch_size: int = 256, level: int | None = None) -> NDArray[np.float32]:
        """Return calibrated probabilities (N, C) of uint8 arrays, PIL images or paths; one image gives one row.

        A model of features takes vectors (N, D) or the path of a file of them.

        Args:
            images: (H, W, 3) or (N, H, W, 3) uint8, a PIL image, a path of an image or folder, or a list.
            level: how many groups to merge the clusters to, (N, level); the clusters themselves if left out.
        """
        groups = None if level is None else self.groups(level)
        source = describe_features(images, labels=False) if self.backbone.takes_features else _several(images)
        opened = open_images(source, self.backbone.input_size, labels=False)
        if opened.skipped:
            name, reason = opened.skipped[0]
            raise DataError(f"cannot read {name}: {reason}")
        settings = view_settings(self.backbone)
        self.eval()
        device = next(self.parameters()).device
        rows = []
        for part in torch.arange(opened.count).split(batch_size):
            views = plain_view(opened.batch(part).to(device), settings)
            rows.append(F.softmax(self(views), dim=1).cpu())
        probabilities = torch.cat(rows).numpy()
        return probabilities if groups is None else sum_groups(probabilities, groups)

    def save(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write ``model.safetensors`` and ``model.json``, each completely or not at all."""
        write_model(folder, self.backbone, provenance, self)


def write_model(folder: Path, backbone: Backbone, provenance: dict[str, Any], model: Clusterer | None = None) -> None:
    """Write a backbone, with the heads and prototypes of its ``model`` if it has been refined."""
    from safetensors.torch import save_file

    facts: dict[str, Any] = {
        "spec": backbone.spec,
        "feature_dim": backbone.feature_dim,
        "mean": [round(value, 6) for value in backbone.mean.tolist()],
        "std": [round(value, 6) for value in backbone.std.tolist()],
        **write_side(backbone.input_size),
    }
    description: dict[str, Any] = {"format": "cdc_plugin", "version": VERSION, "backbone": facts}
    parts = {"backbone": backbone.module}
    if model is not None:
        description["heads"] = model.calibration_head.spec
        if model.hierarchy is not None:
            description["hierarchy"] = model.hierarchy.record()
        parts |= {"clustering_head": model.clustering_head, "calibration_head": model.calibration_head}
    tensors = {
        f"{part}.{name}": tensor.detach().cpu().contiguous()
        for part, module in parts.items()
        for name, tensor in module.state_dict().items()
    }
    if model is not None and model.prototypes is not None:
        tensors |= prototype_tensors(model.prototypes)
    write_atomically(folder / WEIGHTS, lambda path: save_file(tensors, path))
    description["sha256"] = digest_model(folder / WEIGHTS, description)
    write_text(folder / DESCRIPTION, json.dumps({**description, "provenance": provenance}, indent=2) + "\n")


def digest_model(weights: Path, description: dict[str, Any]) -> str:
    """Return the SHA-256 of a model's weights and of what its description says of the network."""
    parts = {part: description.get(part) for part in ("backbone", "heads")}
    if "hierarchy" in description:
        parts["hierarchy"] = description["hierarchy"]
    facts = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(f"{digest_file(weights)} {facts}".encode()).hexdigest()


def prototype_tensors(prototypes: Prototypes) -> dict[str, Tensor]:
    """Return what a result folder stores to recognise outliers, by name."""
    tensors = {"centers": prototypes.centers, "whitening": prototypes.whitening}
    tensors["limit"] = torch.tensor(prototypes.limit)
    return {f"prototypes.{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _several(images: Any) -> Any:
    """Return one image of any kind as a list or array of one; arrays of different sizes as PIL images."""
    if isinstance(images, (str, Path)):
        return images
    if isinstance(images, (np.ndarray, Tensor)):
        single = images.ndim == 2 or (images.ndim == 3 and 3 in (images.shape[0], images.shape[-1]))
        return images[None] if single else images
    if not isinstance(images, (list, tuple)):
        return [images]
    return [Image.fromarray(image) if isinstance(image, np.ndarray) else image for image in images]
