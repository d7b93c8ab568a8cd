"""Infer from the BatchNorm statistics in a ResNet's weights what no name or shape shows: max-pool and image size.

A max-pool after a small stem raises the mean that the next convolution sees. Zero padding lowers the mean that a 3x3
convolution gives, the more the smaller the map: each side tap meets padding in one of n rows or columns. BatchNorm
remembers those means, so the pool and the side n of the last maps can be read off them.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Ratio below which no pool, above which a pool explains the statistics. Of 29 checkpoints those without one
# gave at most 0.33, those with a pool at least 0.77; in between a look at images may overrule the guess.
SURELY_NONE, UNDECIDED, SURELY_POOL = 0.35, 0.5, 0.65
# Share of the remembered means that the fit must explain; 14 networks gave 0.83 to 0.99.
TRUSTED_FIT = 0.5


@dataclass(frozen=True)
class PoolGuess:
    """Whether a max-pool follows the stem, and whether the statistics show it clearly."""

    kept: bool
    clear: bool


def expected_activation(shift: Tensor, scale: Tensor, draws: int) -> Tensor:
    """Return the mean of the largest of several independent draws of ReLU(N(shift, scale^2)), per channel.

    After BatchNorm a channel has mean ``shift`` and deviation ``scale``; taken as Gaussian, one draw stands
    for a plain pixel and two for a 3x3 max-pool over neighbours that mostly agree.
    """
    grid = torch.linspace(-6, 6, 2401, dtype=torch.float64)
    normal = torch.distributions.Normal(0.0, 1.0)
    density = draws * normal.cdf(grid) ** (draws - 1) * normal.log_prob(grid).exp()
    values = torch.relu(shift.double()[:, None] + scale.double().abs()[:, None] * grid)  # (C, 2401)
    return torch.trapezoid(values * density, grid, dim=1)


def pool_by_weights(state: Mapping[str, Tensor]) -> PoolGuess:
    """Guess the max-pool of a ResNet from the running mean that the first convolution after it has seen.

    That mean is the sum of the convolution's weights times the mean of its input, and a max-pool raises the
    input: the error without a pool, divided by the error with one, is small where there is none.
    """
    names = ("bn1.bias", "bn1.weight", "layer1.0.conv1.weight", "layer1.0.bn1.running_mean")
    if any(name not in state for name in (*names, "layer1.0.bn1.running_var")):
        return PoolGuess(kept=False, clear=False)
    shift, scale, weight, seen = (state[name].cpu().double() for name in names)
    deviation = (state["layer1.0.bn1.running_var"].cpu().double() + 1e-5).sqrt()
    summed = weight.sum(dim=(2, 3))  # (out, in)
    plain, pooled = (
        ((summed @ expected_activation(shift, scale, draws) - seen) / deviation).square().mean().sqrt()
        for draws in (1, 2)
    )
    ratio = float(plain / pooled.clamp_min(1e-12))
    untrained = bool((seen == 0).all())  # statistics as initialised say nothing
    clear = not untrained and not SURELY_NONE < ratio < SURELY_POOL
    return PoolGuess(kept=not untrained and ratio > UNDECIDED, clear=clear)


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
            weight, shift, scale, seen, variance = (state[f"layer4.{number}.{name}"].cpu().double() for name in names)
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
