"""Out-of-distribution detection: whether a score tells images like those of the training from foreign ones.

Scores are any finite numbers, higher = more inside: the largest probability (the paper's protocol) or minus a
distance. The inside images are the positive class in all three figures.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from cdc_plugin.errors import UserError
from cdc_plugin.metrics.rejection import Thresholds, area_under_roc, average_precision, false_positive_rate, thresholds
from cdc_plugin.metrics.validation import Floats, numbers


def outlier_auroc(inside: ArrayLike, outside: ArrayLike) -> float | None:
    """Chance that an inside image outscores an outside one, a tie counting half.

    Args:
        inside: (N,) scores of images like those that the model was made with.
        outside: (M,) scores of foreign images.
    """
    return area_under_roc(_ranked(inside, outside))


def outlier_fpr95(inside: ArrayLike, outside: ArrayLike) -> float | None:
    """Share of the outside images accepted at the highest threshold that keeps 95 % of the inside ones.

    All images at the threshold itself are accepted.
    """
    return false_positive_rate(_ranked(inside, outside), 95)


def outlier_aupr(inside: ArrayLike, outside: ArrayLike) -> float | None:
    """Average precision of accepting inside images: sum over thresholds of (recall gained) x (precision there).

    Images of one score are accepted together. It depends on how many inside and outside images there are: a
    score that tells nothing reaches about N / (N + M).
    """
    return average_precision(_ranked(inside, outside))


def _ranked(inside: ArrayLike, outside: ArrayLike) -> Thresholds:
    first, second = _scores(inside, "inside"), _scores(outside, "outside")
    is_inside = np.repeat([True, False], [len(first), len(second)])
    return thresholds(np.concatenate([first, second]), is_inside)


def _scores(values: ArrayLike, name: str) -> Floats:
    found = numbers(values, f"{name} scores").astype(np.float64)
    if found.ndim != 1 or len(found) == 0:
        raise UserError(
            f"{name} scores are a list of at least one number; found shape {found.shape}; pass one for each image"
        )
    if not np.isfinite(found).all():
        raise UserError(
            f"{name} scores are finite; found {int((~np.isfinite(found)).sum())} that are not; "
            "look for images that give NaN"
        )
    return found
