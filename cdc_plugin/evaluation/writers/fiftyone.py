"""Predictions as the labels.json of a ``FiftyOneImageClassificationDataset``.

Images are keyed by their absolute path, which FiftyOne takes as it is: the images stay where they are, two that
differ in their extension only stay apart, and no data folder needs to be named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cdc_plugin.evaluation.writers.names import cluster_names, plain_rows, unicode_name, write_entries


def write(out: Path, table: np.recarray, folder: Path) -> list[Path]:
    """The cluster becomes the label, its confidence the confidence, every other column an attribute of the label."""
    classes = json.dumps(cluster_names(table))
    write_entries(out, f'{{"classes": {classes},\n"labels": {{', _labels(table, folder), "\n}}\n")
    return [out]


def _labels(table: np.recarray, folder: Path) -> Iterator[str]:
    encode = json.JSONEncoder(ensure_ascii=False).encode
    for name, values in zip(table["path"].tolist(), plain_rows(table, bool), strict=True):
        path = unicode_name(os.path.join(folder, name.replace("/", os.sep)))
        # The label is an index into the classes.
        label = {"label": values.pop("cluster"), "confidence": values.pop("confidence"), "attributes": values}
        yield f"{encode(path)}: {encode(label)}"
