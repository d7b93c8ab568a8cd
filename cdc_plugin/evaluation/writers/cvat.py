"""Predictions for CVAT: its own XML, the labels that a task needs for it, and a COCO-style classification CSV.

CVAT does not import a CSV of classes. It imports tags with attributes from "CVAT for images 1.1" (XML); the CSV holds
the same for tools and scripts that read tables, with names escaped as in every CSV of this package.
"""

import json
import logging
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import numpy as np

from cdc_plugin.data.atomic import join_csv, write_text
from cdc_plugin.evaluation.writers.files import convert_columns, name_clusters

logger = logging.getLogger(__name__)

# CVAT finds an image by its name and, failing that, by this number. Numbers that no task reaches turn a tag on the
# wrong image into CVAT's error that the image is not in the task.
FIRST_ID = 1_000_000_000
FLAGS = ("outlier", "selected")
# Characters that no XML 1.0 document may hold, escaped or not; lone surrogates are bytes that are not UTF-8.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def write_cvat(out: Path, table: np.recarray, folder: Path) -> list[Path]:
    """Write ``NAME.xml``, ``NAME.csv`` and ``NAME.labels.json`` side by side, whichever of them ``out`` names."""
    names, columns = name_clusters(table), convert_columns(table)
    labels = _build_labels(names, [column for column in FLAGS if column in columns])
    files = [out.with_suffix(suffix) for suffix in (".xml", ".csv", ".labels.json")]
    paths = table["path"].tolist()
    write_text(files[2], json.dumps(labels, indent=2) + "\n")
    _write_csv(files[1], paths, names, columns)
    write_text(files[0], _build_xml(paths, names, labels, columns))
    return files


def _build_labels(names: list[str], flags: list[str]) -> list[dict[str, Any]]:
    """Return the labels of a task for CVAT's raw label editor; CVAT drops attributes that are not declared there."""
    number = {"mutable": False, "input_type": "number", "default_value": "0"}
    checkbox = {"mutable": False, "input_type": "checkbox", "default_value": "false", "values": ["false"]}
    attributes = [
        {"name": "confidence", **number, "values": ["0", "1", "0.000001"]},
        {"name": "second_cluster", **number, "values": ["0", str(len(names) - 1), "1"]},
        *({"name": flag, **checkbox} for flag in flags),
    ]
    return [{"name": name, "type": "tag", "attributes": attributes} for name in names]


def _build_xml(paths: list[str], names: list[str], labels: list[dict[str, Any]], columns: dict[str, list[Any]]) -> str:
    """Return the XML: the labels, then one image with one tag per row."""
    parts = ['<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n<version>1.1</version>\n<meta><task><labels>\n']
    parts += [_build_label(label) for label in labels]
    parts.append("</labels></task></meta>\n")
    shown = [attribute["name"] for attribute in labels[0]["attributes"]] if labels else []
    pattern = "".join(f'<attribute name="{name}">%s</attribute>' for name in shown)
    texts_of = {name: [str(bool(value)).lower() for value in columns[name]] for name in FLAGS if name in shown}
    values = zip(*(texts_of.get(name, columns[name]) for name in shown), strict=True)
    rows = zip(paths, _find_unambiguous(paths), columns["cluster"], values, strict=True)
    parts += [
        f'<image id="{FIRST_ID + row}" name={quoteattr(path)}>'
        f'<tag label="{names[cluster]}" source="auto">{pattern % texts}</tag></image>\n'
        for row, (path, unambiguous, cluster, texts) in enumerate(rows)
        if unambiguous
    ]
    return "".join([*parts, "</annotations>\n"])


def _find_unambiguous(paths: list[str]) -> list[bool]:
    """Return which images CVAT can identify by name; a single one that it cannot find makes it refuse the file."""
    stems = [os.path.splitext(path)[0] for path in paths]
    counts = Counter(stems)  # CVAT compares names without their extension
    unambiguous = [counts[stem] == 1 and not _NOT_XML.search(path) for stem, path in zip(stems, paths, strict=True)]
    if not all(unambiguous):
        logger.warning(
            "%d images are in the CSV but not in the XML, such as %r: CVAT cannot distinguish images that differ only "
            "in their extension, and takes only names that are Unicode text",
            len(paths) - sum(unambiguous),
            paths[unambiguous.index(False)],
        )
    return unambiguous


def _build_label(label: dict[str, Any]) -> str:
    attributes = "".join(
        f"<attribute><name>{attribute['name']}</name><mutable>False</mutable><input_type>{attribute['input_type']}</input_type>"
        f"<default_value>{attribute['default_value']}</default_value><values>{chr(10).join(attribute['values'])}</values>"
        "</attribute>"
        for attribute in label["attributes"]
    )
    return f"<label><name>{label['name']}</name><type>tag</type><attributes>{attributes}</attributes></label>\n"


def _write_csv(file: Path, paths: list[str], names: list[str], columns: dict[str, list[Any]]) -> None:
    others = [name for name in columns if name not in ("cluster", "confidence")]
    content = [paths, columns["cluster"], [names[cluster] for cluster in columns["cluster"]], columns["confidence"]]
    content += [columns[name] for name in others]
    header = ["file_name", "category_id", "category_name", "score", *others]
    write_text(file, join_csv([header, *zip(*content, strict=True)]))
