"""Build the records of a run: report.json and predictions.csv, and the figures in them with and without labels."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cdc_plugin.config.recipes import DEMO_BACKBONE
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.core.hierarchy import sum_groups
from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.data.atomic import join_csv, open_atomically
from cdc_plugin.data.images import ImageSet
from cdc_plugin.errors import join_words
from cdc_plugin.metrics import summary, summary_hard, summary_unlabelled
from cdc_plugin.metrics.over_seeds import Row
from cdc_plugin.training.run_folder import CONFIG

BLOCK = 8192  # rows of a table that are sorted or formatted at once
Probabilities = NDArray[np.float32]
Integers = NDArray[np.int64]
Columns = dict[str, NDArray[Any]]
SCHEMA_VERSION = 1  # of every JSON file that the commands write: raised when a key changes its name or meaning


@dataclass(frozen=True)
class Report:
    """The outcome of a run: ``metrics`` is the content of report.json, ``predictions`` that of the CSV.

    ``predictions`` is a record array: ``report.predictions["cluster"]``, or ``pandas.DataFrame(...)`` of it.
    """

    metrics: dict[str, Any]
    predictions: np.recarray
    folder: Path | None = None


def start_record(kind: str, images: ImageSet, clusters: int) -> dict[str, Any]:
    """Return the part of report.json that every kind of report has; report/report.schema.json describes all of it."""
    labels = images.labels
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "images": images.count,
        "noun": images.noun,
        "clusters": clusters,
        "classes": None if labels is None else len(np.unique(labels)),
        "data": images.source,
        "labels": labels is not None,
        "units": "fractions of 1; ECE has 15 equal-width bins",
        "skipped": [{"image": name, "reason": reason} for name, reason in images.skipped],
        "data_warnings": images.warnings,
    }


def describe_run(config: RefineConfig, folder: Path) -> dict[str, Any]:
    """Return what the page says of a run beside its figures: backbone, settings, and the command that repeats it."""
    backbone = "the embedded one of the demo" if config.backbone == str(DEMO_BACKBONE) else config.backbone
    # There is no command for arrays and modules that only a Python program can give.
    inputs = (config.backbone, config.data) if not config.features else config.features
    in_python = any(value is None or value.startswith("<") for value in inputs)
    words = ["cdc-refine", "--recipe", str(folder / CONFIG), "--out", f"{folder}-again"]
    return {
        "backbone": f"{backbone}{' (frozen)' if config.freeze_backbone else ''}" if backbone else "features",
        "settings": (folder / CONFIG).read_text(encoding="utf-8"),
        "command": None if in_python else join_words(words),
    }


def comparison_record(rows: Sequence[Row], verdicts: Sequence[str], failures: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the report.json of a comparison of methods."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "method_comparison",
        "rows": [asdict(row) | _split_values(row) for row in rows],
        "verdicts": list(verdicts),
        "failures": [{"cell": cell, "reason": reason} for cell, reason in failures.items()],
    }


def _split_values(row: Row) -> dict[str, Any]:
    # A column such as ``AUROC textures`` holds a name that the user has chosen: the record has that name as a value.
    outside: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for column, value in row.values.items():
        metric, _, data = column.partition(" ")
        (outside.setdefault(data, {}) if data else own)[metric] = None if value is None else asdict(value)
    return {"values": own, "outside": [{"data": data, "values": values} for data, values in outside.items()]}


def measure(
    clustering: Probabilities, calibration: Probabilities, kmeans_labels: Integers, labels: Integers | None
) -> dict[str, dict[str, Any]]:
    """Return figures of k-means and both heads: ACC, NMI, ARI and ECE with labels; confidence and sizes always."""
    clusters = calibration.shape[1]
    kmeans: dict[str, Any] = {"cluster_sizes": np.bincount(kmeans_labels, minlength=clusters).tolist()}
    if labels is not None:
        kmeans |= {**summary_hard(kmeans_labels, labels, clusters), "ECE": None}
    heads = {"clustering_head": clustering, "calibration_head": calibration}
    return {"kmeans": kmeans, **{name: measure_head(probs, labels) for name, probs in heads.items()}}


def measure_head(probs: Probabilities, labels: Integers | None) -> dict[str, Any]:
    """Return every figure of one head's probabilities (N, C); without labels those of `summary_unlabelled`."""
    return summary_unlabelled(probs) if labels is None else summary(probs, labels)


def build_prediction_table(
    names: Sequence[str], clustering: Probabilities, calibration: Probabilities, more: Columns | None = None
) -> np.recarray:
    """Build one row per image from the probabilities (N, C) of both heads; ``more`` columns come last.

    >>> probabilities = np.array([[0.25, 0.75], [0.5, 0.5]], dtype=np.float32)
    >>> table = build_prediction_table(["a.png", "b.png"], probabilities, probabilities)
    >>> table["cluster"].tolist(), table["confidence"].tolist()
    ([1, 0], [0.75, 0.5])
    """
    return build_table(names, {**compute_prediction_columns(clustering, calibration), **(more or {})})


def compute_prediction_columns(
    clustering: Probabilities, calibration: Probabilities, groups: Integers | None = None
) -> Columns:
    """Return the two most likely clusters, of equal ones the lower number first, and confidences, of rows (N, C).

    With the ``groups`` (C,) of a coarser level they are groups, and the most likely cluster itself comes last.

    >>> probabilities = np.array([[0.4, 0.35, 0.25]], dtype=np.float32)
    >>> columns = compute_prediction_columns(probabilities, probabilities, np.array([0, 1, 1]))
    >>> [round(float(columns[name][0]), 2) for name in ("cluster", "confidence", "leaf", "leaf_confidence")]
    [1.0, 0.6, 0.0, 0.4]
    """
    if groups is not None:
        own = {"leaf": calibration.argmax(axis=1), "leaf_confidence": calibration.max(axis=1)}
        return compute_prediction_columns(sum_groups(clustering, groups), sum_groups(calibration, groups)) | own
    clusters = calibration.shape[1]
    if clusters == 1:  # the coarsest level of a model has no second group: nothing is left for it
        calibration = np.pad(calibration, ((0, 0), (0, 1)))
    first_two = np.empty((len(calibration), 2), dtype=np.int64)
    for start in range(0, len(calibration), BLOCK):  # the order of all clusters is larger than the probabilities
        rows = slice(start, start + BLOCK)
        first_two[rows] = np.argsort(-calibration[rows], axis=1, kind="stable")[:, :2]
    probabilities = np.take_along_axis(calibration, first_two, axis=1)
    return {
        "cluster": first_two[:, 0],
        "confidence": probabilities[:, 0],
        "clustering_confidence": clustering.max(axis=1),
        "second_cluster": first_two[:, 1].clip(max=clusters - 1),
        "second_confidence": probabilities[:, 1],
    }


def compute_outlier_columns(prototypes: Prototypes, features: Tensor) -> Columns:
    """Return how far images with these features (N, D) are from typical ones, and which exceed the limit."""
    distance = prototypes.distance(features).cpu().numpy()
    return {"distance": distance, "outlier": distance > prototypes.limit}


def build_table(names: Sequence[str], columns: Columns, name_column: str | None = None) -> np.recarray:
    """Return names and columns as one table; the first column is called as `choose_name_column` says by default."""
    header = [name_column or choose_name_column(names), *columns]
    return np.rec.fromarrays([np.array(names, dtype=object), *columns.values()], names=header)  # type: ignore[call-overload]


def choose_name_column(names: Iterable[str]) -> str:
    """Return ``index`` where images are only numbered, else ``path``.

    >>> choose_name_column(["0", "1"]), choose_name_column(["cats/0.png", "1"])
    ('index', 'path')
    """
    return "index" if all(name.isdigit() for name in names) else "path"


def concatenate_tables(tables: Iterable[np.recarray]) -> np.recarray:
    """Return tables with the same columns as one."""
    return np.concatenate(list(tables)).view(np.recarray)


def write_tables(path: Path, tables: Iterable[np.recarray]) -> None:
    """Write tables with the same columns as one CSV, with one of them in memory at a time.

    It is UTF-8 with a header; numbers have 6 decimals, true and false are 1 and 0. Names that a spreadsheet would
    compute, or that hold line breaks or bytes that are not UTF-8, are escaped as `escape_cell` does.
    """
    with open_atomically(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        for number, table in enumerate(tables):
            if number == 0:
                file.write(join_csv([table.dtype.names or ()]))
            for start in range(0, len(table), BLOCK):
                rows = table[start : start + BLOCK].tolist()
                file.write(join_csv([_format(value) for value in row] for row in rows))


def _format(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return f"{value:.6f}" if isinstance(value, float) else value
