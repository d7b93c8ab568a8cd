"""Plain records that a page is made of. Labels are in here for the report and for nothing else."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.data.images import ImageSet

FigureRow = tuple[str, dict[str, Any] | None, dict[str, Any] | None]  # title, figures before, figures after


@dataclass(frozen=True)
class PageData:
    """One model on one set of images. Figures are those of `metrics.summary`; absent keys are left out."""

    title: str
    facts: list[tuple[str, str]]  # what was run: label, value
    rows: list[FigureRow]
    diagrams: list[tuple[str, dict[str, Any]]]  # reliability diagrams: title, figures
    label_free: dict[str, Any]  # the quality card
    table: np.recarray  # predictions of the model that is reported on
    probs: NDArray[np.float32]  # (N, C) of its predicting head
    images: ImageSet  # pixels for thumbnails, names, skipped files
    history: list[dict[str, Any]] = field(default_factory=list)  # epochs as in metrics.jsonl
    settings: str | None = None  # YAML of the run
    command: str | None = None  # what to type to get this again
    outside: list[dict[str, Any]] = field(default_factory=list)  # OOD: data, images, scores of each kind
    old_model: dict[str, Any] | None = None  # report.json's, as the next four
    hierarchy: dict[str, Any] | None = None
    count: dict[str, Any] | None = None
    sizes: dict[str, Any] | None = None
    next_changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterFigures:
    """One cluster: None for the confidence of an empty one, and for what labels do not say."""

    size: int
    confidence: float | None = None  # mean
    class_name: str | None = None  # that it was matched with
    accuracy: float | None = None  # share of its images that are of the class
