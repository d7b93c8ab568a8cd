"""What a model says of a set of images, how good that is, and how well the model tells images from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdc_plugin.batches import FINAL
from cdc_plugin.core.outliers import Prototypes
from cdc_plugin.data.images import ImageSet
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation import extract_features, head_probabilities, kmeans_assignment, measure
from cdc_plugin.metrics.outliers import outlier_aupr, outlier_auroc, outlier_fpr95
from cdc_plugin.runtime import generator
from cdc_plugin.subjects import Subject
from cdc_plugin.tracking import progress

TITLES = {
    "kmeans": "k-means on the features",
    "clustering_head": "clustering head",
    "calibration_head": "calibration head",
    "model": "the model as it is",
}


@dataclass(frozen=True)
class Answers:
    """Features (N, D) on the CPU, and the probabilities (N, C) of each head by its key in `TITLES`."""

    features: Tensor
    heads: dict[str, NDArray[np.float32]]

    @property
    def clustering(self) -> NDArray[np.float32]:
        return next(iter(self.heads.values()))

    @property
    def calibration(self) -> NDArray[np.float32]:
        """Those of the head that predicts; it comes last."""
        return list(self.heads.values())[-1]


def ask(subject: Subject, images: ImageSet, device: torch.device) -> Answers:
    """The answers to every image; a model with one head is asked once."""
    model = subject.model
    features = extract_features(model.backbone, images, device, "float32", progress)
    if not torch.isfinite(features).all():
        raise UserError(f"{subject.path or 'the model'} gives features that are not finite: is this the right file?")
    if subject.heads == 1:
        return Answers(features, {"model": head_probabilities(model.calibration_head, features)})
    heads = {"clustering_head": model.clustering_head, "calibration_head": model.calibration_head}
    return Answers(features, {key: head_probabilities(head, features) for key, head in heads.items()})


def measure_answers(subject: Subject, answers: Answers, labels: NDArray[np.int64] | None) -> dict[str, Any]:
    """Figures by key of `TITLES`: k-means on the same features, and each head."""
    seed = subject.run.config.seed if subject.run is not None else 0
    device = subject.model.backbone.mean.device
    again = kmeans_assignment(answers.features.to(device), subject.model.clusters, generator(seed, FINAL))
    found = measure(answers.clustering, answers.calibration, again, labels)
    return {"kmeans": found["kmeans"]} | {key: found.get(key, found["calibration_head"]) for key in answers.heads}


def score_outside(inside: Answers, outside: Answers, prototypes: Prototypes) -> dict[str, Any]:
    """How well images from elsewhere are told apart: by each head's confidence (the paper's protocol), by distance."""
    sure = {TITLES[key]: (inside.heads[key].max(axis=1), outside.heads[key].max(axis=1)) for key in inside.heads}
    far_in, far_out = (prototypes.distance(answers.features).numpy() for answers in (inside, outside))
    return {by: _told_apart(*scores) for by, scores in {**sure, "distance": (-far_in, -far_out)}.items()}


def _told_apart(inside: NDArray[np.float32], outside: NDArray[np.float32]) -> dict[str, float | None]:
    """Figures of scores (N,) and (M,) that are to be higher inside."""
    kinds = {"AUROC": outlier_auroc, "FPR95": outlier_fpr95, "AUPR": outlier_aupr}
    return {name: kind(inside, outside) for name, kind in kinds.items()}
