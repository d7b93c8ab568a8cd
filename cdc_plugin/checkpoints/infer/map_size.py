"""Infer the size of a ResNet's images from its weights, which no name or shape shows.

Zero padding lowers the mean that a 3x3 convolution gives, the more the smaller the map: each side tap meets padding in
one of n rows or columns. BatchNorm remembers that mean, so the side n of the last maps can be read off it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.checkpoints.infer.max_pool import expected_activation

# Share of the remembered means that the fit must explain; 14 networks gave 0.83 to 0.99.
TRUSTED_FIT = 0.5


def inner_share(state: Mapping[str, Tensor]) -> float | None:
    """Return (n - 1) / n for last maps of n x n, by the statistics of the fourth stage; None if they are unclear.

    The mean of an output channel is a sum over the 9 taps of (weight x mean of the input): whole for the centre, times
    (n - 1) / n for the sides, times its square for the corners. The input is taken as ReLU of a Gaussian, its
    overall scale is left free.
    """
    shares = torch.linspace(0.2, 0.99, 159, dtype=torch.float64)
    taken = torch.stack([torch.ones_like(shares), shares, shares.square()])  # (3, S): centre, sides, corners
    missed, total = torch.zeros_like(shares), 0.0
    try:
        for number in itertools.count(int("layer4.0.conv3.weight" in state)):  # the stride of a first bottleneck
            names = ("conv2.weight", "bn1.bias", "bn1.weight", "bn2.running_mean", "bn2.running_var")
            if f"layer4.{number}.conv2.weight" not in state:
                break
            weight, shift, scale, seen, variance = (state[f"layer4.{number}.{name}"].double() for name in names)
            taps = torch.einsum("oiyx,i->oyx", weight, expected_activation(shift, scale, draws=1))
            centre = taps[:, 1, 1]
            sides = taps[:, 0, 1] + taps[:, 2, 1] + taps[:, 1, 0] + taps[:, 1, 2]
            parts = torch.stack([centre, sides, taps.sum(dim=(1, 2)) - centre - sides], dim=1)  # (O, 3)
            deviation = (variance + 1e-5).sqrt()
            expected, target = (parts / deviation[:, None]) @ taken, seen / deviation  # (O, S), (O,)
            factor = (target @ expected) / expected.square().sum(dim=0).clamp_min(1e-12)
            missed += (target[:, None] - factor * expected).square().sum(dim=0)
            total += float(target.square().sum())
    except (KeyError, RuntimeError, IndexError):  # missing or misshapen weights, which the load reports
        return None
    best = int(missed.argmin())
    if total == 0 or float(missed[best]) > (1 - TRUSTED_FIT) * total:
        return None
    return float(shares[best])


def last_side(stem: Mapping[str, Any], size: int) -> int:
    """Return the side of the maps of a ResNet's fourth stage for images of side ``size``.

    >>> last_side({"kernel": 7, "stride": 2, "padding": 3, "pool": True}, 224)
    7
    """
    side = (size + 2 * int(stem["padding"]) - int(stem["kernel"])) // int(stem["stride"]) + 1
    if stem["pool"]:
        side = (side + 2 - int(stem.get("pool_kernel", 3))) // 2 + 1
    for _ in range(3):
        side = (side - 1) // 2 + 1
    return side
