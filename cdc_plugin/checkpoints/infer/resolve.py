"""Decide by a look at the images what a checkpoint left open: image size, stem and normalisation."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.checkpoints.infer.batchnorm import (
    TRUSTED_MISMATCH,
    batchnorm_mismatch,
    has_statistics,
    input_of,
    normalise,
    sample,
    settle,
)
from cdc_plugin.checkpoints.infer.check import CLEAR_SIZE
from cdc_plugin.data.images import ImageSet, native_size, open_images
from cdc_plugin.models.backbone import Backbone

log = logging.getLogger(__name__)
# Batches after which BatchNorm layers have forgotten how they were initialised (momentum 0.1: 0.5 % is left).
MEMORABLE = 50


def adopt_native_size(backbone: Backbone, source: Any, root: str | None = None) -> None:
    """Set ``input_size`` to the images' own size where the checkpoint left it open and the network is for small images.

    A network trained on 224 px sees next to nothing at 32. Where the stem does not decide, the statistics that the
    BatchNorm layers remember do.
    """
    size = native_size(source) if "input_size" in backbone.inferred else None
    if size is None or size > 96 or size == backbone.input_size:
        return
    small_stem = ((backbone.spec or {}).get("stem") or {}).get("kernel", 7) < 7
    if small_stem or _trained_on_small(backbone, open_images(source, size, labels=False, root=root, limit=64)):
        backbone.input_size = size


def resolve_input(backbone: Backbone, images: ImageSet) -> Backbone:
    """Return the backbone with the stem and normalisation that the images support, where they were left open."""
    if "mean" not in backbone.inferred and not any(name.startswith("stem") for name in backbone.inferred):
        _warn_of_unlike_images(backbone, images)
        return backbone
    resolution = settle(backbone, images.batch(_spread_indices(len(images), 2048)))
    log.info("%s", resolution.reason)
    return resolution.backbone


def _trained_on_small(backbone: Backbone, images: ImageSet) -> bool:
    if not has_statistics(backbone):
        return False
    pixels = normalise(sample(images.batch(torch.arange(len(images))), 64, backbone), input_of(backbone))
    enlarged = F.interpolate(pixels, size=(backbone.input_size,) * 2, mode="bilinear", antialias=True)
    try:
        return CLEAR_SIZE * batchnorm_mismatch(backbone, pixels) <= batchnorm_mismatch(backbone, enlarged)
    except RuntimeError:  # a network that takes one size only, or whose maps vanish at this one
        return False


def _warn_of_unlike_images(backbone: Backbone, images: ImageSet) -> None:
    """Warn where the images contradict the facts a checkpoint states; the facts are not changed."""
    seen = [int(value) for name, value in backbone.state_dict().items() if name.endswith("num_batches_tracked")]
    if not has_statistics(backbone) or max(seen, default=MEMORABLE) < MEMORABLE:
        return
    pixels = sample(images.batch(_spread_indices(len(images), 64)), 64, backbone)
    mismatch = batchnorm_mismatch(backbone, normalise(pixels, input_of(backbone)))
    if mismatch > TRUSTED_MISMATCH:
        log.warning(
            "the images look unlike the training data, or are normalised differently (BatchNorm mismatch %.2f); "
            "cdc-inspect CHECKPOINT --data IMAGES examines this",
            mismatch,
        )


def _spread_indices(count: int, wanted: int) -> Tensor:
    """Return up to ``wanted`` indices, evenly spread over ``count`` images."""
    return torch.linspace(0, count - 1, min(count, wanted)).long()
