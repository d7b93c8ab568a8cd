"""Define what every selection of pseudo-labels takes and returns."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """Pseudo-labels (B,), which of them are trusted (B,), and how many each cluster may contribute (C,)."""

    labels: Tensor
    mask: Tensor
    quota: Tensor


@dataclass(frozen=True)
class SelectionInput:
    """The outputs of the selecting head for the weak views of a batch."""

    probs: Tensor  # (B, C)
    rows: Tensor  # (B,) numbers of the images in the data set, from 0
    features: Tensor  # (B, D) its input
    hidden: Tensor  # (B, H) the input of its last layer
    shares: Tensor | None = None  # (C,) of the images that the clusters have, where they are not to be of equal size


@dataclass(eq=False)
class Selector:
    """One way to select, built once per run."""

    image_count: int
    clusters: int
    threshold: float  # required confidence, for fixed thresholds
    momentum: float  # share of the past in moving averages
    device: torch.device
    state: dict[str, Tensor] = field(default_factory=dict)  # all that it remembers between batches

    def __call__(self, batch: SelectionInput) -> Selection:
        raise NotImplementedError
