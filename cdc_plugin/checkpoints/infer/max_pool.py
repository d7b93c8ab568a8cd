"""Infer from the weights of a small ResNet stem whether a max-pool follows, which has no weights itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Ratio below which no pool, above which a pool explains the statistics. Of 29 checkpoints those without one
# gave at most 0.33, those with a pool at least 0.77; in between a look at images may overrule the guess.
SURELY_NONE, UNDECIDED, SURELY_POOL = 0.35, 0.5, 0.65


@dataclass(frozen=True)
class PoolGuess:
    """Whether a max-pool follows the stem, the ratio that speaks for it, and whether it speaks clearly."""

    kept: bool
    ratio: float
    clear: bool


def expected_activation(shift: Tensor, scale: Tensor, draws: int) -> Tensor:
    """Return the mean of the largest of several independent draws of ReLU(N(shift, scale^2)), per channel.

    After BatchNorm a channel has mean ``shift`` and deviation ``scale``; taken as Gaussian, one draw stands
    for a plain pixel and two for a 3x3 max-pool over neighbours that mostly agree.

    Args:
        shift, scale: (C,) bias and weight of the BatchNorm layer.
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
        return PoolGuess(kept=False, ratio=float("nan"), clear=False)
    shift, scale, weight, seen = (state[name].double() for name in names)
    deviation = (state["layer1.0.bn1.running_var"].double() + 1e-5).sqrt()
    summed = weight.sum(dim=(2, 3))  # (out, in)
    plain, pooled = (
        ((summed @ expected_activation(shift, scale, draws) - seen) / deviation).square().mean().sqrt()
        for draws in (1, 2)
    )
    ratio = float(plain / pooled.clamp_min(1e-12))
    untrained = bool((seen == 0).all())  # statistics as initialised say nothing
    clear = not untrained and not SURELY_NONE < ratio < SURELY_POOL
    return PoolGuess(kept=not untrained and ratio > UNDECIDED, ratio=ratio, clear=clear)
