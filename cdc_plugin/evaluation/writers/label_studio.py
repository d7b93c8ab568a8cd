"""Predictions as Label Studio tasks with pre-annotations, and the labelling interface that they fit.

Label Studio serves the images from disk: it is started with the parent of the image folder as document root (it serves
only sub-folders of that root).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from cdc_plugin import __version__
from cdc_plugin.evaluation.writers.names import convert_rows, escape_name, name_clusters, write_entries, write_text

CONTROL, OBJECT = "cluster", "image"  # names in the interface that predictions refer to
_UNSAFE = re.compile(rb"[^A-Za-z0-9_.~/-]")  # everything else is percent-encoded in a URL


def write(out: Path, table: np.recarray, folder: Path) -> list[Path]:
    """Write the tasks to ``out`` and the interface beside it; all columns are in ``data``, to sort and filter by."""
    names = name_clusters(table)
    config = out.with_suffix(".xml")
    write_text(config, build_interface(names))
    write_entries(out, "[", _tasks(table, names, folder), "\n]\n")
    return [out, config]


def build_url(folder: Path, name: str) -> str:
    """Return where Label Studio serves an image if its document root is the parent of ``folder``."""
    path = os.fsencode(f"{folder.name}/{name}")
    return "/data/local-files/?d=" + _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], path).decode("ascii")


def build_interface(names: list[str]) -> str:
    """Return the labelling interface: the image and one choice per cluster."""
    view = ElementTree.Element("View")
    ElementTree.SubElement(view, "Image", name=OBJECT, value=f"${OBJECT}", zoom="true")
    choices = ElementTree.SubElement(view, "Choices", name=CONTROL, toName=OBJECT, choice="single", showInLine="true")
    for name in names:
        ElementTree.SubElement(choices, "Choice", value=name)
    ElementTree.indent(view)
    return ElementTree.tostring(view, encoding="unicode") + "\n"


def _tasks(table: np.recarray, names: list[str], folder: Path) -> Iterator[str]:
    encode = json.JSONEncoder(ensure_ascii=False).encode
    writer = f"cdc-plugin {__version__}"
    for path, values in zip(table["path"].tolist(), convert_rows(table), strict=True):
        choices = {"choices": [names[values["cluster"]]]}
        result = {"from_name": CONTROL, "to_name": OBJECT, "type": "choices", "value": choices}
        prediction = {"model_version": writer, "score": values["confidence"], "result": [result]}
        data = {OBJECT: build_url(folder, path), "path": escape_name(path), **values}
        yield encode({"data": data, "predictions": [prediction]})
