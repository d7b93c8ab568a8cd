"""A refined model as people load models from the Hugging Face hub: ``from_pretrained``, ``push_to_hub``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from huggingface_hub import ModelCard, PyTorchModelHubMixin, snapshot_download
from numpy.typing import NDArray
from torch import Tensor, nn

from cdc_plugin.checkpoints.formats.native import DESCRIPTION, HUB_DESCRIPTION, WEIGHTS
from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.errors import CheckpointError, OutputError
from cdc_plugin.integrations.hub.card import LIBRARY, PIPELINE, TAGS, render_card, strip_folders
from cdc_plugin.models.clusterer import Clusterer

CARD = "README.md"


class CalibratedClusterer(nn.Module, PyTorchModelHubMixin, library_name=LIBRARY, pipeline_tag=PIPELINE, tags=[*TAGS]):
    """A model that maps images (N, 3, S, S) in [0, 1] to calibrated probabilities (N, C), for the Hugging Face hub.

    Mean and std are applied inside. ``from_pretrained`` takes a folder, which needs no network, or the name of a
    repository. Every weight must be present, and no code from the folder is run.

    Args:
        provenance: what it was made from; published, hence paths lose their folders.
        card: text of the model card; written from the model by default.

    >>> import torch
    >>> from cdc_plugin.models.backbone import Backbone
    >>> from cdc_plugin.models.heads import ClusterHead
    >>> backbone = Backbone(nn.AvgPool2d(8), 3, mean=[0.5] * 3, std=[0.25] * 3, input_size=8)
    >>> model = CalibratedClusterer(Clusterer(backbone, ClusterHead(3, 16, 5), ClusterHead(3, 16, 5)))
    >>> model.eval()(torch.rand(4, 3, 8, 8)).shape
    torch.Size([4, 5])
    """

    def __init__(self, clusterer: Clusterer, provenance: dict[str, Any] | None = None, card: str | None = None) -> None:
        super().__init__()
        self.clusterer = clusterer
        self.provenance = strip_folders(provenance or {})
        self.card = card

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_floating_point() or images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(
                f"expected float images (N, 3, S, S) in [0, 1], found {images.dtype} {tuple(images.shape)}; "
                "predict_proba takes paths, PIL images and uint8 arrays"
            )
        backbone = self.clusterer.backbone
        normalised = (images - backbone.mean.view(1, 3, 1, 1)) / backbone.std.view(1, 3, 1, 1)
        return F.softmax(self.clusterer(normalised), dim=1)

    def predict_proba(self, images: Any, batch_size: int = 256) -> NDArray[np.float32]:
        """Return probabilities (N, C) of paths, PIL images or uint8 arrays; see `Clusterer.predict_proba`."""
        return self.clusterer.predict_proba(images, batch_size)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return the card; ``model_card_kwargs={"license": "mit"}`` of the other methods sets its metadata."""
        card = ModelCard(self.card) if self.card is not None else super().generate_model_card(*args)
        for key, value in kwargs.items():
            setattr(card.data, key, value)
        return card

    def _save_pretrained(self, save_directory: Path) -> None:
        if self.clusterer.backbone.spec is None:
            raise CheckpointError(
                "the model was refined from a network of the user's own class, which no file can rebuild; "
                "cdc_plugin.export_model(model, 'onnx', FILE) takes any network"
            )
        if (save_directory / DESCRIPTION).exists():
            raise OutputError(f"{save_directory} holds another model ({DESCRIPTION}); give another folder")
        self.clusterer.save(save_directory, self.provenance)
        described = (save_directory / DESCRIPTION).replace(save_directory / HUB_DESCRIPTION)
        if self.card is None:
            self.card = render_card(json.loads(described.read_text(encoding="utf-8")), {})

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        map_location: str = "cpu",
        strict: bool = True,  # passed by the mixin; loading is always strict
        provenance: dict[str, Any] | None = None,  # from config.json
        **download: Any,
    ) -> CalibratedClusterer:
        folder = Path(model_id)
        if not folder.is_dir():
            files = [HUB_DESCRIPTION, WEIGHTS, CARD]
            folder = Path(snapshot_download(model_id, allow_patterns=files, **download))
        card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else None
        return cls(load_model(folder), provenance, card).to(map_location).eval()
