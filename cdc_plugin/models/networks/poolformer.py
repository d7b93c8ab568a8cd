"""PoolFormer (Yu et al., 2022) as first published, which solo-learn kept.

timm's differs in more than names: it averages before the last normalisation, so that features are other numbers.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.errors import CheckpointError

# Kernel, stride and padding of the embedding of the image and of those between stages.
ENTRY, BETWEEN = (7, 4, 2), (3, 2, 1)


def build_poolformer(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """Return the network of ``spec["kwargs"]``: four ``depths``, four ``widths`` and an odd ``pool``."""
    kwargs = spec["kwargs"]
    depths, widths, pool = list(kwargs["depths"]), list(kwargs["widths"]), int(kwargs["pool"])
    if len(depths) != 4 or len(widths) != 4 or min(depths + widths) < 1 or pool % 2 == 0:
        raise CheckpointError(f"a poolformer has 4 depths, 4 widths and an odd pool; found {dict(kwargs)}")
    return PoolFormer(depths, widths, pool), widths[-1]


class PoolFormer(nn.Module):
    """Images (N, 3, H, W) to features (N, widths[3])."""

    def __init__(self, depths: list[int], widths: list[int], pool: int) -> None:
        super().__init__()
        self.patch_embed = _embed(3, widths[0], ENTRY)
        self.network = nn.ModuleList()
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if stage:
                self.network.append(_embed(widths[stage - 1], width, BETWEEN))
            self.network.append(nn.Sequential(*(_Block(width, pool) for _ in range(depth))))
        self.norm = nn.GroupNorm(1, widths[-1])

    def forward(self, images: Tensor) -> Tensor:
        maps = self.patch_embed(images)
        for part in self.network:
            maps = part(maps)
        return self.norm(maps).mean(dim=(2, 3))


def _embed(inputs: int, outputs: int, shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(OrderedDict(proj=nn.Conv2d(inputs, outputs, *shape)))


class _Block(nn.Module):
    """An average over neighbours in place of attention, then a perceptron, each scaled and added."""

    def __init__(self, width: int, pool: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(1, width)
        self.pool = nn.AvgPool2d(pool, stride=1, padding=pool // 2, count_include_pad=False)
        self.norm2 = nn.GroupNorm(1, width)
        fc1, fc2 = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU(), fc2=fc2))
        self.layer_scale_1 = nn.Parameter(1e-5 * torch.ones(width))
        self.layer_scale_2 = nn.Parameter(1e-5 * torch.ones(width))

    def forward(self, maps: Tensor) -> Tensor:
        normed = self.norm1(maps)
        maps = maps + self.layer_scale_1[:, None, None] * (self.pool(normed) - normed)
        return maps + self.layer_scale_2[:, None, None] * self.mlp(self.norm2(maps))
