"""ResNets that were saved under other names than torchvision's: by position in a list, or with ``shortcut``."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Position of the first stage in nn.Sequential(*children): after convolution and BatchNorm come ReLU and max-pool, ReLU
# alone, or neither where the ReLU was called as a function and so is lost in the list (lightly's own ResNet).
STEMS_BY_POSITION: dict[int, dict[str, Any]] = {4: {}, 3: {"pool": False}, 2: {"pool": False, "relu": False}}
# ResNets with this name for their projections, lightly's among them, are built for small images.
SHORTCUT_STEM = {"stride": 1, "padding": 1, "pool": False}
SHORTCUT = re.compile(r"(layer\d\.\d+)\.shortcut\.")


def rename_resnet(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights of a ResNet under torchvision's names, and the facts about its stem that the old names imply."""
    # DivClust's stem is a stage of its own.
    state = {re.sub(r"^layer0\.([01])\.", lambda m: ("conv1.", "bn1.")[int(m[1])], k): v for k, v in state.items()}
    named, stem = rename_places(state)
    if has_shortcuts(named):
        named = {key: value for key, value in rename_shortcuts(named).items() if not key.startswith("linear.")}
        stem = SHORTCUT_STEM | stem
    return _join_split_statistics(named), stem


def has_shortcuts(state: Mapping[str, Tensor]) -> bool:
    """Return whether projections of a ResNet are called ``shortcut``."""
    return any(SHORTCUT.match(key) for key in state)


def rename_shortcuts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with ``downsample`` for ``shortcut``."""
    return {SHORTCUT.sub(r"\1.downsample.", key): value for key, value in state.items()}


def rename_places(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of a ResNet's children in a list under their names, and what the positions say of the stem.

    >>> names = ["0.weight", "1.bias", *(f"{position}.0.conv1.weight" for position in (3, 4, 5, 6))]
    >>> renamed, stem = rename_places(dict.fromkeys(names))
    >>> list(renamed)[:3], stem
    (['conv1.weight', 'bn1.bias', 'layer1.0.conv1.weight'], {'pool': False})
    """
    blocks = sorted({int(match[1]) for key in state if (match := re.fullmatch(r"(\d+)\.0\.conv1\.weight", key))})
    first = blocks[0] if blocks else 0
    if "0.weight" not in state or first not in STEMS_BY_POSITION or blocks != list(range(first, first + 4)):
        return dict(state), {}
    names = {"0": "conv1", "1": "bn1"} | {f"{position}": f"layer{position - first + 1}" for position in blocks}
    parts = {key: key.partition(".") for key in state}
    renamed = {f"{names.get(place, place)}{dot}{rest}": state[key] for key, (place, dot, rest) in parts.items()}
    return renamed, dict(STEMS_BY_POSITION[first])


def _join_split_statistics(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return statistics of lightly's SplitBatchNorm as the mean over the splits, which it evaluates with."""
    joined = dict(state)
    for key, value in state.items():
        weight = state.get(re.sub(r"running_(mean|var)$", "weight", key)) if ".running_" in key else None
        if weight is not None and value.ndim == weight.ndim == 1 and 0 < len(weight) < len(value):
            splits, rest = divmod(len(value), len(weight))
            if not rest:
                joined[key] = value.view(splits, len(weight)).mean(dim=0)
    return joined
