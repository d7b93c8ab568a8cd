"""Wide residual networks with leaky ReLU (after Zagoruyko and Komodakis): FixMatch's, which SPICE-Semi trains, and
solo-learn's. Both name their weights alike.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.errors import CheckpointError

SLOPE = 0.1
FIXMATCH = {"bias": False, "eps": 1e-5, "momentum": 0.1}
SOLO_LEARN = {"bias": True, "eps": 1e-3, "momentum": 1e-3}


def build_fixmatch_wrn(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return the network with ``depth`` blocks per stage, ``widths`` of stem and stages, and ``strides`` of stages."""
    widths, strides = [int(width) for width in spec["widths"]], [int(stride) for stride in spec["strides"]]
    return WideResNet(int(spec["depth"]), widths, strides, [True] * len(strides), **FIXMATCH), widths[-1]


def build_wide_resnet(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return solo-learn's network of ``spec["kwargs"]``: ``depth``, ``widen`` and ``first_stride``."""
    kwargs = spec["kwargs"]
    depth, widen, first_stride = (int(kwargs[name]) for name in ("depth", "widen", "first_stride"))
    if depth < 10 or (depth - 4) % 6 or widen < 1 or first_stride < 1:
        raise CheckpointError(f"a wide_resnet has depth 10, 16, 22, 28, ... and a positive width; found {dict(kwargs)}")
    widths, strides = [16, 16 * widen, 32 * widen, 64 * widen], [first_stride, 2, 2]
    return WideResNet((depth - 4) // 6, widths, strides, [True, False, False], **SOLO_LEARN), 64 * widen


class WideResNet(nn.Module):
    """Images (N, 3, H, W) to features (N, widths[-1]); ``widths`` begin with the stem, ``blocks`` are per stage."""

    def __init__(
        self, blocks: int, widths: Sequence[int], strides: Sequence[int], activates: Sequence[bool], **options: Any
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=options["bias"])
        self.stages = [f"block{number}" for number in range(1, len(widths))]
        for stage, name in enumerate(self.stages):
            width = widths[stage + 1]
            first = _Block(widths[stage], width, strides[stage], activates[stage], **options)
            rest = (_Block(width, width, 1, activates[stage], **options) for _ in range(blocks - 1))
            layer = nn.Sequential(first, *rest)
            setattr(self, name, nn.Sequential(OrderedDict(layer=layer)))  # nested for the names of its weights
        self.bn1 = nn.BatchNorm2d(widths[-1], options["eps"], options["momentum"])

    def forward(self, images: Tensor) -> Tensor:
        maps = self.conv1(images)
        for name in self.stages:
            maps = getattr(self, name)(maps)
        return F.leaky_relu(self.bn1(maps), SLOPE).mean(dim=(2, 3))


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut.

    Where the number of channels changes, its first BatchNorm acts on both paths if it ``activates``, else on neither:
    there it has weights without effect.
    """

    def __init__(
        self, inputs: int, width: int, stride: int, activates: bool, bias: bool, eps: float, momentum: float
    ) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs, eps, momentum)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=bias)
        self.bn2 = nn.BatchNorm2d(width, eps, momentum)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=bias)
        self.convShortcut = nn.Conv2d(inputs, width, 1, stride, bias=bias) if inputs != width else None
        self.activates = activates or inputs == width

    def forward(self, maps: Tensor) -> Tensor:
        active = F.leaky_relu(self.bn1(maps), SLOPE) if self.activates else maps
        shortcut = maps if self.convShortcut is None else self.convShortcut(active)
        return shortcut + self.conv2(F.leaky_relu(self.bn2(self.conv1(active)), SLOPE))
