"""What happened during training, an epoch a point: one small chart for each number that was recorded."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from cdc_plugin.report.charts.svg import Frame, chart, round_ticks
from cdc_plugin.report.words import SPACE, known

WIDTH, LEFT, PLOT_WIDTH, HEIGHT = 320.0, 48.0, 258.0, 120.0
# Key of an epoch in metrics.jsonl, title, and what it is multiplied with.
CURVES = [
    ("clustering_loss", "Loss of the clustering head", 1.0),
    ("calibration_loss", "Loss of the calibration head", 1.0),
    ("selected", f"Images selected, in{SPACE}%", 100.0),
    ("confidence", f"Mean confidence, in{SPACE}%", 100.0),
    ("mini_clusters", "Mini-clusters a batch", 1.0),
    ("largest_cluster", f"Largest cluster, in{SPACE}%", 100.0),
    ("used_clusters", "Clusters with images", 1.0),
]


def training_charts(history: list[dict[str, Any]]) -> list[tuple[str, Markup]]:
    """Title and drawing of every number that at least one epoch has."""
    found = []
    for key, title, scale in CURVES:
        points = [
            (float(epoch.get("epoch", index)), scale * epoch[key])
            for index, epoch in enumerate(history, start=1)
            if known(epoch.get(key))
        ]
        if points:
            found.append((title, _curve_chart(title, points)))
    return found


def _curve_chart(title: str, points: list[tuple[float, float]]) -> Markup:
    values = [value for _, value in points]
    first, last = points[0][0], points[-1][0]
    y_ticks = round_ticks(min(values), max(values), 3)
    frame = Frame(
        LEFT,
        10,
        PLOT_WIDTH,
        HEIGHT,
        x_low=first if last > first else first - 0.5,
        x_high=last if last > first else first + 0.5,
        y_low=y_ticks[0],
        y_high=y_ticks[-1],
    )
    # Between the first and the last epoch round ones, as far as their labels have room.
    room = (last - first) / 10
    between = [tick for tick in round_ticks(first, last, 5) if tick == int(tick) and first + room < tick < last - room]
    epochs = [first, *between, last] if last > first else [first]
    drawn = [
        frame.y_axis([(tick, f"{tick:.6g}") for tick in y_ticks]),
        frame.curve(points, "measured"),
        frame.x_axis([(tick, f"{tick:.0f}") for tick in epochs], "epoch"),
    ]
    description = f"From {values[0]:.4g} in epoch {first:.0f} to {values[-1]:.4g} in epoch {last:.0f}."
    return chart(WIDTH, HEIGHT + 50, title, description, *drawn)
