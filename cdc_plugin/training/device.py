"""Choose the device and the precision of a run."""

from __future__ import annotations

import contextlib
import math

import torch

from cdc_plugin.errors import UserError


def choose_device(name: str) -> torch.device:
    """``auto`` takes a CUDA device, then Apple's, then the CPU."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"device {name!r} cannot be used here ({reason[:150]}); try --device cpu") from error
    return device


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


def rate_factor(schedule: str, steps: int, total_steps: int) -> float:
    """What a rate is multiplied with after so many steps: 1, or a cosine that ends at 0."""
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, steps / total_steps)))
