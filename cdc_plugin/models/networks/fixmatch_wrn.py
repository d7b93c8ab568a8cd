"""FixMatch's wide ResNet, which SPICE-Semi trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

LEAK = 0.1


def build_fixmatch_wrn(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return the network with ``depth`` blocks per stage, ``widths`` of stem and stages, and ``strides`` of stages."""
    widths = [int(width) for width in spec["widths"]]
    return FixMatchWideResNet(int(spec["depth"]), widths, [int(s) for s in spec["strides"]]), widths[-1]


class FixMatchWideResNet(nn.Module):
    """Pre-activation blocks with leaky ReLU; the parameter names are FixMatch's."""

    def __init__(self, depth: int, widths: list[int], strides: list[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.stages = [f"block{number}" for number in range(1, len(widths))]
        for name, inputs, width, stride in zip(self.stages, widths[:-1], widths[1:], strides, strict=True):
            setattr(self, name, _Stage(depth, inputs, width, stride))
        self.bn1 = nn.BatchNorm2d(widths[-1])

    def forward(self, images: Tensor) -> Tensor:
        maps = self.conv1(images)
        for name in self.stages:
            maps = getattr(self, name)(maps)
        return F.leaky_relu(self.bn1(maps), LEAK).mean(dim=(2, 3))


class _Stage(nn.Module):
    def __init__(self, depth: int, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        rest = (_Block(width, width, 1) for _ in range(depth - 1))
        self.layer = nn.Sequential(_Block(inputs, width, stride), *rest)

    def forward(self, maps: Tensor) -> Tensor:
        return self.layer(maps)


class _Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.convShortcut = nn.Conv2d(inputs, width, 1, stride, bias=False) if inputs != width else None

    def forward(self, maps: Tensor) -> Tensor:
        active = F.leaky_relu(self.bn1(maps), LEAK)
        out = self.conv2(F.leaky_relu(self.bn2(self.conv1(active)), LEAK))
        # Where the width changes, the shortcut starts after the activation.
        return out + (maps if self.convShortcut is None else self.convShortcut(active))
