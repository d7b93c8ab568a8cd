"""Clusters of images a model has not seen: they are read, sorted and forgotten chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cdc_plugin.clusterer import Clusterer, view_settings
from cdc_plugin.data.images import CHUNK, ImageSet, Progress, storage_size
from cdc_plugin.data.resize import Pixels
from cdc_plugin.data.stream import ImageStream, open_stream
from cdc_plugin.data.views import ViewSettings, plain_view
from cdc_plugin.errors import UserError
from cdc_plugin.inputs import settle_assumptions
from cdc_plugin.tables import make_table, outlier_columns, prediction_columns

# Images looked at before the first prediction: where facts on the input are open, and where they are only checked.
LOOK, GLANCE = 2048, 64
LOOK_BYTES = 256 * 256 * 256 * 3  # fewer images, where they are large


@dataclass(frozen=True)
class Prediction:
    """What is kept of all images: a table, one row an image that could be read.

    Args:
        places: (N,) which image of the source each row is, counting unreadable ones.
        skipped: name and reason of every image that could not be read.
        source: what the images were opened from.
    """

    table: np.recarray
    places: NDArray[np.int64]
    skipped: list[tuple[str, str]]
    source: str


@torch.no_grad()
def predict_images(
    model: Clusterer,
    data: Any,
    device: torch.device,
    batch_size: int = CHUNK,
    progress: Progress | None = None,
) -> Prediction:
    """Cluster and calibrated confidence of every image; memory does not grow with their number beyond the table.

    Args:
        data: anything that ``open_images`` takes; its labels are not looked at.
        batch_size: images that are read and computed at once.
    """
    model.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    stream = open_stream(data, storage_size(model.backbone.input_size))
    model.backbone = settle_assumptions(model.backbone, _look(model, stream))
    settings = view_settings(model.backbone)
    names: list[str] = []
    places: list[NDArray[np.int64]] = []
    columns: list[dict[str, NDArray[Any]]] = []
    chunks = stream.chunks(batch_size)
    for chunk in progress(chunks, -(-len(stream) // batch_size), "predicting") if progress else chunks:
        names += chunk.names
        places.append(chunk.places)
        try:
            columns.append(_columns(model, chunk.squares, settings, device))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{batch_size} images at once are too many for {device}; give a smaller --batch-size"
            ) from error
    together = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    if not np.isfinite(together["confidence"]).all():
        raise UserError("the model gives confidences that are not finite: is this the right checkpoint?")
    return Prediction(make_table(names, together), np.concatenate(places), stream.skipped, stream.description)


def _columns(
    model: Clusterer, squares: Pixels, settings: ViewSettings, device: torch.device
) -> dict[str, NDArray[Any]]:
    """All that is kept of a chunk of images (n, S, S, 3)."""
    views = plain_view(torch.from_numpy(squares).permute(0, 3, 1, 2).to(device), settings)
    features = model.backbone(views.contiguous(memory_format=torch.channels_last)).float()
    calibration = _probabilities(model.calibration_head(features))
    one_head = model.clustering_head is model.calibration_head
    clustering = calibration if one_head else _probabilities(model.clustering_head(features))
    columns: dict[str, NDArray[Any]] = dict(prediction_columns(clustering, calibration))
    if model.prototypes is not None:
        columns |= outlier_columns(model.prototypes, features)
    return columns


def _probabilities(logits: Tensor) -> NDArray[np.float32]:
    return F.softmax(logits, dim=1).cpu().numpy()


def _look(model: Clusterer, stream: ImageStream) -> ImageSet:
    """Some images, evenly spread; what cannot be read among them is left out."""
    wanted = min(LOOK, LOOK_BYTES // (3 * stream.side**2)) if model.backbone.assumed else GLANCE
    places = torch.linspace(0, len(stream) - 1, min(len(stream), wanted)).long().numpy()
    squares, _ = stream.read(places)
    if len(squares) == 0:  # unreadable to the last, but there may be others between them
        squares = next(stream.chunks(wanted)).squares
    return ImageSet(squares, [str(number) for number in range(len(squares))])
