"""Predictions as Label Studio tasks with pre-annotations, and the labelling interface that they fit.

Images are served by Label Studio from the disk: it is started with the parent of the image folder as document root
(it serves sub-folders of that root only).
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
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.evaluation.writers.names import cluster_names, plain_rows, unicode_name, write_entries

CONTROL, OBJECT = "cluster", "image"  # names that the interface gives and predictions refer to
_UNSAFE = re.compile(rb"[^A-Za-z0-9_.~/-]")  # everything else is percent-encoded in a URL


def write(out: Path, table: np.recarray, folder: Path) -> list[Path]:
    """The tasks at ``out`` and the interface beside it; all columns are in ``data``, to sort and filter by."""
    names = cluster_names(table)
    config = out.with_suffix(".xml")
    write_atomically(config, lambda temporary: temporary.write_text(interface(names), encoding="utf-8"))
    write_entries(out, "[", _tasks(table, names, folder), "\n]\n")
    return [out, config]


def local_url(folder: Path, name: str) -> str:
    """Where Label Studio serves an image, its document root being the parent of ``folder``."""
    path = os.fsencode(f"{folder.name}/{name}")
    return "/data/local-files/?d=" + _UNSAFE.sub(lambda found: b"%%%02X" % found[0][0], path).decode("ascii")


def interface(names: list[str]) -> str:
    """The labelling interface: the image and one choice a cluster."""
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
    for path, values in zip(table["path"].tolist(), plain_rows(table), strict=True):
        choices = {"choices": [names[values["cluster"]]]}
        result = {"from_name": CONTROL, "to_name": OBJECT, "type": "choices", "value": choices}
        prediction = {"model_version": writer, "score": values["confidence"], "result": [result]}
        data = {OBJECT: local_url(folder, path), "path": unicode_name(path), **values}
        yield encode({"data": data, "predictions": [prediction]})
