"""Choose the augmentation that suits the data, by asking the backbone instead of the user.

A self-supervised backbone has learnt to overlook the changes it was pretrained with. Digits are pretrained
without mirroring, and mirrored ones land in other clusters: so they must not be mirrored here either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cdc_plugin.config.schema import AugmentConfig
from cdc_plugin.data.images import ImageSet
from cdc_plugin.data.views import plain_view, view_settings, weak_view
from cdc_plugin.models.backbone import Backbone

SAMPLE = 512
CROP_SCALES = (0.2, 0.4, 0.6, 0.8)  # SCAN's 0.2 first, then milder ones
# A change is overlooked if it moves few more images to another cluster than the mildest crop does.
FLIP_SHARE, CROP_SHARE = 0.9, 0.95


@torch.no_grad()
def choose_augmentation(
    asked: AugmentConfig,
    backbone: Backbone,
    head: nn.Module,
    images: ImageSet,
    device: torch.device,
    generator: torch.Generator,
) -> tuple[AugmentConfig, dict[str, float]]:
    """Fill in ``flip`` and ``crop_scale`` where they are None; return them with the measured agreements.

    Agreement is the share of a sample of images that the freshly initialised head puts into the same cluster
    with and without the change.
    """
    if asked.flip is not None and asked.crop_scale is not None:
        return asked, {}
    chosen = torch.randperm(len(images), generator=generator)[:SAMPLE].sort().values
    pixels = images.batch(chosen)
    backbone.eval()
    head.eval()

    def clusters(view: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([head(backbone(view(part.to(device)))).argmax(dim=1) for part in pixels.split(128)])

    plain = view_settings(backbone)
    reference = clusters(lambda part: plain_view(part, plain))

    def agreement(view: Callable[[Tensor], Tensor]) -> float:
        return (clusters(view) == reference).float().mean().item()

    measured = {"flip": agreement(lambda part: plain_view(part.flip(-1), plain))}
    for scale in CROP_SCALES:
        settings = view_settings(backbone, flip=False, crop_scale=scale)
        measured[f"crop {scale}"] = agreement(lambda part, s=settings: weak_view(part, s, generator))  # type: ignore[misc]
    mildest = measured[f"crop {CROP_SCALES[-1]}"]
    flip, crop_scale = asked.flip, asked.crop_scale
    if flip is None:
        flip = measured["flip"] >= FLIP_SHARE * mildest
    if crop_scale is None:
        crop_scale = next(s for s in CROP_SCALES if measured[f"crop {s}"] >= CROP_SHARE * mildest)
    return dataclasses.replace(asked, flip=flip, crop_scale=crop_scale), measured
