"""Out-of-distribution detection: whether a score tells images like those of the training from foreign ones.

Scores, of N inside and M outside images, are any finite numbers, higher = more inside: the largest probability (the
paper's protocol) or minus a distance. The inside images are the positive class in all three figures.
"""

import numpy as np
from numpy.typing import ArrayLike

from cdc_plugin.errors import UserError
from cdc_plugin.metrics.confidence import Thresholds, area_under_roc, check_scores, false_positive_rate, thresholds


def outlier_auroc(inside: ArrayLike, outside: ArrayLike) -> float | None:
    """Return the chance that an inside image outscores an outside one, a tie counting half."""
    return area_under_roc(_ranked(inside, outside))


def outlier_fpr95(inside: ArrayLike, outside: ArrayLike) -> float | None:
    """Return the share of outside images at or above the highest threshold that 95 % of the inside ones reach."""
    return false_positive_rate(_ranked(inside, outside), 95)


def outlier_aupr(inside: ArrayLike, outside: ArrayLike) -> float:
    """Return the average precision of accepting inside images: sum of (recall gained) x (precision there).

    Images of one score are accepted together, and nothing is interpolated. It depends on how many inside and
    outside images there are: a score that tells nothing reaches about N / (N + M).
    """
    found = _ranked(inside, outside)
    precision = found.positives / (found.positives + found.negatives)
    return float(np.sum(precision * np.diff(found.positives, prepend=0)) / found.positives[-1])


def _ranked(inside: ArrayLike, outside: ArrayLike) -> Thresholds:
    groups = {"inside": inside, "outside": outside}
    scores = {name: check_scores(values, f"{name} scores") for name, values in groups.items()}
    for name, values in scores.items():
        if not np.isfinite(values).all():
            raise UserError(
                f"{name} scores are finite; found {int((~np.isfinite(values)).sum())} that are not; "
                "look for images that give NaN"
            )
    is_inside = np.repeat([True, False], [len(values) for values in scores.values()])
    return thresholds(np.concatenate(list(scores.values())), is_inside)
