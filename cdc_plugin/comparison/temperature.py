"""Fit the temperature of logits to given classes, as two rows of a comparison do: one with labels and one without."""

import math

import torch.nn.functional as F
from torch import Tensor

# If every sample is right, the likelihood grows without bound as T falls to 0: T stays in here.
SMALLEST, LARGEST = 0.05, 100.0


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the T, from `SMALLEST` to `LARGEST`, that minimises the mean of -log softmax(z / T)[label].

    The mean is convex in 1 / T: T is where its slope, the mean of (expected logit - logit of the label), is 0. If
    all temperatures are equally good, T is 1. A label that is no column of the logits (N, C) means that none is right:
    any is then as good as any other, so such samples have the target 1 / C.
    """
    from scipy.optimize import brentq

    # In 64 bits, which not every device has.
    rows, columns = logits.detach().cpu().double(), labels.cpu().long()
    has_column = (columns >= 0) & (columns < rows.shape[1])
    labelled = rows.gather(1, columns.where(has_column, 0).unsqueeze(1)).squeeze(1)
    target = labelled.where(has_column, rows.mean(dim=1)).mean()

    def slope(log_inverse: float) -> float:
        probs = F.softmax(rows * math.exp(log_inverse), dim=1)
        return ((probs * rows).sum(dim=1).mean() - target).item()

    # The slope rises with log(1 / T), in which all of the range is within reach of a few steps.
    low, high = -math.log(LARGEST), -math.log(SMALLEST)
    if slope(0.0) == 0:
        return 1.0
    if slope(low) >= 0:
        return LARGEST
    return SMALLEST if slope(high) <= 0 else math.exp(-brentq(slope, low, high, xtol=1e-10))
