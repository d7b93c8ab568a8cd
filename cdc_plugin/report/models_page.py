"""The page that shows several models side by side."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from cdc_plugin.report.page_data import ComparedModel
from cdc_plugin.report.run_page import draw_diagrams, render_template, write_text
from cdc_plugin.report.tables import outside_rows, side_by_side, side_by_side_table, warnings
from cdc_plugin.report.words import TITLES, known, shorten


def write_comparison(path: Path, title: str, facts: list[tuple[str, str]], models: list[ComparedModel]) -> None:
    """Write the page that shows several models side by side, whole or not at all."""
    write_text(path, render_comparison(title, facts, models, date.today()))


def render_comparison(title: str, facts: list[tuple[str, str]], models: list[ComparedModel], made: date) -> str:
    """Return the side-by-side page as text."""
    diagrams = [(f"{model.name}: {head}", figures) for model in models for head, figures in model.heads]
    values: dict[str, Any] = {
        "title": shorten(title, 200),
        "facts": facts,
        "models": models,
        "measured_with_labels": any(known(figures.get("ACC")) for _, figures in diagrams),
        "table": side_by_side_table([(model.name, model.heads) for model in models]),
        "diagrams": draw_diagrams(diagrams),
        "quality": side_by_side([model.label_free for model in models]),
        "warned": [(model.name, found) for model in models if (found := warnings(model.label_free))],
        "outside": outside_rows([(model.name, model.outside) for model in models]),
    }
    contents = [
        ("figures", "Figures", True),
        ("reliability", "Reliability", values["diagrams"]),
        ("quality", "Quality", values["quality"] or values["warned"]),
        ("outside", "Other images", values["outside"]),
    ]
    return render_template("comparison.html", contents, values, made)


def compared_model(metrics: dict[str, Any]) -> ComparedModel:
    """One column of the side-by-side page, from the content of the model's own report.json."""
    return ComparedModel(
        name=metrics["model"]["name"],
        writer=metrics["model"]["writer"],
        clusters=metrics["clusters"],
        heads=[(TITLES[key], figures) for key, figures in metrics["after"].items() if key != "kmeans"],
        label_free=metrics["label_free"],
        outside=metrics["outside"],
    )


def comparison_title(metrics: list[dict[str, Any]]) -> str:
    return f"{Path(metrics[0]['data']).name}: {', '.join(each['model']['name'] for each in metrics)}"


def comparison_facts(metrics: list[dict[str, Any]]) -> list[tuple[str, str]]:
    first = metrics[0]
    labels = f"{first['classes']} classes, for this report only" if first["labels"] else "none"
    models = [(each["model"]["name"], each["model"]["path"] or "given in Python") for each in metrics]
    return [("images", f"{first['images']:,} from {first['data']}"), ("labels", labels), *models]
