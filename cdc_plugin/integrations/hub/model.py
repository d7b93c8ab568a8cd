"""A refined model as people load models from the Hugging Face hub (``from_pretrained``, ``push_to_hub``), and its card.

The card says what the model is and what its figures mean. Figures that needed ground truth are kept apart. Of files
only the names are published: the card is for others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from huggingface_hub import ModelCard, PyTorchModelHubMixin, snapshot_download
from numpy.typing import NDArray
from torch import Tensor, nn

from cdc_plugin.checkpoints.formats.native import DESCRIPTION, HUB_DESCRIPTION, WEIGHTS
from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.data.atomic import has_content, read_small_text
from cdc_plugin.errors import CheckpointError, OutputError
from cdc_plugin.models.architectures import describe
from cdc_plugin.models.clusterer import Clusterer

CARD = "README.md"
LIBRARY, PIPELINE = "cdc-plugin", "image-classification"
TAGS = ("calibration", "deep-clustering", "image-clustering", "self-supervised-learning")
TEMPLATE = Path(__file__).with_name("card.md.jinja")
MEASURED = ("ACC", "NMI", "ARI", "ECE", "AUROC", "AURC", "FPR95")


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

    def predict_proba(self, images: Any, batch_size: int = 256, level: int | None = None) -> NDArray[np.float32]:
        """Return probabilities (N, C) of paths, PIL images or uint8 arrays; see `Clusterer.predict_proba`."""
        return self.clusterer.predict_proba(images, batch_size, level)

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
        card = read_small_text(folder / CARD) if has_content(folder / CARD) else None
        return cls(load_model(folder), provenance, card).to(map_location).eval()


def render_card(description: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Return the README.md of an export, from its config.json and its run's report.json, which may be empty."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)  # escaped by _escape, for Markdown
    environment.filters |= {"cell": _escape, "percent": _format_percent}
    backbone, provenance = description["backbone"], strip_folders(description.get("provenance") or {})
    facts = {
        "data": strip_folders(report).get("data") or provenance.get("data"),
        "images": report.get("images"),
        "clusters": description["heads"]["clusters"],
        "backbone": provenance.get("backbone"),
        "network": describe(backbone["spec"]),
        "input": f"RGB, {backbone['input_size']} px, mean {backbone['mean']}, std {backbone['std']}",
        "epochs": provenance.get("epochs"),
        "seed": provenance.get("seed"),
    }
    heads = report.get("after") if report.get("labels") else None
    measured = {name: head for name, head in (heads or {}).items() if head.get("ACC") is not None}
    columns = [name for name in MEASURED if any(head.get(name) is not None for head in measured.values())]
    figures = {"label_free": report.get("label_free") or {}, "columns": columns, "measured": measured}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    hub = {"library": LIBRARY, "pipeline": PIPELINE, "tags": TAGS}
    return template.render(hub=hub, facts=facts, side=backbone["input_size"], **figures)


def strip_folders(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with only the last part of paths: where files are stored is private.

    >>> strip_folders({"data": "/home/me/photos", "backbone": "timm:resnet18", "epochs": 3})
    {'data': 'photos', 'backbone': 'timm:resnet18', 'epochs': 3}
    """
    paths = {key: str(facts[key]) for key in ("data", "backbone") if facts.get(key)}
    names = {k: path if path.startswith(("timm:", "hf-hub:")) else Path(path).name for k, path in paths.items()}
    return {**facts, **names}


def _escape(value: Any) -> str:
    """Return any value as text that breaks neither a table nor a heading."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;").encode(errors="replace").decode()


def _format_percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
