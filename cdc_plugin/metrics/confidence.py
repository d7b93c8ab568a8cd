"""Whether stated confidences are true: the expected calibration error (Sec. 4.1) and the mean confidence."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdc_plugin.errors import UserError


def expected_calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy over equal-width bins, weighted by their samples.

    A bin holds its upper edge, not its lower one: (0, 1/bins], ..., (1 - 1/bins, 1]; a confidence of 0 goes
    to the first. Libraries differ only for values exactly on an edge (torchmetrics bins [lower, upper) and
    keeps a bin of its own for confidence 1).

    Args:
        confidence: (N,) from 0 to 1.
        correct: (N,) whether each prediction is right.
    """
    stated = _checked(confidence)
    right = np.asarray(correct).astype(np.float64)
    if right.shape != stated.shape:
        raise UserError(
            f"every confidence needs one right-or-wrong; found shapes {stated.shape} and {right.shape}; "
            "pass both for the same samples"
        )
    if bins < 1:
        raise UserError(f"the calibration error takes at least 1 bin; found bins={bins}; 15 is usual")
    inner_edges = np.linspace(0.0, 1.0, bins + 1)[1:-1]
    index = np.searchsorted(inner_edges, stated, side="left")
    gap = np.bincount(index, weights=right - stated, minlength=bins)  # samples x (accuracy - confidence)
    return float(np.abs(gap).sum() / len(stated))


def mean_confidence(confidence: ArrayLike) -> float:
    """Average of the (N,) confidences; equal to the accuracy for a network that is right about itself."""
    return float(_checked(confidence).mean())


def _checked(confidence: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(confidence).astype(np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise UserError(f"confidences are a list of at least one number; found shape {values.shape}")
    # Softmax in half precision overshoots 1 a little; what is further away is no probability.
    if not (values.min() >= -1e-3 and values.max() <= 1 + 1e-3):  # written so that NaN fails too
        raise UserError(
            f"confidences go from 0 to 1; found {values.min():.4g} to {values.max():.4g}; "
            "apply softmax to logits before passing them"
        )
    return np.clip(values, 0.0, 1.0)
