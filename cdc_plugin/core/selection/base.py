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
    """The outputs of the selecting head for the weak views of a batch.

    Args:
        probs: (B, C) its probabilities.
        rows: (B,) numbers of the images in the data set, from 0.
        features: (B, D) its input.
        hidden: (B, H) the input of its last layer.
    """

    probs: Tensor
    rows: Tensor
    features: Tensor
    hidden: Tensor


@dataclass(eq=False)
class Selector:
    """One way to select, built once per run; ``state`` is all that it remembers between batches.

    Args:
        image_count: N.
        clusters: C.
        threshold: required confidence, for fixed thresholds.
        momentum: share of the past in moving averages.
        device: device of the state.
    """

    image_count: int
    clusters: int
    threshold: float
    momentum: float
    device: torch.device
    state: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, batch: SelectionInput) -> Selection:
        raise NotImplementedError
