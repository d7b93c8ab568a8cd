"""Clusters of images a model has not seen: they are read, sorted and forgotten chunk by chunk."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cdc_plugin.checkpoints.infer.resolve import resolve_input
from cdc_plugin.data.images import CHUNK, ImageSet, Progress, storage_size
from cdc_plugin.data.resize import Pixels
from cdc_plugin.data.stream import ImageStream, open_stream
from cdc_plugin.data.views import ViewSettings, plain_view, view_settings
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.part_files import Part
from cdc_plugin.evaluation.prediction_table import (
    make_table,
    name_column_of,
    one_table,
    outlier_columns,
    prediction_columns,
    with_column,
)
from cdc_plugin.models.clusterer import Clusterer

# Images looked at before the first prediction: where facts on the input are open, and where they are only checked.
LOOK, GLANCE = 2048, 64
LOOK_BYTES = 256 * 256 * 256 * 3  # fewer images, where they are large


@dataclass(frozen=True)
class Prediction:
    """What is kept of all images: a table, one row an image that could be read.

    Args:
        parts: in order; each may be read from disk again whenever it is asked for.
        names: of all images of the source, readable or not.
        source: what the images were opened from.
    """

    parts: Iterable[Part]
    names: Sequence[str]
    source: str

    def tables(self, **more: NDArray[Any]) -> Iterator[np.recarray]:
        """The table in parts, with more columns (N,) at its end."""
        first = name_column_of(self.names)
        row = 0
        for part in self.parts:
            if len(part.places):
                table = make_table([self.names[place] for place in part.places], part.columns, first)
                for name, values in more.items():
                    table = with_column(table, name, values[row : row + len(table)])
                yield table
                row += len(table)

    def column(self, name: str) -> NDArray[Any] | None:
        """(N,) values of one column; None where the model does not give it."""
        found = [part.columns[name] for part in self.parts if name in part.columns]
        return np.concatenate(found) if found else None

    @cached_property
    def table(self) -> np.recarray:
        return one_table(self.tables())

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """(N,) which image of the source each row is, counting unreadable ones."""
        return np.concatenate([part.places for part in self.parts])

    @cached_property
    def confidence(self) -> NDArray[np.float32]:
        """(N,) of the cluster that each image is in."""
        found = self.column("confidence")
        assert found is not None
        return found

    @cached_property
    def skipped(self) -> list[tuple[str, str]]:
        """Name and reason of every image that could not be read."""
        return [(self.names[place], reason) for part in self.parts for place, reason in part.skipped]


@dataclass(frozen=True)
class Predictor:
    """A model and the images that it is to sort; made by `prepare`.

    Args:
        batch_size: images that are read and computed at once.
    """

    model: Clusterer
    stream: ImageStream
    settings: ViewSettings
    device: torch.device
    batch_size: int

    def parts(self, pieces: Sequence[range], progress: Progress | None = None) -> Iterator[Part]:
        """Predictions for pieces of the source, which rise and are not empty: one part each, in order."""
        if not pieces:
            return
        chunks = self.stream.chunks(self.batch_size, pieces)
        steps = sum(-(-len(piece) // self.batch_size) for piece in pieces)
        waiting = deque(pieces)
        places: list[NDArray[np.int64]] = []
        columns: list[dict[str, NDArray[Any]]] = []
        for chunk in progress(chunks, steps, "predicting") if progress else chunks:
            while chunk.places[0] >= waiting[0].stop:
                yield self._part(waiting.popleft(), places, columns)
                places, columns = [], []
            places.append(chunk.places)
            try:
                columns.append(_columns(self.model, chunk.squares, self.settings, self.device))
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"{self.batch_size} images at once are too many for {self.device}; give a smaller --batch-size"
                ) from error
        for piece in waiting:
            yield self._part(piece, places, columns)
            places, columns = [], []

    def prediction(self, parts: Iterable[Part]) -> Prediction:
        """All parts together."""
        found = Prediction(parts, self.stream.source.names, self.stream.description)
        if len(found.places) == 0:
            name, reason = found.skipped[0]
            raise UserError(
                f"none of the {len(self.stream)} images of {found.source} can be read; the first, {name}: {reason}; "
                "open one of them in an image viewer to see whether the files are whole"
            )
        return found

    def _part(self, piece: range, places: list[NDArray[np.int64]], columns: list[dict[str, NDArray[Any]]]) -> Part:
        together = {name: np.concatenate([some[name] for some in columns]) for name in (columns or [{}])[0]}
        if together and not np.isfinite(together["confidence"]).all():
            raise UserError("the model gives confidences that are not finite: is this the right checkpoint?")
        # The reader may be ahead of this piece, but it tells what it skips in order.
        lost = self.stream.unreadable
        first, after = (bisect_left(lost, (place, "")) for place in (piece.start, piece.stop))
        return Part(np.concatenate([np.empty(0, np.int64), *places]), together, lost[first:after])


def prepare(model: Clusterer, data: Any, device: torch.device, batch_size: int = CHUNK) -> Predictor:
    """Open the images and settle on some of them what the model leaves open; changes the model.

    Args:
        data: anything that ``open_images`` takes; its labels are not looked at.
    """
    model.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    stream = open_stream(data, storage_size(model.backbone.input_size))
    model.backbone = resolve_input(model.backbone, _look(model, stream))
    return Predictor(model, stream, view_settings(model.backbone), device, batch_size)


def predict_images(
    model: Clusterer,
    data: Any,
    device: torch.device,
    batch_size: int = CHUNK,
    progress: Progress | None = None,
) -> Prediction:
    """Cluster and calibrated confidence of every image; memory does not grow with their number beyond the table.

    Args:
        data, batch_size: as in `prepare`.
    """
    predictor = prepare(model, data, device, batch_size)
    return predictor.prediction(list(predictor.parts([range(len(predictor.stream))], progress)))


@torch.no_grad()
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
    wanted = min(LOOK, LOOK_BYTES // (3 * stream.side**2)) if model.backbone.inferred else GLANCE
    places = torch.linspace(0, len(stream) - 1, min(len(stream), wanted)).long().numpy()
    squares, _ = stream.read(places)
    if len(squares) == 0:  # unreadable to the last, but there may be others between them
        squares = next(stream.chunks(wanted)).squares
    return ImageSet(squares, [str(number) for number in range(len(squares))])
