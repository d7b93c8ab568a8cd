"""Temperature scaling (Guo et al. 2017): one number, fitted after training on labelled images, divides the logits."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.errors import UserError

# Where every labelled sample is right, the likelihood grows without end as T falls to 0: T stays in here.
SMALLEST, LARGEST = 0.05, 100.0
_STEPS, _TOLERANCE = 100, 1e-10


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """(N, C) probabilities softmax(z / T); logarithms of probabilities do as logits."""
    return F.softmax(logits / temperature, dim=1)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T, from `SMALLEST` to `LARGEST`, with the smallest mean of -log softmax(z / T)[label]; 1 if all are alike.

    The mean is convex in 1 / T, and its slope is the mean of (expected logit - logit of the label): where
    the slope is 0 is found by Newton's method between two ends that always enclose the place.

    Args:
        logits: (N, C), finite.
        labels: (N,) the right columns. Other numbers mean that no column is right: any column is then as good
            as any other, so that such samples count as ones with the target 1 / C.
    """
    # In 64 bits, which not every device has.
    rows, columns = logits.detach().cpu().double(), labels.cpu().long()
    if len(rows) == 0 or not rows.isfinite().all():
        raise UserError(
            f"a temperature is fitted to finite logits of at least one labelled image; found {len(rows)} images"
            f"{'' if rows.isfinite().all() else ' with NaN or infinite logits'}"
        )
    known = (columns >= 0) & (columns < rows.shape[1])
    chosen = rows.gather(1, columns.where(known, 0).unsqueeze(1)).squeeze(1)
    wanted = chosen.where(known, rows.mean(dim=1)).mean()

    def slope_and_curvature(inverse: float) -> tuple[float, float]:
        probs = F.softmax(rows * inverse, dim=1)
        expected = (probs * rows).sum(dim=1, keepdim=True)
        curvature = (probs * (rows - expected) ** 2).sum(dim=1).mean()
        return (expected.mean() - wanted).item(), curvature.item()

    # Steps are taken in log(1 / T), in which all of the range is within reach of a few.
    low, high, place = -math.log(LARGEST), -math.log(SMALLEST), 0.0
    for _ in range(_STEPS):
        inverse = math.exp(place)
        slope, curvature = slope_and_curvature(inverse)
        if slope == 0:
            break
        low, high = (low, place) if slope > 0 else (place, high)
        newton = place - slope / (curvature * inverse) if curvature > 0 else math.inf
        step = (newton if low < newton < high else (low + high) / 2) - place
        place += step
        if abs(step) < _TOLERANCE:
            break
    return min(max(math.exp(-place), SMALLEST), LARGEST)
