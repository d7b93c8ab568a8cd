"""Draws the README's picture from a finished demo run: ``python notebooks/demo_figure.py cdc-runs/digits-1``.

The run holds the state after training; the state after initialisation is computed again with ``epochs=0``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

import cdc_plugin
from cdc_plugin.data.images import open_images
from cdc_plugin.demo import demo_settings
from cdc_plugin.metrics import summary
from cdc_plugin.metrics.clustering import correct_samples

matplotlib.use("Agg")
INK, BAR, MARK = "#333333", "#2a78b8", "#d9782d"


def reliability(axis, probs, labels, title):
    confidence, predicted = probs.max(axis=1), probs.argmax(axis=1)
    correct = correct_samples(predicted, labels, probs.shape[1])
    figures = summary(probs, labels)
    edges = np.linspace(0, 1, 16)
    index = np.clip(np.digitize(confidence, edges) - 1, 0, 14)
    for bin_number in np.unique(index):
        inside = index == bin_number
        middle = (edges[bin_number] + edges[bin_number + 1]) / 2
        # The paler a bar, the fewer images it stands for.
        axis.bar(middle, correct[inside].mean(), width=0.06, color=BAR, alpha=0.2 + 0.8 * inside.mean() ** 0.5)
        mean = confidence[inside].mean()
        axis.plot([middle - 0.03, middle + 0.03], [mean, mean], color=MARK, linewidth=3, solid_capstyle="butt")
    axis.plot([0, 1], [0, 1], "--", color=INK, linewidth=1)
    axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", title=title)
    text = (
        f"ACC {100 * figures['ACC']:.1f} %\nconfidence {100 * figures['CONF']:.1f} %\nECE {100 * figures['ECE']:.1f} %"
    )
    axis.text(0.05, 0.95, text, va="top", fontsize=10, bbox={"facecolor": "white", "edgecolor": "#cccccc"})


def main() -> None:
    digits = open_images("digits", 32)
    refined = cdc_plugin.load_model(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        start = cdc_plugin.refine(**demo_settings(), recipe="digits", epochs=0, out=Path(scratch) / "start")
        initial = cdc_plugin.load_model(start.folder)
        figure = plt.figure(figsize=(12, 3.8), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=[2.1, 1])
        axes = left.subplots(1, 2, sharey=True)
        reliability(axes[0], initial.predict_proba(digits.images), digits.labels, "after initialisation")
        probs = refined.predict_proba(digits.images)
        reliability(axes[1], probs, digits.labels, "calibration head after training")
    axes[0].set_ylabel("share that is right (bars), confidence (marks)")
    right.suptitle("the 24 images it is least sure of", fontsize=11)
    for axis, row in zip(right.subplots(4, 6).flat, np.argsort(probs.max(axis=1))[:24], strict=True):
        axis.imshow(digits.images[row])
        axis.set_title(f"{probs[row].max():.0%}", fontsize=8, pad=1)
        axis.axis("off")
    target = Path(__file__).parent / "images" / "demo.png"
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
