"""Layers whose results do not depend on how many processes share a batch, bit for bit, on CPUs.

Sums of numbers depend on their order by rounding, which training at the rates of small sets blows up: after nine steps
two processes select other images than one. Convolutions and linear layers therefore see their rows in pieces that are
the same for any number of processes, and sums over pieces are in double precision, where hardly anything is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.training.distributed import Distributed

OWN = "gradient_of_pieces"  # attribute of a weight, until `sum_gradients`
PIECEWISE = (F.conv1d, F.conv2d, F.conv3d, F.linear)


def piecewise(
    distributed: Distributed, sizes: Sequence[int], function: Callable[..., Tensor], args: Any, kwargs: Any
) -> Tensor:
    """What one of the functions PIECEWISE gives for these arguments.

    Args:
        sizes: rows of this process in each piece.
    """
    names = ("input", "weight", "bias")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rows, weight, bias = given["input"], given["weight"], given.get("bias")
    work = partial(function, **{name: value for name, value in kwargs.items() if name not in names})
    images = sum(sizes)
    times, rest = divmod(len(rows), max(1, images))  # windows of an image are rows of their own
    if rest:  # no rows of images, but a table that they share
        return function(*args, **kwargs)
    cut = [size * times for size in sizes if size] if images else [len(rows)]
    return _Piecewise.apply(rows, weight, bias, distributed, cut, work, args[3:])


def sum_gradients(distributed: Distributed, parameters: Iterable[Tensor]) -> None:
    """Give every process the gradients of all, in double precision until they are summed."""
    found = [parameter for parameter in parameters if parameter.requires_grad]
    if not found:
        return
    together = distributed.total(torch.cat([_taken(parameter).flatten() for parameter in found]))
    for parameter, summed in zip(found, together.split([each.numel() for each in found]), strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(summed.view(parameter.shape))


def _taken(parameter: Tensor) -> Tensor:
    """What this process knows of a gradient: from pieces, and from whatever else the weight was used for."""
    known = parameter.__dict__.pop(OWN, None)
    plain = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return plain.double() if known is None else known + plain


class _Piecewise(torch.autograd.Function):
    """Passes are repeated piece by piece on the way back, in the same precision."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(
        context: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        distributed: Distributed,
        sizes: list[int],
        work: Callable[..., Tensor],
        more: tuple[Any, ...],
    ) -> Tensor:
        context.save_for_backward(rows, weight, bias)
        context.distributed, context.sizes, context.work, context.more = distributed, sizes, work, more
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
        weights = [each for each in (weight, bias) if each is not None]
        slopes = [_booked(context.distributed, each, known) for each, known in zip(weights, sums, strict=True)]
        return torch.cat(of_rows), *slopes, *[None] * (6 - len(slopes))


def _booked(distributed: Distributed, weight: Tensor, slope: Tensor) -> Tensor | None:
    """Keep a sum for `sum_gradients`.

    Nothing is exchanged on the way back: what one process takes for rows of images may be a table for another. A
    weight that is computed from others passes its gradient on, and can not wait.
    """
    if not weight.is_leaf:
        return distributed.only_main(distributed.total(slope)).to(weight.dtype)
    if weight.requires_grad:
        weight.__dict__[OWN] = weight.__dict__.get(OWN, 0) + slope
    return None
