"""The model card of an export for the Hugging Face hub: what the model is, and what its figures mean.

Figures that needed ground truth are kept apart from those that did not. Only names of files are published, never the
folders they are in: the card is for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdc_plugin.models.architectures import describe

LIBRARY, PIPELINE = "cdc-plugin", "image-classification"
TAGS = ("calibration", "deep-clustering", "image-clustering", "self-supervised-learning")
TEMPLATE = Path(__file__).with_name("card.md.jinja")
LABEL_FREE = {
    "expected_accuracy": "mean calibrated confidence, the expected accuracy",
    "heads_agree": "images on which both heads agree",
    "trusted_share": "images that would serve as pseudo-labels",
    "augmentation_agreement": "predictions kept under augmentation",
    "neighbour_consistency": "nearest neighbours in the same cluster",
    "kmeans_agreement": "images on which k-means on the features agrees",
    "stability": "predictions kept over the last epochs",
    "balance": "evenness of the cluster sizes, 100 for equal ones",
    "largest_cluster_share": "share of the largest cluster",
}
HEADS = {
    "calibration_head": "calibration head (it predicts)",
    "clustering_head": "clustering head",
    "kmeans": "k-means on the features",
}
MEASURED = ("ACC", "NMI", "ARI", "ECE", "AUROC", "AURC", "FPR95")


def render_card(description: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Return the README.md of an export.

    Args:
        description: the content of config.json.
        report: the content of the run's report.json; empty where there is none.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)  # escaped by _escape, for Markdown
    environment.filters["cell"] = _escape
    backbone, clusters = description["backbone"], description["heads"]["clusters"]
    provenance = strip_folders(description.get("provenance") or {})
    data = strip_folders(report).get("data") or provenance.get("data")
    facts = {
        "data": data,
        "images": report.get("images"),
        "clusters": clusters,
        "backbone": provenance.get("backbone"),
        "network": describe(backbone["spec"]),
        "input": f"RGB, {backbone['input_size']} px, mean {backbone['mean']}, std {backbone['std']}",
        "epochs": provenance.get("epochs"),
        "seed": provenance.get("seed"),
    }
    label_free = report.get("label_free") or {}
    columns, measured = _tabulate_measured(report)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        library=LIBRARY,
        pipeline=PIPELINE,
        tags=TAGS,
        data=data,
        clusters=clusters,
        side=backbone["input_size"],
        facts=[(name, value) for name, value in facts.items() if value is not None],
        label_free=[
            (text, _percent(label_free.get(name)))
            for name, text in LABEL_FREE.items()
            if label_free.get(name) is not None
        ],
        warnings=[warning["text"] for warning in label_free.get("warnings") or ()],
        columns=columns,
        measured=measured,
    )


def strip_folders(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with only the last part of paths: where files are stored is private.

    >>> strip_folders({"data": "/home/me/photos", "backbone": "timm:resnet18", "epochs": 3})
    {'data': 'photos', 'backbone': 'timm:resnet18', 'epochs': 3}
    """
    paths = {key: str(facts[key]) for key in ("data", "backbone") if facts.get(key)}
    names = {k: path if path.startswith(("timm:", "hf-hub:")) else Path(path).name for k, path in paths.items()}
    return {**facts, **names}


def _tabulate_measured(report: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return columns and rows of the figures with labels; no rows where there were no labels."""
    after = report.get("after") or {}
    heads = {title: after[head] for head, title in HEADS.items() if after.get(head, {}).get("ACC") is not None}
    if not report.get("labels"):
        return [], []
    columns = [name for name in MEASURED if any(figures.get(name) is not None for figures in heads.values())]
    return columns, [(title, *(_percent(figures.get(name)) for name in columns)) for title, figures in heads.items()]


def _escape(value: Any) -> str:
    """Return any value as text that breaks neither a table nor a heading."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;").encode(errors="replace").decode()


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
