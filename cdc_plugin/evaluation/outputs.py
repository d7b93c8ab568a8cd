"""Run a model on images, measure its outputs, and score how well it recognises images from elsewhere."""

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
from cdc_plugin.errors import CheckpointError
from cdc_plugin.evaluation.models import EvaluatedModel
from cdc_plugin.evaluation.quality import Evidence, assess
from cdc_plugin.evaluation.records import measure
from cdc_plugin.metrics import summary_outliers
from cdc_plugin.training.batches import choose_augmentation, predict_augmented
from cdc_plugin.training.features import (
    extract_features,
    head_probabilities,
    kmeans_assignment,
)
from cdc_plugin.training.progress import show_progress
from cdc_plugin.training.runtime import Runtime

# Small models trained by the losses of SCAN and SeCu were 25 to 29 points too confident on 5,000 Fashion-MNIST images.
UNCALIBRATED = {
    "kind": "uncalibrated",
    "text": "This model has no calibration head, so its confidence is uncalibrated. Networks trained on their own "
    "pseudo-labels are usually far too confident; cdc-refine with --init keep calibrates the model.",
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
        """Return the probabilities of the head that predicts; it comes last."""
        return list(self.heads.values())[-1]


@dataclass(frozen=True)
class OutlierReference:
    """Prototypes to measure distances from, and the distances (N,) of the inside images.

    No image is measured by prototypes that were fitted on it: it would seem closer than it is.
    """

    prototypes: tuple[Prototypes, ...]
    inside: Tensor

    def distance(self, features: Tensor) -> Tensor:
        return torch.stack([prototypes.distance(features) for prototypes in self.prototypes]).mean(dim=0)


def run_model(evaluated: EvaluatedModel, images: ImageSet, device: torch.device) -> ModelOutputs:
    """Run a model on every image; a model with one head has one entry."""
    model = evaluated.model
    features = extract_features(model.backbone, images, Runtime(device, progress=show_progress))
    if not torch.isfinite(features).all():
        raise CheckpointError(
            f"{evaluated.path or 'the model'} gives features that are not finite: is this the right file?"
        )
    if evaluated.heads == 1:
        return ModelOutputs(features, {"model": head_probabilities(model.calibration_head, features)})
    heads = {"clustering_head": model.clustering_head, "calibration_head": model.calibration_head}
    return ModelOutputs(features, {key: head_probabilities(head, features) for key, head in heads.items()})


def cluster_by_kmeans(evaluated: EvaluatedModel, outputs: ModelOutputs, device: torch.device) -> NDArray[np.int64]:
    """Return the assignment (N,) of k-means on the same features, as at the end of a run."""
    randomness = generator(_settings(evaluated).seed, FINAL)
    return kmeans_assignment(outputs.features.to(device), evaluated.model.clusters, randomness)


def measure_outputs(
    outputs: ModelOutputs, kmeans: NDArray[np.int64], labels: NDArray[np.int64] | None
) -> dict[str, dict[str, Any]]:
    """Return the figures of k-means and of each head, under the key of each in report.json."""
    figures = measure(outputs.clustering, outputs.calibration, kmeans, labels)
    return {"kmeans": figures["kmeans"]} | {key: figures.get(key, figures["calibration_head"]) for key in outputs.heads}


def quality_card(
    evaluated: EvaluatedModel, outputs: ModelOutputs, kmeans: NDArray[np.int64], images: ImageSet, device: torch.device
) -> dict[str, Any]:
    """Return the label-free card, as at the end of a run; with one head, there is no agreement of heads."""
    config, model = _settings(evaluated), evaluated.model
    backbone, head, runtime = model.backbone, model.calibration_head, Runtime(device)
    randomness = generator(config.seed, AUGMENTATION)
    augment, _ = choose_augmentation(config.augment, backbone, head, images, runtime, randomness)
    seen, augmented = predict_augmented(backbone, head, images, augment, runtime, generator(config.seed, QUALITY))
    clustering, calibration, partition = map(torch.from_numpy, (outputs.clustering, outputs.calibration, kmeans))
    card = assess(Evidence(clustering, calibration, outputs.features, partition, seen, augmented))
    if evaluated.heads > 1:
        return card
    warnings = [UNCALIBRATED, *card["warnings"]]
    return card | {"heads_agree": None, "clustering_confidence": None, "warnings": warnings}


def outlier_reference(outputs: ModelOutputs, prototypes: Prototypes | None) -> OutlierReference:
    """Measure by the given prototypes, which saw none of the images; else measure each half by the other's."""
    if prototypes is not None:
        return OutlierReference((prototypes,), prototypes.distance(outputs.features))
    features, clusters = outputs.features, outputs.calibration.shape[1]
    assignment = torch.from_numpy(outputs.calibration.argmax(axis=1))
    half = torch.arange(len(features)) % 2 == 0
    fitted = [fit_prototypes(features[part], assignment[part], clusters) for part in (half, ~half)]
    inside = torch.where(half, fitted[1].distance(features), fitted[0].distance(features))
    return OutlierReference(tuple(fitted), inside)


def score_outside(
    inside: ModelOutputs, outside: ModelOutputs, reference: OutlierReference
) -> dict[str, dict[str, float | None]]:
    """Return how well outside images are recognised: by each head's confidence (the paper's protocol), by distance."""
    scores = {key: (inside.heads[key].max(axis=1), outside.heads[key].max(axis=1)) for key in inside.heads}
    scores["distance"] = (-reference.inside.numpy(), -reference.distance(outside.features).numpy())
    return {key: summary_outliers(*pair) for key, pair in scores.items()}


def _settings(evaluated: EvaluatedModel) -> RefineConfig:
    """Return the settings of its run, else the defaults, so that random choices match the end of a run."""
    return evaluated.run.config if evaluated.run is not None else RefineConfig()
