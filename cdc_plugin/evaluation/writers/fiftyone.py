"""Predictions as the labels.json of a ``FiftyOneImageClassificationDataset``.

Images are keyed by their absolute path, which FiftyOne uses as it is: images stay where they are, two that differ only
in their extension stay apart, and no data folder needs to be named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cdc_plugin.evaluation.writers.names import convert_rows, escape_name, name_clusters, write_entries


def write(out: Path, table: np.recarray, folder: Path) -> list[Path]:
    """Write the cluster as label, its confidence as confidence, every other column as an attribute of the label."""
    classes = json.dumps(name_clusters(table))
    write_entries(out, f'{{"classes": {classes},\n"labels": {{', _labels(table, folder), "\n}}\n")
    return [out]


def _labels(table: np.recarray, folder: Path) -> Iterator[str]:
    encode = json.JSONEncoder(ensure_ascii=False).encode
    for name, values in zip(table["path"].tolist(), convert_rows(table, bool), strict=True):
        path = escape_name(os.path.join(folder, name.replace("/", os.sep)))
        # The label is an index into the classes.
        label = {"label": values.pop("cluster"), "confidence": values.pop("confidence"), "attributes": values}
        yield f"{encode(path)}: {encode(label)}"
