"""Export the whole model as a folder for the Hugging Face hub, with a model card; it also loads offline."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from cdc_plugin.checkpoints.formats.native import HUB_DESCRIPTION, WEIGHTS, read_description
from cdc_plugin.checkpoints.load_model import is_result, load_model
from cdc_plugin.checkpoints.read import payload_fields
from cdc_plugin.errors import CheckpointError, OutputError, option
from cdc_plugin.evaluation.models import read_json
from cdc_plugin.integrations.export import base
from cdc_plugin.integrations.export.base import Export, Source
from cdc_plugin.integrations.hub.model import CARD, CalibratedClusterer, render_card
from cdc_plugin.models.clusterer import Clusterer

FILES = (WEIGHTS, HUB_DESCRIPTION, CARD)


def export_hub(source: Source, out: Path, overwrite: bool) -> Export:
    """Write a folder for ``CalibratedClusterer.from_pretrained(FOLDER)``, or to be pushed to the hub."""
    base.check_folder(out, overwrite)
    model, provenance, report = _open(source)
    folder = base.create_folder(out)
    exported = CalibratedClusterer(model, provenance)
    with tempfile.TemporaryDirectory(prefix=".hub-", dir=folder) as name:
        staging = Path(name)
        exported.save_pretrained(staging)
        described = json.loads((staging / HUB_DESCRIPTION).read_text(encoding="utf-8"))
        (staging / CARD).write_text(render_card(described, report), encoding="utf-8")
        _check(staging, exported)
        base.remove_earlier(folder, ".safetensors", keep=staging)
        for file in FILES:
            (staging / file).replace(folder / file)
    load = ("from cdc_plugin import CalibratedClusterer", f'model = CalibratedClusterer.from_pretrained("{folder}")')
    notes = (f"{folder / CARD} states no licence: add one before publishing",)
    return Export(tuple(folder / file for file in FILES), source.network, load, notes)


def _open(source: Source) -> tuple[Clusterer, dict[str, Any], dict[str, Any]]:
    """Return the model with both heads, its provenance, and the report of its run (empty if there is none)."""
    if source.backbone.spec is None:
        raise CheckpointError(
            f"{source.name} is a network of the user's own class, which no file can rebuild; "
            f"{option('to', 'onnx')} takes any network"
        )
    if source.model is not None:
        return source.model, {}, {}
    path = Path(source.name)
    if source.head is None or not is_result(path):
        raise CheckpointError(
            f"the hub export takes a result of cdc-refine, but the confidence of {source.name} is not calibrated; "
            f"type: cdc-refine --backbone {source.name}"
        )
    folder = path if path.is_dir() else path.parent
    provenance = payload_fields(read_description(folder).get("provenance"))
    return load_model(path), provenance, read_json(folder / "report.json")


@torch.no_grad()
def _check(folder: Path, exported: CalibratedClusterer) -> None:
    """Refuse files that give other probabilities than the model."""
    backbone = exported.clusterer.backbone
    images = base.random_images(backbone, 2)
    expected = exported.eval()(images.to(backbone.mean.device)).cpu()
    actual = CalibratedClusterer.from_pretrained(str(folder))(images)
    if not torch.allclose(actual, expected, rtol=0, atol=1e-5):
        raise OutputError(f"{folder.parent}: the files give other probabilities than the model; nothing was written")
