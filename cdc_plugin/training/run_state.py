"""What a run knows between its steps, and what it keeps of that on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.images import ImageSet
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.training.distributed import SINGLE, Distributed
from cdc_plugin.training.refiner import Refiner


@dataclasses.dataclass
class Run:
    """What a run knows between its steps."""

    config: RefineConfig
    folder: Path
    device: torch.device
    images: ImageSet
    model: Clusterer
    before: dict[str, Any]
    history: list[dict[str, float]]
    start: torch.Tensor | None = None  # (N,) k-means on the features that the run began with
    old: dict[str, Any] | None = None  # the model that is retrofitted: its figures, and (N,) its assignment
    last_epochs: list[torch.Tensor] = dataclasses.field(default_factory=list)  # clusters of some images, see `watch`
    setback: int | None = None  # the epoch in which a loss was not finite, where that has happened
    state: dict[str, Any] | None = None
    distributed: Distributed = SINGLE


def state_of(current: Run, refiner: Refiner) -> dict[str, Any]:
    """Everything that `restart` needs."""
    backbone = current.model.backbone
    return {
        "version": 1,
        "refiner": refiner.state(),
        "frozen": backbone.module.state_dict() if current.config.freeze_backbone else None,
        "backbone": {
            "feature_dim": backbone.feature_dim,
            "mean": backbone.mean.tolist(),
            "std": backbone.std.tolist(),
            "input_size": backbone.input_size,
            "spec": backbone.spec,
        },
        "heads": current.model.calibration_head.spec,
        "before": current.before,
        "start": current.start,
        "old": current.old,
        "last_epochs": current.last_epochs,
        "setback": current.setback,
        "history": current.history,
        "digest": current.images.digest,
    }


def provenance(config: RefineConfig, images: ImageSet, card: dict[str, Any]) -> dict[str, Any]:
    """Where a model comes from, and what was said of it, for its model.json."""
    return {
        "tool": "cdc_plugin",
        "backbone": config.backbone,
        "data": images.source,
        "data_digest": images.digest,
        "epochs": config.epochs,
        "seed": config.seed,
        "expected_accuracy": round(card["expected_accuracy"], 4),
        "warnings": [warning["text"] for warning in card["warnings"]],
    }
