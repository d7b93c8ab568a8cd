"""Bring vectors that other networks have computed to one scale: the backbone of a run on features."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class FeatureScaler(nn.Module):
    """Vectors (N, D) of one space or several side by side, with the same mean square in each of these spaces."""

    shift: Tensor
    scale: Tensor

    def __init__(self, spaces: Sequence[int]) -> None:
        super().__init__()
        self.spaces = list(spaces)
        self.register_buffer("shift", torch.zeros(sum(spaces)))
        self.register_buffer("scale", torch.ones(sum(spaces)))

    def fit(self, rows: Tensor) -> None:
        """Take shift and scale from some rows (n, D)."""
        rows = rows.double()  # in which no square is too large or too small
        if len(self.spaces) > 1:
            self.shift.copy_(rows.mean(dim=0))
        lengths = [part.square().sum(dim=1).mean().sqrt() for part in (rows - self.shift).split(self.spaces, dim=1)]
        lengths = [length if length > 0 else torch.ones_like(length) for length in lengths]
        scales = [(1 / length).expand(size) for length, size in zip(lengths, self.spaces, strict=True)]
        self.scale.copy_(torch.cat(scales))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows.float() - self.shift) * self.scale


def build_features(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return the scaler of a spec ``{"family": "features", "spaces": [512, 768]}``, and how many numbers it gives."""
    scaler = FeatureScaler([int(size) for size in spec["spaces"]])
    return scaler, len(scaler.scale)
