"""Layers whose results do not depend on how many processes share a batch, bit for bit, on CPUs.

Sums of numbers depend on their order by rounding, which training at the rates of small sets blows up: after nine steps
two processes select other images than one. Convolutions and linear layers therefore see their rows in pieces that are
the same for any number of processes, and sums over pieces are in double precision, where hardly anything is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.world import World

PIECEWISE = (F.conv1d, F.conv2d, F.conv3d, F.linear)


def piecewise(world: World, sizes: Sequence[int], function: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """What one of the functions PIECEWISE gives for these arguments.

    Args:
        sizes: rows of this process in each piece.
    """
    names = ("input", "weight", "bias")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rows, weight, bias = given["input"], given["weight"], given.get("bias")
    work = partial(function, **{name: value for name, value in kwargs.items() if name not in names})
    times, rest = divmod(len(rows), max(1, sum(sizes)))  # windows of an image are rows of their own
    if rest or len(rows) == 0:
        return function(*args, **kwargs)
    return _Piecewise.apply(rows, weight, bias, world, [size * times for size in sizes if size], work, args[3:])


class _Piecewise(torch.autograd.Function):
    """Passes are repeated piece by piece on the way back, in the same precision."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(
        context: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        world: World,
        sizes: list[int],
        work: Callable[..., Tensor],
        more: tuple[Any, ...],
    ) -> Tensor:
        context.save_for_backward(rows, weight, bias)
        context.world, context.sizes, context.work, context.more = world, sizes, work, more
        return torch.cat([work(piece, weight, bias, *more) for piece in rows.split(sizes)])

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        rows, weight, bias = context.saved_tensors
        sums = [torch.zeros_like(each, dtype=torch.float64) for each in (weight, bias) if each is not None]
        of_rows = []
        for piece, slope in zip(rows.split(context.sizes), gradient.split(context.sizes), strict=True):
            with torch.enable_grad():
                leaves = [each.detach().requires_grad_() for each in (piece, weight, bias) if each is not None]
                value = context.work(*leaves, *([] if bias is not None else [None]), *context.more)
            first, *others = torch.autograd.grad(value, leaves, slope)
            of_rows.append(first)
            for known, other in zip(sums, others, strict=True):
                known += other
        totals = [context.world.only_main(context.world.total(known)).to(weight.dtype) for known in sums]
        return torch.cat(of_rows), *totals, *[None] * (6 - len(totals))
