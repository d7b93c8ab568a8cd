"""PoolFormer (Yu et al., 2022) under the names of its first publication, which solo-learn kept; timm has others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import families

# Kernel, stride and padding of the embedding of the image and of those between stages.
ENTRY, BETWEEN = (7, 4, 2), (3, 2, 1)


class PatchEmbedding(nn.Module):
    def __init__(self, inputs: int, outputs: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.proj = nn.Conv2d(inputs, outputs, *shape)

    def forward(self, maps: Tensor) -> Tensor:
        result: Tensor = self.proj(maps)
        return result


class ChannelMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(width, 4 * width, 1)
        self.act = nn.GELU()
        self.fc2 = nn.Conv2d(4 * width, width, 1)

    def forward(self, maps: Tensor) -> Tensor:
        result: Tensor = self.fc2(self.act(self.fc1(maps)))
        return result


class PoolFormerBlock(nn.Module):
    """An average over neighbours in the place of attention, then a perceptron, each scaled and added."""

    def __init__(self, width: int, pool: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(1, width)
        self.pool = nn.AvgPool2d(pool, stride=1, padding=pool // 2, count_include_pad=False)
        self.norm2 = nn.GroupNorm(1, width)
        self.mlp = ChannelMLP(width)
        self.layer_scale_1 = nn.Parameter(1e-5 * torch.ones(width))
        self.layer_scale_2 = nn.Parameter(1e-5 * torch.ones(width))

    def forward(self, maps: Tensor) -> Tensor:
        normed = self.norm1(maps)
        maps = maps + self.layer_scale_1[:, None, None] * (self.pool(normed) - normed)
        return maps + self.layer_scale_2[:, None, None] * self.mlp(self.norm2(maps))


class PoolFormer(nn.Module):
    """Images (N, 3, H, W) to features (N, widths[3])."""

    def __init__(self, depths: list[int], widths: list[int], pool: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding(3, widths[0], ENTRY)
        self.network = nn.ModuleList()
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if stage:
                self.network.append(PatchEmbedding(widths[stage - 1], width, BETWEEN))
            self.network.append(nn.Sequential(*(PoolFormerBlock(width, pool) for _ in range(depth))))
        self.norm = nn.GroupNorm(1, widths[-1])

    def forward(self, images: Tensor) -> Tensor:
        maps = self.patch_embed(images)
        for part in self.network:
            maps = part(maps)
        return self.norm(maps).mean(dim=(2, 3))


@families.register("poolformer")
def build_poolformer(spec: Mapping[str, Any]) -> tuple[nn.Module, int]:
    """``{"family": "poolformer", "kwargs": {"depths", "widths", "pool"}}``, four depths and widths."""
    kwargs = spec["kwargs"]
    depths, widths, pool = list(kwargs["depths"]), list(kwargs["widths"]), int(kwargs["pool"])
    if len(depths) != 4 or len(widths) != 4 or min(depths + widths) < 1 or pool % 2 == 0:
        raise UserError(f"a poolformer has 4 depths, 4 widths and an odd pool; found {dict(kwargs)}")
    return PoolFormer(depths, widths, pool), widths[-1]
