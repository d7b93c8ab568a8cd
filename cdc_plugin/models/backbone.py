"""Define a backbone with its input convention; the heads that stand on it are in ``heads``."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.config.schema import LARGEST_SIDE
from cdc_plugin.data.side import Side
from cdc_plugin.errors import ConfigError, shorten

log = logging.getLogger(__name__)


class Backbone(nn.Module):
    """A network from normalised images (N, 3, H, W) to features (N, feature_dim), with its input convention.

    Args:
        module: any network whose output is (N, feature_dim) or (N, feature_dim, 1, 1).
        mean, std: the statistics that images in [0, 1] are normalised with, one number per channel.
        input_size: side of the square images it was trained on; a ``Side`` says how they are made of photos.
        spec: how to build ``module`` again (see ``models.architectures``); None for a user's own class.
        inferred: names of the facts above that the checkpoint did not state.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        module: nn.Module,
        feature_dim: int,
        mean: Sequence[float],
        std: Sequence[float],
        input_size: int,
        spec: dict[str, Any] | None = None,
        inferred: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if len(mean) != 3 or len(std) != 3 or not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
            raise ConfigError(f"mean and std take 3 numbers each, std above 0; found mean={mean} std={std}")
        if not 1 <= input_size <= LARGEST_SIDE:
            raise ConfigError(
                f"input_size lies between 1 and {LARGEST_SIDE} pixels, found {shorten(input_size)}; correct it where "
                "it is stated, such as model.json, config.json or args.json"
            )
        self.module = module
        self.feature_dim = int(feature_dim)
        self.input_size = input_size if isinstance(input_size, Side) else int(input_size)
        self.spec = spec
        self.inferred = tuple(inferred)
        self.register_buffer("mean", torch.tensor([float(m) for m in mean], dtype=torch.float32), persistent=False)
        self.register_buffer("std", torch.tensor([float(s) for s in std], dtype=torch.float32), persistent=False)

    @property
    def takes_features(self) -> bool:
        """Return whether it takes vectors that other networks have computed, in place of images."""
        return (self.spec or {}).get("family") == "features"

    def place(self, device: torch.device, compiled: bool, trained: bool) -> None:
        """Move to a device, in the layout that convolutions compute fastest in, and compile on request."""
        self.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if trained and device.type == "cpu" and torch.get_num_threads() > 1 and any(map(_crashes, self.modules())):
            log.warning("training uses one thread: torch's convolutions of fewer than 16 channels crash with several")
            torch.set_num_threads(1)
        if compiled:
            self.module.compile()

    def forward(self, images: Tensor) -> Tensor:
        features = self.module(images)
        if features.ndim == 4 and features.shape[2:] == (1, 1):
            features = features.flatten(1)
        if features.ndim != 2 or features.shape[1] != self.feature_dim:
            raise ConfigError(
                f"the backbone was declared with feature_dim={self.feature_dim}, but its output has shape "
                f"{tuple(features.shape)}; pool its output to (N, {self.feature_dim}) or state the right size"
            )
        return features


def _crashes(layer: nn.Module) -> bool:
    """Return whether a layer's backward pass writes beyond its memory: oneDNN's, with several threads (torch 2.15)."""
    if not isinstance(layer, nn.Conv2d):
        return False
    return layer.kernel_size == (1, 1) and max(layer.stride) > 1 and layer.in_channels // layer.groups < 16
