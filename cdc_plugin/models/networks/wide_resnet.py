"""The wide residual network of solo-learn (Zagoruyko and Komodakis, with leaky ReLU), under its own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.errors import CheckpointError

SLOPE = 0.1


def build_wide_resnet(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return the network of ``spec["kwargs"]``: ``depth``, ``widen`` and ``first_stride``."""
    kwargs = spec["kwargs"]
    depth, widen, first_stride = (int(kwargs[name]) for name in ("depth", "widen", "first_stride"))
    if depth < 10 or (depth - 4) % 6 or widen < 1 or first_stride < 1:
        raise CheckpointError(f"a wide_resnet has depth 10, 16, 22, 28, ... and a positive width; found {dict(kwargs)}")
    return WideResNet((depth - 4) // 6, widen, first_stride), 64 * widen


class WideResNet(nn.Module):
    """Images (N, 3, H, W) to features (N, 64 widen)."""

    def __init__(self, blocks: int, widen: int, first_stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1)
        self.block1 = _Stage(blocks, 16, 16 * widen, first_stride, activates=True)
        self.block2 = _Stage(blocks, 16 * widen, 32 * widen, 2, activates=False)
        self.block3 = _Stage(blocks, 32 * widen, 64 * widen, 2, activates=False)
        self.bn1 = nn.BatchNorm2d(64 * widen, eps=1e-3, momentum=1e-3)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.block3(self.block2(self.block1(self.conv1(images))))
        return F.leaky_relu(self.bn1(maps), SLOPE).mean(dim=(2, 3))


class _Stage(nn.Module):
    """Blocks of one width; a module of its own for the names of its weights."""

    def __init__(self, blocks: int, inputs: int, outputs: int, stride: int, activates: bool) -> None:
        super().__init__()
        rest = (_Block(outputs, outputs, 1, activates) for _ in range(blocks - 1))
        self.layer = nn.Sequential(_Block(inputs, outputs, stride, activates), *rest)

    def forward(self, maps: Tensor) -> Tensor:
        return self.layer(maps)


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut.

    Where the number of channels changes, its first BatchNorm acts on both paths in the first stage of the network
    (``activates``), and on neither in the others: there it has weights without effect.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, activates: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs, eps=1e-3, momentum=1e-3)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.bn2 = nn.BatchNorm2d(outputs, eps=1e-3, momentum=1e-3)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.convShortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else None
        self.activates = activates

    def forward(self, maps: Tensor) -> Tensor:
        active = maps
        if self.convShortcut is None or self.activates:
            active = F.leaky_relu(self.bn1(maps), SLOPE)
        shortcut = maps if self.convShortcut is None else self.convShortcut(active)
        hidden = F.leaky_relu(self.bn2(self.conv1(active)), SLOPE)
        return shortcut + self.conv2(hidden)
