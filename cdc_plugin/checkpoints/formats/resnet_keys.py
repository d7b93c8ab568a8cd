"""ResNets that were saved under other names than torchvision's: by position in a list, or as ``shortcut``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

# First stage's place in nn.Sequential(*children): after convolution and BatchNorm come ReLU and max-pool, ReLU
# alone, or neither where the ReLU was called as a function and so is lost in the list (lightly's own ResNet).
STEMS_BY_PLACE: dict[int, dict[str, Any]] = {4: {}, 3: {"pool": False}, 2: {"pool": False, "relu": False}}
# ResNets with this name for their projections, lightly's among them, are built for small images.
SHORTCUT_STEM = {"stride": 1, "padding": 1, "pool": False}
SHORTCUT = re.compile(r"(layer\d\.\d+)\.shortcut\.")
PLACED = re.compile(r"(\d+)\.(.+)")


def torchvision_names(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same weights under torchvision's names, and the facts of the stem that the old names tell.

    Weights of other networks come back as they are.
    """
    named, stem = _from_places(state)
    if any(SHORTCUT.match(key) for key in named):
        named = {SHORTCUT.sub(r"\1.downsample.", k): v for k, v in named.items() if not k.startswith("linear.")}
        stem = SHORTCUT_STEM | stem
    return _join_split_statistics(named), stem


def _from_places(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    blocks = sorted({int(found[1]) for key in state if (found := re.fullmatch(r"(\d+)\.0\.conv1\.weight", key))})
    first = blocks[0] if blocks else 0
    if "0.weight" not in state or first not in STEMS_BY_PLACE or blocks != list(range(first, first + 4)):
        return dict(state), {}
    tops = {0: "conv1", 1: "bn1"} | {place: f"layer{place - first + 1}" for place in blocks}
    named = {}
    for key, value in state.items():
        found = PLACED.fullmatch(key)
        top = tops.get(int(found[1])) if found else None
        named[f"{top}.{found[2]}" if found and top else key] = value
    return named, dict(STEMS_BY_PLACE[first])


def _join_split_statistics(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Statistics of lightly's SplitBatchNorm, one set a split, as the mean over the splits that it evaluates with."""
    joined = dict(state)
    for key, value in state.items():
        weight = state.get(re.sub(r"running_(mean|var)$", "weight", key)) if ".running_" in key else None
        if weight is not None and value.ndim == weight.ndim == 1 and 0 < len(weight) < len(value):
            splits, rest = divmod(len(value), len(weight))
            if not rest:
                joined[key] = value.view(splits, len(weight)).mean(dim=0)
    return joined
