"""Find nearest neighbours by cosine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.errors import UserError


def nearest_neighbours(features: Tensor, count: int) -> Tensor:
    """Rows (N, k) of the k = min(count, N - 1) nearest by cosine, nearest first; none is its own neighbour.

    Args:
        features: (N, D), of any length.
    """
    if len(features) < 2:
        raise UserError(f"neighbours are looked for among at least 2 images; found {len(features)}: add images")
    unit = F.normalize(features, dim=1)
    nearest = []
    for rows in torch.arange(len(unit), device=unit.device).split(1024):
        likeness = unit[rows] @ unit.T
        likeness[torch.arange(len(rows), device=unit.device), rows] = -2.0  # below every cosine
        nearest.append(likeness.topk(min(count, len(unit) - 1), dim=1).indices)
    return torch.cat(nearest)
