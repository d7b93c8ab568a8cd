"""Refusals that all figures share: what is passed must be numbers of the right shape and range."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdc_plugin.errors import UserError

Table = NDArray[np.floating[Any]]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Softmax in half precision overshoots 1 a little and misses the sum of 1; what is further away is no probability.
OVERSHOOT = 1e-3
SUM_TOLERANCE = 1e-2


def probability_table(probs: ArrayLike) -> Table:
    """(N, C) probabilities whose rows sum to 1, in the precision they have, at least float32."""
    table = numbers(probs, "probabilities")
    if table.ndim != 2 or 0 in table.shape:
        raise UserError(f"probabilities have shape (samples, clusters); found {table.shape}; pass one row an image")
    if table.dtype not in (np.float32, np.float64):
        table = table.astype(np.float32 if table.dtype == np.float16 else np.float64)
    _refuse_outside(table, "probabilities")
    sums = table.sum(axis=1)
    if abs(sums - 1).max() > SUM_TOLERANCE:
        raise UserError(
            f"the probabilities of every sample sum to 1; found sums of {sums.min():.4g} to {sums.max():.4g}; "
            "apply softmax to logits before passing them"
        )
    return table


def confidences(values: ArrayLike) -> Floats:
    """(N,) numbers from 0 to 1."""
    found = numbers(values, "confidences").astype(np.float64)
    if found.ndim != 1 or len(found) == 0:
        raise UserError(
            f"confidences are a list of at least one number; found shape {found.shape}; pass one for each image"
        )
    _refuse_outside(found, "confidences")
    return np.clip(found, 0.0, 1.0)


def right_or_wrong(correct: ArrayLike, confidence: Floats) -> NDArray[np.bool_]:
    """(N,) whether each prediction is right: booleans, or the numbers 0 and 1."""
    right = np.asarray(correct)
    if right.shape != confidence.shape:
        raise UserError(
            f"every confidence needs one right-or-wrong; found shapes {confidence.shape} and {right.shape}; "
            "pass both for the same samples"
        )
    if right.dtype != bool and not np.isin(right, (0, 1)).all():
        raise UserError(
            f"right-or-wrong is 1 or 0, True or False; found other values ({right.dtype}); pass predicted == true"
        )
    return right.astype(bool)


def true_column(columns: ArrayLike, table: Table) -> Integers:
    """(N,) the column of every sample's class; a number past the table's last column stands for a class without one."""
    found = np.asarray(columns)
    if found.shape != (len(table),) or not np.issubdtype(found.dtype, np.integer) or found.min() < 0:
        raise UserError(
            f"the true columns are {len(table)} whole numbers from 0 on; found shape {found.shape} of {found.dtype}; "
            "match clusters to labels with true_columns"
        )
    return found.astype(np.int64)


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name} is at least {least}; found {name}={value}; leave it out for the usual number")


def numbers(values: ArrayLike, name: str) -> NDArray[Any]:
    found = np.asarray(values)
    if found.dtype.kind not in "fiub":
        raise UserError(f"{name} are numbers; found {found.dtype}; convert them to float32 first")
    return found


def _refuse_outside(values: NDArray[Any], name: str) -> None:
    low, high = float(values.min()), float(values.max())
    if not (low >= -OVERSHOOT and high <= 1 + OVERSHOOT):  # written so that NaN fails too
        raise UserError(
            f"{name} go from 0 to 1; found {low:.4g} to {high:.4g}; apply softmax to logits before passing them"
        )
