"""What a model says of a set of images, how good that is, and how well the model tells images from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.core.mahalanobis import Prototypes, fit_prototypes
from cdc_plugin.core.random_streams import AUGMENTATION, FINAL, QUALITY, generator
from cdc_plugin.data.images import ImageSet
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.models import EvaluatedModel
from cdc_plugin.evaluation.quality import Evidence, assess, predict_augmented
from cdc_plugin.evaluation.report_record import measure
from cdc_plugin.metrics import summary_outliers
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.training.batches import training_views
from cdc_plugin.training.choose_augmentation import choose_augmentation
from cdc_plugin.training.features import (
    Features,
    extract_features,
    head_probabilities,
    kmeans_assignment,
    private_features,
)
from cdc_plugin.training.progress import show_progress
from cdc_plugin.training.runtime import Runtime

# Small models trained by the losses of SCAN and SeCu stated 25 to 29 points too much on 5,000 Fashion-MNIST images.
UNCALIBRATED = {
    "kind": "uncalibrated",
    "text": "This model has no calibration head: its confidence is its own. Networks trained on their own "
    "pseudo-labels mostly state far more than they keep; cdc-refine with --init keep calibrates it.",
}


@dataclass(frozen=True)
class ModelOutputs:
    """Features (N, D) on the CPU, and the probabilities (N, C) of each head by its key in report.json."""

    features: Tensor
    heads: dict[str, NDArray[np.float32]]

    @property
    def clustering(self) -> NDArray[np.float32]:
        return next(iter(self.heads.values()))

    @property
    def calibration(self) -> NDArray[np.float32]:
        """Those of the head that predicts; it comes last."""
        return list(self.heads.values())[-1]


@dataclass(frozen=True)
class OutlierReference:
    """Prototypes to measure distance with, and what the inside images (N,) measure.

    No image is measured by prototypes that it took part in: those would flatter it.
    """

    prototypes: tuple[Prototypes, ...]
    inside: Tensor

    def distance(self, features: Tensor) -> Tensor:
        return torch.stack([each.distance(features) for each in self.prototypes]).mean(dim=0)


def predict(
    model: Clusterer, images: ImageSet, runtime: Runtime
) -> tuple[NDArray[np.float32], NDArray[np.float32], Features]:
    """Return the probabilities (N, C) of the clustering and of the calibration head, and the features."""
    features = private_features(model.backbone, images, runtime)
    clustering = head_probabilities(model.clustering_head, features)
    return clustering, head_probabilities(model.calibration_head, features), features


def run_model(subject: EvaluatedModel, images: ImageSet, device: torch.device) -> ModelOutputs:
    """Run a model on every image; a model with one head has one entry."""
    model = subject.model
    features = extract_features(model.backbone, images, Runtime(device, progress=show_progress))
    if not torch.isfinite(features).all():
        raise UserError(f"{subject.path or 'the model'} gives features that are not finite: is this the right file?")
    if subject.heads == 1:
        return ModelOutputs(features, {"model": head_probabilities(model.calibration_head, features)})
    heads = {"clustering_head": model.clustering_head, "calibration_head": model.calibration_head}
    return ModelOutputs(features, {key: head_probabilities(head, features) for key, head in heads.items()})


def ask_kmeans(subject: EvaluatedModel, answers: ModelOutputs, device: torch.device) -> NDArray[np.int64]:
    """K-means (N,) on the same features, as at the end of a run."""
    randomness = generator(_settings(subject).seed, FINAL)
    return kmeans_assignment(answers.features.to(device), subject.model.clusters, randomness)


def measure_answers(
    answers: ModelOutputs, kmeans: NDArray[np.int64], labels: NDArray[np.int64] | None
) -> dict[str, dict[str, Any]]:
    """Return the figures of k-means and of each head, under the key of each in report.json."""
    found = measure(answers.clustering, answers.calibration, kmeans, labels)
    return {"kmeans": found["kmeans"]} | {key: found.get(key, found["calibration_head"]) for key in answers.heads}


def quality_card(
    subject: EvaluatedModel, answers: ModelOutputs, kmeans: NDArray[np.int64], images: ImageSet, device: torch.device
) -> dict[str, Any]:
    """Return the label-free card, as at the end of a run; with one head there are no two that could agree."""
    config, model = _settings(subject), subject.model
    randomness = generator(config.seed, AUGMENTATION)
    augment, _ = choose_augmentation(config.augment, model.backbone, model.calibration_head, images, device, randomness)
    views = training_views(augment, model.backbone)
    seen, anew = predict_augmented(model, images, views, Runtime(device), generator(config.seed, QUALITY))
    clustering, calibration, again = map(torch.from_numpy, (answers.clustering, answers.calibration, kmeans))
    card = assess(Evidence(clustering, calibration, answers.features, again, seen, anew))
    if subject.heads > 1:
        return card
    warnings = [UNCALIBRATED, *card["warnings"]]
    return card | {"heads_agree": None, "clustering_confidence": None, "warnings": warnings}


def outlier_reference(answers: ModelOutputs, prototypes: Prototypes | None) -> OutlierReference:
    """Measure by the given prototypes, which saw none of the images; else measure each half by the other's."""
    if prototypes is not None:
        return OutlierReference((prototypes,), prototypes.distance(answers.features))
    features, clusters = answers.features, answers.calibration.shape[1]
    assignment = torch.from_numpy(answers.calibration.argmax(axis=1))
    half = torch.arange(len(features)) % 2 == 0
    fitted = [fit_prototypes(features[part], assignment[part], clusters) for part in (half, ~half)]
    inside = torch.where(half, fitted[1].distance(features), fitted[0].distance(features))
    return OutlierReference(tuple(fitted), inside)


def score_outside(
    inside: ModelOutputs, outside: ModelOutputs, by: OutlierReference
) -> dict[str, dict[str, float | None]]:
    """How well images from elsewhere are told apart: by each head's confidence (the paper's protocol), by distance."""
    scores = {key: (inside.heads[key].max(axis=1), outside.heads[key].max(axis=1)) for key in inside.heads}
    scores["distance"] = (-by.inside.numpy(), -by.distance(outside.features).numpy())
    return {key: summary_outliers(*pair) for key, pair in scores.items()}


def _settings(subject: EvaluatedModel) -> RefineConfig:
    """Those of its run, else the usual ones: so much is drawn by chance as at the end of a run."""
    return subject.run.config if subject.run is not None else RefineConfig()
