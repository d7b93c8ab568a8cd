"""The model card of an export for the Hugging Face hub: what the model is, what its figures say and what they do not.

Figures that needed ground truth are kept apart from those that did not. Nothing but the names of files is told: the
card is for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cdc_plugin.models.architectures import describe

LIBRARY, PIPELINE = "cdc-plugin", "image-classification"
TAGS = ("calibration", "deep-clustering", "image-clustering", "self-supervised-learning")
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

CARD = """---
library_name: {library}
pipeline_tag: {pipeline}
tags:
{tags}
---

# {title}

Sorts images into {clusters} clusters and says how sure it is. No labels were used to train it: the clusters have
numbers, not names, and a cluster need not be a class that a person would name.

## Use

`pip install cdc-plugin`, then, in this folder (no network is needed):

```python
import numpy as np

from cdc_plugin.integrations.hub.model import CalibratedClusterer

model = CalibratedClusterer.from_pretrained(".")  # this folder, or the name of the repository it was pushed to
images = np.zeros((2, 64, 64, 3), dtype=np.uint8)  # or a list of paths or of PIL images, of any size
probabilities = model.predict_proba(images)  # (2, {clusters}), calibrated
cluster, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
```

As a torch module it takes float RGB images (N, 3, {side}, {side}) in [0, 1] and gives probabilities (N, {clusters});
mean and std are applied inside. `model.clusterer` is what `cdc_plugin.load_model` gives: backbone, both heads and,
where it has them, the prototypes that tell images of another kind. Nothing in this folder is run as code.

## How far to trust it

- The confidence estimates how likely an image is in the right cluster. It was fitted without labels: where classes
  overlap so much that the network cannot tell them apart, it can be too high.
- It holds for images like those the model was refined on. Of any other image, it must still choose a cluster.
- Figures below are of the images that the model was refined on.

## How it was made

A pretrained backbone was refined by CDC (citation below): the clustering head learns from pseudo-labels that the
calibration head selects, the calibration head from averages over small groups of like images.

{facts}

## Figures without labels

{label_free}

## Figures with labels

{measured}

## Licence

Not stated yet: add `license:` to the first lines of this file. The licence of the backbone's weights may bind you.

## Citation

```bibtex
@inproceedings{{jia2025towards,
  title = {{Towards Calibrated Deep Clustering Network}},
  author = {{Yuheng Jia and Jianhong Cheng and Hui Liu and Junhui Hou}},
  booktitle = {{International Conference on Learning Representations (ICLR)}},
  year = {{2025}}
}}
```
"""


def model_card(description: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """The README.md of an export.

    Args:
        description: the content of config.json.
        report: that of the run's report.json; empty where there is none.
    """
    backbone, clusters = description["backbone"], description["heads"]["clusters"]
    provenance = public(description.get("provenance") or {})
    data = public(report).get("data") or provenance.get("data")
    title = f"{_cell(data)} in {clusters} clusters" if data else f"Images in {clusters} clusters"
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
    return CARD.format(
        library=LIBRARY,
        pipeline=PIPELINE,
        tags="\n".join(f"- {tag}" for tag in TAGS),
        title=title,
        clusters=clusters,
        side=backbone["input_size"],
        facts=_table(("", ""), ((name, _cell(value)) for name, value in facts.items() if value is not None)),
        label_free=_label_free(report.get("label_free") or {}),
        measured=_measured(report),
    )


def public(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts with the last part of paths only: where files lie is nobody else's business."""
    paths = [key for key in ("data", "backbone") if facts.get(key)]
    return {**facts, **{key: _last_part(str(facts[key])) for key in paths}}


def _last_part(path: str) -> str:
    return path if path.startswith(("timm:", "hf-hub:")) else Path(path).name


def _label_free(card: Mapping[str, Any]) -> str:
    rows = [(text, _percent(card[name])) for name, text in LABEL_FREE.items() if card.get(name) is not None]
    if not rows:
        return "None were kept."
    warnings = [f"- Warning: {_cell(warning['text'])}" for warning in card.get("warnings") or ()]
    table = _table(("no ground truth was used", "%"), rows)
    return "\n\n".join([table, "\n".join(warnings)] if warnings else [table])


def _measured(report: Mapping[str, Any]) -> str:
    after = report.get("after") or {}
    found = {title: after[head] for head, title in HEADS.items() if after.get(head, {}).get("ACC") is not None}
    if not report.get("labels") or not found:
        return "No labels were at hand: accuracy and calibration have not been measured."
    columns = [name for name in MEASURED if any(figures.get(name) is not None for figures in found.values())]
    rows = [(title, *(_percent(figures.get(name)) for name in columns)) for title, figures in found.items()]
    text = "Measured against labels, which were used for this table only; in %, clusters matched to classes, 15 bins"
    text += "; AUROC, AURC, FPR95: telling wrong from right by confidence." if "AURC" in columns else "."
    return f"{text}\n\n{_table(('', *columns), rows)}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: Any) -> str:
    """Any value as text that can break neither a table nor a heading."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;").encode(errors="replace").decode()


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
