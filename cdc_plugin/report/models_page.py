"""The page that shows several models side by side."""

from pathlib import Path
from typing import Any

from cdc_plugin.report.run_page import draw_diagrams, render_template
from cdc_plugin.report.words import (
    DASH,
    TITLES,
    known,
    outside_rows,
    quality_figures,
    say_page,
    shorten,
    side_by_side_table,
    split_warnings,
)


def render_comparison(metrics: list[dict[str, Any]]) -> str:
    """Return the page as text, from the content of every model's own report.json."""
    first, names = metrics[0], [each["model"]["name"] for each in metrics]
    title = f"{Path(first['data']).name}: {', '.join(names)}"
    labels = f"{first['classes']} classes, for this report only" if first["labels"] else "none"
    facts = [
        ("images", f"{first['images']:,} from {first['data']}"),
        ("labels", labels),
        *((each["model"]["name"], each["model"]["path"] or "given in Python") for each in metrics),
    ]
    heads = [[(TITLES[key], figures) for key, figures in each["after"].items() if key != "kmeans"] for each in metrics]
    diagrams = [(f"{name}: {head}", figures) for name, own in zip(names, heads, strict=True) for head, figures in own]
    quality = [quality_figures(each["label_free"]) for each in metrics]
    values: dict[str, Any] = {
        "models": [
            (shorten(each["model"]["name"], 80), shorten(each["model"]["writer"], 80), f"{each['clusters']:,}")
            for each in metrics
        ],
        "measured_with_labels": any(known(figures.get("ACC")) for _, figures in diagrams),
        "table": side_by_side_table(list(zip(names, heads, strict=True))),
        "diagrams": draw_diagrams(diagrams),
        "quality": {key: [card.get(key, DASH) for card in quality] for card in quality for key in card},
        "warned": [
            (shorten(each["model"]["name"], 80), said)
            for each in metrics
            if (said := split_warnings(each["label_free"])[0])
        ],
        "outside": outside_rows([(each["model"]["name"], each["outside"]) for each in metrics]),
    }
    contents = [
        ("figures", "Figures", True),
        ("reliability", "Reliability", values["diagrams"]),
        ("quality", "Quality", values["quality"] or values["warned"]),
        ("outside", "Other images", values["outside"]),
    ]
    return say_page(render_template("comparison.html", title, facts, contents, values), first.get("noun", "image"))
