"""Numbers as people read them, and the sentences of the page that depend on them."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.metrics.confidence import accept_to_target

# What the keys of report.json are called; "model" is the one head of an old clustering model.
TITLES = {
    "kmeans": "k-means on the features",
    "clustering_head": "clustering head",
    "calibration_head": "calibration head",
    "model": "the model as it is",
    "distance": "distance",
    "largest_cluster": "largest cluster",
    "empty_clusters": "empty clusters",
}
DASH = "–"
SPACE = "\u00a0"  # no line break between a number and its unit
TARGET = 0.95  # expected accuracy that the headline asks for
# Halves of characters (file names that are not UTF-8) and control characters can not be in an HTML page.
UNWRITABLE = re.compile("[\ud800-\udfff\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")


def percent(value: Any, decimals: int = 1) -> str:
    """Return a fraction as per cent; a dash for None and NaN."""
    if not known(value):
        return DASH
    return f"{100 * value:.{decimals}f}{SPACE}%"


def number(value: Any, decimals: int = 3) -> str:
    return f"{value:,.{decimals}f}" if known(value) else DASH


def count(value: int, noun: str, plural: str | None = None) -> str:
    """ "1 image", "1,797 images"."""
    return f"{value:,}{SPACE}{noun if value == 1 else plural or noun + 's'}"


def known(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def shorten(text: str, length: int = 120) -> str:
    """Long text with its middle left out: the beginning and the end of a path tell most."""
    if len(text) <= length:
        return text
    head = (length - 1) // 3
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def writable(text: str) -> str:
    """Return the text with what no page can hold replaced by the sign for "unknown character"."""
    return UNWRITABLE.sub("\ufffd", text)


def headline(confidence: NDArray[np.floating]) -> str:
    """Return the one sentence: how many images the largest set has that is expected to be 95 % right, and what all are.

    It counts what `cdc-predict --target-accuracy 0.95` would accept.
    """
    values = np.asarray(confidence, dtype=np.float64)
    sure, total, aim = accept_to_target(values, TARGET).count, len(values), percent(TARGET, 0)
    overall = percent(float(values.mean()))
    if sure == 0:
        return (
            f"None of the {count(total, 'image')} can be used at {aim} expected accuracy: the surest one has "
            f"{percent(float(values.max()))}, and {overall} is expected over all."
        )
    if sure == total:
        everything = "The only image" if total == 1 else f"All {count(total, 'image')}"
        return f"{everything} can be used at {aim} expected accuracy; over all images {overall} is expected."
    if sure < total / 2:
        share = f"{percent(sure / total)} of them"
        return (
            f"Only {sure:,} of {count(total, 'image')} ({share}) can be used at {aim} expected accuracy; over all "
            f"images {overall} is expected, so most need a look before they are relied on."
        )
    return (
        f"{sure:,} of {count(total, 'image')} ({percent(sure / total)}) can be used at {aim} expected accuracy; over "
        f"all images {overall} is expected."
    )


def cluster_words(sizes: list[int], confidences: list[float | None]) -> str:
    """Which clusters stand out: the largest, the smallest, the least sure, the empty ones."""
    filled = [(size, number) for number, size in enumerate(sizes) if size]
    size, largest = max(filled, key=lambda entry: entry[0])
    least, smallest = min(filled)
    confidence, unsure = min((value, number) for number, value in enumerate(confidences) if value is not None)
    found = f"{count(len(sizes), 'cluster')}. "
    if len(filled) > 1:
        found += f"The largest is {largest} with {count(size, 'image')}, the smallest {smallest} with {least:,}. "
    found += f"The least sure is {unsure} with {percent(confidence)} mean confidence."
    empty = [str(number) for number, size in enumerate(sizes) if not size]
    if empty:
        named = ", ".join(empty[:20]) + (" and others" if len(empty) > 20 else "")
        found += f" {count(len(empty), 'cluster')} {'is' if len(empty) == 1 else 'are'} empty: {named}."
    return found


def old_model_words(old: dict[str, Any] | None) -> str | None:
    """Return what became of the clusters of the model that was retrofitted."""
    if old is None:
        return None
    stayed = [
        f"{percent(old[key])} of the images {words}"
        for key, words in (("agreement_before", "began in their old cluster"), ("agreement_after", "are in it now"))
        if known(old.get(key))
    ]
    name = f"The old model ({old['writer']})" if old.get("writer") else "The old model"
    return f"{name}: {', '.join(stayed)}." if stayed else None


def outlier_words(table: np.recarray) -> str | None:
    """How many images are flagged as outliers; None where the table has no such column."""
    if "outlier" not in (table.dtype.names or ()):
        return None
    flagged = int(np.count_nonzero(table["outlier"]))
    if not flagged:
        return "No image is flagged as an outlier: none lies far from everything that the model was refined on."
    are = "is" if flagged == 1 else "are"
    return (
        f"{flagged:,} of {count(len(table), 'image')} ({percent(flagged / len(table))}) {are} flagged as outliers: "
        "they lie further from everything that the model was refined on than nearly all of its own images."
    )
