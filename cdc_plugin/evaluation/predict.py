"""Predict clusters for new images, chunk by chunk: no image is kept in memory after its prediction."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from cdc_plugin.checkpoints.infer.resolve import resolve_input
from cdc_plugin.data.images import ImageSet, Progress, find_warnings, storage_size
from cdc_plugin.data.sources.arrays import fingerprint
from cdc_plugin.data.sources.base import ImageSource
from cdc_plugin.data.stream import CHUNK, ImageStream, open_stream
from cdc_plugin.data.views import ViewSettings, channels_last, plain_view, view_settings
from cdc_plugin.errors import CheckpointError, DataError, UserError, option
from cdc_plugin.evaluation.records import (
    build_table,
    choose_name_column,
    compute_outlier_columns,
    compute_prediction_columns,
)
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.training.features import head_probabilities, images_per_pass
from cdc_plugin.training.prepare import check_source

# Images examined before the first prediction: to infer open facts about the input, and only to check known ones.
INFER_COUNT, CHECK_COUNT = 2048, 64
LARGEST_BATCH = 256 * 256 * 256 * 3  # bytes: fewer images where they are large

# Columns of parts that are not in the table: fingerprints, for blank images and copies, and features of unit length.
MARKS, FEATURES = "marks", "features"


class PredictionPart(NamedTuple):
    """Predictions for consecutive images."""

    positions: NDArray[np.int64]  # (n,) index of each row's image in the source
    columns: dict[str, NDArray[Any]]  # (n,) each; empty where no image could be read
    skipped: list[tuple[int, str]]  # position and reason of every unreadable image


@dataclass(frozen=True)
class Prediction:
    """Predictions for all images of a source: a table with one row per readable image."""

    parts: Iterable[PredictionPart]  # in order; iterated several times, and may read each part from disk
    names: Sequence[str]  # of all images of the source, readable or not
    source: str  # a description of where the images came from
    left_aside: Mapping[str, int]  # number of files that are no images, by extension
    noun: str = "image"  # what messages call one of them

    def tables(self, **more: NDArray[Any]) -> Iterator[np.recarray]:
        """Yield the table in parts, with more columns (N,) at its end."""
        name_column = choose_name_column(self.names)
        start = 0
        for part in self.parts:
            if len(part.positions):
                end = start + len(part.positions)
                columns = part.columns | {name: values[start:end] for name, values in more.items()}
                for hidden in (MARKS, FEATURES):
                    columns.pop(hidden, None)
                yield build_table([self.names[position] for position in part.positions], columns, name_column)
                start = end

    def column(self, name: str) -> NDArray[Any] | None:
        """Return the (N,) values of one column, or None where the model does not provide it."""
        values = [part.columns[name] for part in self.parts if name in part.columns]
        return np.concatenate(values) if values else None

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """(N,) index of each row's image in the source, which counts unreadable images."""
        return np.concatenate([part.positions for part in self.parts])

    @cached_property
    def confidence(self) -> NDArray[np.float32]:
        """(N,) calibrated confidence of each image's cluster."""
        return np.concatenate([part.columns["confidence"] for part in self.parts if part.columns])

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """What somebody should know about the images themselves."""
        return find_warnings(self.left_aside, self.column(MARKS), [self.names[place] for place in self.positions])

    @cached_property
    def skipped(self) -> list[tuple[str, str]]:
        """Name and reason of every unreadable image."""
        return [(self.names[position], reason) for part in self.parts for position, reason in part.skipped]


@dataclass(frozen=True)
class Predictor:
    """A model and the images to predict; made by `prepare`."""

    model: Clusterer
    stream: ImageStream
    settings: ViewSettings
    device: torch.device
    batch_size: int  # images that are read and computed at once
    groups: NDArray[np.int64] | None = None  # (C,) that the clusters are merged to, if they are
    keep_features: bool = False  # in the parts, as half precision

    def predict_parts(self, ranges: Sequence[range], progress: Progress | None = None) -> Iterator[PredictionPart]:
        """Predict ascending, non-empty ranges of the source and yield one part for each, in order."""
        if not ranges:
            return
        chunks = self.stream.chunks(self.batch_size, ranges)
        steps = sum(-(-len(positions) // self.batch_size) for positions in ranges)
        waiting = deque(ranges)
        positions: list[NDArray[np.int64]] = []
        columns: list[dict[str, NDArray[Any]]] = []
        for chunk in progress(chunks, steps, "predicting") if progress else chunks:
            while chunk.places[0] >= waiting[0].stop:
                yield self._build_part(waiting.popleft(), positions, columns)
                positions, columns = [], []
            positions.append(chunk.places)
            try:
                columns.append(_compute_columns(self, chunk.squares))
            except torch.OutOfMemoryError as error:
                smaller = option("batch_size", max(self.batch_size // 2, 1))
                raise UserError(
                    f"a batch of {self.batch_size} does not fit into the memory of {self.device}; try {smaller}"
                ) from error
        for remaining in waiting:
            yield self._build_part(remaining, positions, columns)
            positions, columns = [], []

    def collect(self, parts: Iterable[PredictionPart]) -> Prediction:
        """Return all parts as one prediction; refuse one without a single readable image."""
        source = self.stream.source
        left_aside = source.left_aside if isinstance(source, ImageSource) else {}
        prediction = Prediction(parts, source.names, source.description, left_aside, self.stream.noun)
        if len(prediction.positions) == 0:
            name, reason = prediction.skipped[0]
            raise DataError(
                f"none of the {len(self.stream)} images of {prediction.source} can be read; the first, {name}: "
                f"{reason}; open one of them in an image viewer to check the files"
            )
        return prediction

    def _build_part(
        self, source: range, positions: list[NDArray[np.int64]], columns: list[dict[str, NDArray[Any]]]
    ) -> PredictionPart:
        joined = {name: np.concatenate([chunk[name] for chunk in columns]) for name in (columns or [{}])[0]}
        if joined and not np.isfinite(joined["confidence"]).all():
            raise CheckpointError("the model computes confidences that are not finite: is this the right checkpoint?")
        # The reader may be ahead of this range, but it lists unreadable images in order.
        unreadable = self.stream.unreadable
        first, after = (bisect_left(unreadable, (position, "")) for position in (source.start, source.stop))
        return PredictionPart(np.concatenate([np.empty(0, np.int64), *positions]), joined, unreadable[first:after])


def prepare(
    model: Clusterer,
    data: Any,
    device: torch.device,
    batch_size: int = CHUNK,
    level: int | None = None,
    keep_features: bool = False,
) -> Predictor:
    """Open what ``open_images`` takes, and infer from some images what the checkpoint left open; changes the model.

    ``level`` is how many groups the clusters are merged to.
    """
    groups = None if level is None else model.groups(level)
    check_source(model.backbone, data)
    model.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    stream = open_stream(data, storage_size(model.backbone.input_size))
    if stream.side:
        model.backbone = resolve_input(model.backbone, _read_sample(model, stream))
        batch_size = min(batch_size, images_per_pass(model.backbone.input_size, device), _images_per_read(stream))
    return Predictor(model, stream, view_settings(model.backbone), device, batch_size, groups, keep_features)


@torch.no_grad()
def _compute_columns(predictor: Predictor, squares: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the columns of the table for a chunk of images (n, S, S, 3), or of vectors (n, D)."""
    model, rows = predictor.model, torch.from_numpy(squares).to(predictor.device)
    views = rows if rows.ndim == 2 else plain_view(rows.permute(0, 3, 1, 2), predictor.settings)
    features = model.backbone(channels_last(views)).float()
    calibration = head_probabilities(model.calibration_head, features)
    one_head = model.clustering_head is model.calibration_head
    clustering = calibration if one_head else head_probabilities(model.clustering_head, features)
    columns: dict[str, NDArray[Any]] = dict(compute_prediction_columns(clustering, calibration, predictor.groups))
    if squares.ndim == 4:
        columns[MARKS] = fingerprint(squares)
    if model.prototypes is not None:
        columns |= compute_outlier_columns(model.prototypes, features)
    if predictor.keep_features:
        columns[FEATURES] = F.normalize(features, dim=1).half().cpu().numpy()
    return columns


def _images_per_read(stream: ImageStream) -> int:
    """Return how many squares are in memory at once: those that are kept may be larger than what the network sees."""
    return max(1, LARGEST_BATCH // (3 * stream.side**2))


def _read_sample(model: Clusterer, stream: ImageStream) -> ImageSet:
    """Return some readable images, evenly spread over the source."""
    wanted = min(INFER_COUNT if model.backbone.inferred else CHECK_COUNT, _images_per_read(stream))
    positions = torch.linspace(0, len(stream) - 1, min(len(stream), wanted)).long().numpy()
    squares, _ = stream.read(positions)
    if len(squares) == 0:  # all of these are unreadable, but there may be others between them
        squares = next(stream.chunks(wanted)).squares
    return ImageSet(squares, [str(number) for number in range(len(squares))])
