"""Estimate the accuracy of a refined model without labels, with an interval, and set its confidence to that level.

Where features are weak, refinement makes clusters that the features it began with know nothing of, and the heads are
as sure of these as of others. How well the final clusters can be read from the first features tells such runs apart.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.core.sizes import LIKELY


class Constants(NamedTuple):
    """What the estimate weighs its signals by, on the scale of `to_logit`."""

    ceiling: float  # of both signals: what a model is surer of than this says little more
    intercept: float
    of_confidence: float
    of_probe: float
    interval: float  # half its width


# Chosen by tests/benchmarks/arena/choose.py on real sets, each reported only by constants that were chosen without it.
TRAINED = Constants(0.94, -2.36, 1.34, 0.67, 0.65)
FROZEN = Constants(0.88, -0.95, 2.0, 0.03, 0.67)  # the features are those of the start
# Without views little tells where the heads are too sure: the interval is wide.
EMBEDDED = Constants(0.98, 1.29, 1.63, -0.83, 1.25)

TOP = math.log(0.9 / 0.1)  # logit above which nothing but labels tells one accuracy from another; set by hand
DAMPING = 0.2  # set by hand, so that easy sets do not end far below their accuracy
SMALLEST = 900  # images of the smallest set of the arena: for fewer the interval is wider
COLDEST, HOTTEST = 0.05, 20.0
BLOCK = 8192  # rows that are looked at at once


@dataclass(frozen=True)
class Estimate:
    """The accuracy to expect, as fractions of 1, and the interval that it lay in for nine of ten sets left out."""

    accuracy: float
    low: float
    high: float
    doubt: float  # standard error of its logit


def estimate_accuracy(
    confidence: float, probe: float, clusters: int, images: int, constants: Constants = TRAINED
) -> Estimate:
    """Return the estimate for a mean calibrated confidence, where ``probe`` is what `read_linearly` found.

    >>> sure, unsure = (estimate_accuracy(level, 0.9, clusters=10, images=5000) for level in (0.95, 0.5))
    >>> sure.low < sure.accuracy < sure.high, unsure.accuracy < 0.4
    (True, True)
    """
    sure, known = (damp(to_logit(share, clusters), constants.ceiling) for share in (confidence, probe))
    middle = constants.intercept + constants.of_confidence * sure + constants.of_probe * known
    bounds = find_bounds(middle, constants.interval * max(1.0, math.sqrt(SMALLEST / images)))
    low, accuracy, high = (from_logit(level, clusters) for level in (bounds[0], middle, bounds[1]))
    return Estimate(accuracy, low, high, (middle - bounds[0]) / LIKELY)


def find_bounds(middle: float, half: float) -> tuple[float, float]:
    """Return the interval around a logit: of what lies above `TOP`, it only says that it does.

    >>> find_bounds(1.0, 0.5), find_bounds(TOP + 3, 1.0) == (TOP - 1, math.inf)
    ((0.5, 1.5), True)
    """
    high = middle + half
    return min(middle, TOP) - half, high if high < TOP else math.inf


def damp(value: float, ceiling: float) -> float:
    """Return a logit, of which a fifth counts where it is above that of the ceiling.

    >>> damp(-1.0, ceiling=0.5), damp(2.0, ceiling=0.5)
    (-1.0, 0.4)
    """
    limit = math.log(ceiling / (1 - ceiling))
    return min(value, limit + DAMPING * (value - limit))


def to_logit(share: float, clusters: int) -> float:
    """Return the logit of a share on the scale from 0 at chance, 1 / C, to 1.

    >>> to_logit(0.75, clusters=2), round(from_logit(to_logit(0.3, clusters=10), clusters=10), 6)
    (0.0, 0.3)
    """
    above = min(max((share - 1 / clusters) / (1 - 1 / clusters), 0.005), 0.995)
    return math.log(above / (1 - above))


def from_logit(value: float, clusters: int) -> float:
    """Return the share that `to_logit` has made this number of."""
    return 1 / clusters + (1 - 1 / clusters) / (1 + math.exp(-value))


def fit_temperature(logits: Tensor, level: float) -> float:
    """Return the divisor of logits (N, C) by which the mean confidence becomes the level, by bisection.

    >>> round(fit_temperature(Tensor([[2.0, 0.0], [2.0, 0.0]]), level=0.880797), 3)
    1.0
    """
    low, high = math.log(COLDEST), math.log(HOTTEST)
    surest = logits.new_empty(len(logits))
    for _ in range(40):
        middle = (low + high) / 2
        for part, place in zip(logits.split(BLOCK), surest.split(BLOCK), strict=True):
            place.copy_(F.softmax(part / math.exp(middle), dim=1).max(dim=1).values)
        confidence = surest.mean().item()
        low, high = (middle, high) if confidence > level else (low, middle)
    return math.exp((low + high) / 2)
