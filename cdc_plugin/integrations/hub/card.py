"""The model card of an export for the Hugging Face hub: what the model is, and what its figures mean.

Figures that needed ground truth are kept apart. Of files only the names are published: the card is for others.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdc_plugin.models.architectures import describe

LIBRARY, PIPELINE = "cdc-plugin", "image-classification"
TAGS = ("calibration", "deep-clustering", "image-clustering", "self-supervised-learning")
TEMPLATE = Path(__file__).with_name("card.md.jinja")
MEASURED = ("ACC", "NMI", "ARI", "ECE", "AUROC", "AURC", "FPR95")


def render_card(description: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Return the README.md of an export, from its config.json and its run's report.json, which may be empty."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)  # escaped by _escape, for Markdown
    environment.filters |= {"cell": _escape, "percent": _format_percent}
    backbone, provenance = description["backbone"], strip_folders(description.get("provenance") or {})
    facts = {
        "data": strip_folders(report).get("data") or provenance.get("data"),
        "images": report.get("images"),
        "clusters": description["heads"]["clusters"],
        "backbone": provenance.get("backbone"),
        "network": describe(backbone["spec"]),
        "input": f"RGB, {backbone['input_size']} px, mean {backbone['mean']}, std {backbone['std']}",
        "epochs": provenance.get("epochs"),
        "seed": provenance.get("seed"),
    }
    heads = report.get("after") if report.get("labels") else None
    measured = {name: head for name, head in (heads or {}).items() if head.get("ACC") is not None}
    columns = [name for name in MEASURED if any(head.get(name) is not None for head in measured.values())]
    figures = {"label_free": report.get("label_free") or {}, "columns": columns, "measured": measured}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    hub = {"library": LIBRARY, "pipeline": PIPELINE, "tags": TAGS}
    return template.render(hub=hub, facts=facts, side=backbone["input_size"], **figures)


def strip_folders(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with only the last part of paths: where files are stored is private.

    >>> strip_folders({"data": "/home/me/photos", "backbone": "timm:resnet18", "epochs": 3})
    {'data': 'photos', 'backbone': 'timm:resnet18', 'epochs': 3}
    """
    paths = {key: str(facts[key]) for key in ("data", "backbone") if facts.get(key)}
    names = {k: path if path.startswith(("timm:", "hf-hub:")) else Path(path).name for k, path in paths.items()}
    return {**facts, **names}


def _escape(value: Any) -> str:
    """Return any value as text that breaks neither a table nor a heading."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;").encode(errors="replace").decode()


def _format_percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
