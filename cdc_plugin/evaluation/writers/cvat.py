"""Predictions for CVAT: its own XML, the labels that a task needs for it, and a COCO-style classification CSV.

CVAT imports no CSV of classes. What it does import with tags and their attributes is "CVAT for images 1.1" (XML);
the CSV holds the same for tools and scripts that take a table.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import numpy as np

from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.evaluation.writers.names import cluster_names, plain_columns

logger = logging.getLogger(__name__)

# CVAT finds an image by its name, and, where there is none of that name, by this number. Numbers that no task
# reaches turn a wrong tag on a wrong image into CVAT's error that the image is not in the task.
FIRST_ID = 1_000_000_000
FLAGS = ("outlier", "selected")
# Characters that no XML 1.0 document may hold, escaped or not; lone surrogates are bytes that are not UTF-8.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def write(out: Path, table: np.recarray, folder: Path) -> list[Path]:
    """``NAME.xml``, ``NAME.csv`` and ``NAME.labels.json`` beside one another, whichever of them ``out`` names."""
    names, columns = cluster_names(table), plain_columns(table)
    labels = label_specification(names, [column for column in FLAGS if column in columns])
    xml, labels_file, table_file = (out.with_suffix(suffix) for suffix in (".xml", ".labels.json", ".csv"))
    paths = table["path"].tolist()
    _write_text(labels_file, json.dumps(labels, indent=2) + "\n")
    _write_csv(table_file, paths, names, columns)
    _write_text(xml, document(paths, names, labels, columns))
    return [xml, table_file, labels_file]


def label_specification(names: list[str], flags: list[str]) -> list[dict[str, Any]]:
    """The labels of a task as CVAT's raw label editor takes them; it drops attributes that are not in there."""
    number = {"mutable": False, "input_type": "number", "default_value": "0"}
    attributes = [
        {"name": "confidence", **number, "values": ["0", "1", "0.000001"]},
        {"name": "second_cluster", **number, "values": ["0", str(len(names) - 1), "1"]},
        *(
            {"name": flag, "mutable": False, "input_type": "checkbox", "default_value": "false", "values": ["false"]}
            for flag in flags
        ),
    ]
    return [{"name": name, "type": "tag", "attributes": attributes} for name in names]


def document(paths: list[str], names: list[str], labels: list[dict[str, Any]], columns: dict[str, list[Any]]) -> str:
    """The XML: the labels, then one image with one tag a row."""
    parts = ['<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n<version>1.1</version>\n<meta><task><labels>\n']
    parts += [_label_element(label) for label in labels]
    parts.append("</labels></task></meta>\n")
    shown = [attribute["name"] for attribute in labels[0]["attributes"]] if labels else []
    pattern = "".join(f'<attribute name="{name}">%s</attribute>' for name in shown)
    values = zip(*(_texts(name, columns[name]) for name in shown), strict=True)
    rows = zip(paths, _findable(paths), columns["cluster"], values, strict=True)
    parts += [
        f'<image id="{FIRST_ID + row}" name={_quoted(path)}>'
        f'<tag label="{names[cluster]}" source="auto">{pattern % texts}</tag></image>\n'
        for row, (path, findable, cluster, texts) in enumerate(rows)
        if findable
    ]
    return "".join([*parts, "</annotations>\n"])


def _findable(paths: list[str]) -> list[bool]:
    """Which images CVAT can tell by their name; one that it can not find makes it refuse the whole file."""
    stems = [os.path.splitext(path)[0] for path in paths]
    counts = Counter(stems)  # CVAT compares names without their extension
    found = [counts[stem] == 1 and not _NOT_XML.search(path) for stem, path in zip(stems, paths, strict=True)]
    if not all(found):
        logger.warning(
            "%d images are in the CSV but not in the XML, %r for one: CVAT tells no two images apart that differ in "
            "their extension only, and takes no names that are not Unicode text",
            len(paths) - sum(found),
            paths[found.index(False)],
        )
    return found


def _quoted(text: str) -> str:
    return quoteattr(text, {"\n": "&#10;", "\r": "&#13;", "\t": "&#9;"})


def _texts(name: str, values: list[Any]) -> list[str]:
    if name in FLAGS:
        return ["true" if value else "false" for value in values]
    return [str(value) for value in values]


def _label_element(label: dict[str, Any]) -> str:
    attributes = "".join(
        f"<attribute><name>{each['name']}</name><mutable>False</mutable><input_type>{each['input_type']}</input_type>"
        f"<default_value>{each['default_value']}</default_value><values>{chr(10).join(each['values'])}</values>"
        "</attribute>"
        for each in label["attributes"]
    )
    return f"<label><name>{label['name']}</name><type>tag</type><attributes>{attributes}</attributes></label>\n"


def _write_csv(file: Path, paths: list[str], names: list[str], columns: dict[str, list[Any]]) -> None:
    others = [name for name in columns if name not in ("cluster", "confidence")]
    content = [paths, columns["cluster"], [names[cluster] for cluster in columns["cluster"]], columns["confidence"]]
    content += [columns[name] for name in others]

    def fill(temporary: Path) -> None:
        # File names need not be valid UTF-8; their bytes are written as they are, as in every CSV of this package.
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape", newline="") as text:
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(["file_name", "category_id", "category_name", "score", *others])
            writer.writerows(zip(*content, strict=True))

    write_atomically(file, fill)


def _write_text(file: Path, text: str) -> None:
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))
