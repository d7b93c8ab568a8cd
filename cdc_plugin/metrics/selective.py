"""Selective prediction: accept the images a model is sure of and leave the others to people.

Confidences count as the table states them, in millionths: what is accepted here is what the numbers in the file say,
sums are exact, and the order of the images changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNIT = 1_000_000


@dataclass(frozen=True)
class Acceptance:
    """Which images are accepted.

    Args:
        mask: (N,) True for the accepted ones.
        threshold: every accepted image is at least so sure, no other is; None where nothing is accepted.
        expected_accuracy: mean confidence of the accepted ones, None where there are none.
    """

    mask: NDArray[np.bool_]
    threshold: float | None
    expected_accuracy: float | None

    @property
    def count(self) -> int:
        return int(self.mask.sum())

    @property
    def coverage(self) -> float:
        """Share of all images that is accepted."""
        return self.count / len(self.mask) if len(self.mask) else 0.0


def accept_above(confidence: NDArray[np.floating], threshold: float) -> Acceptance:
    """The images (N,) whose confidence is the threshold or more."""
    parts = _millionths(confidence)
    return _acceptance(parts, _level(threshold))


def accept_to_target(confidence: NDArray[np.floating], target: float) -> Acceptance:
    """The largest set of surest images (N,) whose mean confidence is the target or more.

    Images that are equally sure are taken or left together. Nothing is accepted where even the surest stay below
    the target.
    """
    parts, level = _millionths(confidence), _level(target)
    sorted_parts = np.sort(parts)[::-1]
    sums = np.cumsum(sorted_parts)
    counts = np.arange(1, len(parts) + 1)
    last_of_its_kind = np.append(sorted_parts[1:] != sorted_parts[:-1], True)[: len(parts)]
    reached = np.flatnonzero(last_of_its_kind & (sums >= level * counts))
    return _acceptance(parts, int(sorted_parts[reached[-1]]) if len(reached) else UNIT + 1)


def _acceptance(parts: NDArray[np.int64], lowest: int) -> Acceptance:
    mask = parts >= lowest
    if not mask.any():
        return Acceptance(mask, None, None)
    return Acceptance(mask, lowest / UNIT, int(parts[mask].sum()) / (int(mask.sum()) * UNIT))


def _millionths(confidence: NDArray[np.floating]) -> NDArray[np.int64]:
    values = np.asarray(confidence, dtype=np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1 + 1e-6)).all():
        raise ValueError("expected confidences (N,) from 0 to 1")
    return np.rint(values * UNIT).clip(0, UNIT).astype(np.int64)


def _level(share: float) -> int:
    if not 0 < share <= 1:
        raise ValueError(f"expected a share above 0 and up to 1, found {share}")
    return round(share * UNIT)
