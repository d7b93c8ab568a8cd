"""Say where and how a run computes: device, precision, processes, and who shows progress."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cdc_plugin.errors import ConfigError, option
from cdc_plugin.training.distributed import SINGLE, Distributed

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]


def show_nothing(items: Iterable[Any], total: int, description: str) -> Iterable[Any]:
    """Return the items as they are: the progress of a caller that shows none."""
    return items


@dataclass(frozen=True)
class Runtime:
    """Where and how a run computes.

    Args:
        precision: ``float32``, or ``bfloat16`` / ``float16`` for autocast.
        distributed: the processes that compute together.
        progress: wraps an iterable of so many items in a bar with a description.
    """

    device: torch.device
    precision: str = "float32"
    distributed: Distributed = SINGLE
    progress: Progress = show_nothing

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context in which networks compute in this precision."""
        return autocast(self.device, self.precision)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """Return the context in which networks on a device compute in a precision."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


def choose_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` takes CUDA, then Apple's MPS, then the CPU.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"device {name!r} cannot be used here ({reason[:150]}); try {option('device', 'cpu')}"
        ) from error
    return device


def lr_multiplier(schedule: str, steps: int, total_steps: int) -> float:
    """Return the factor on a learning rate after so many steps: 1, or a cosine that ends at 0.

    >>> lr_multiplier("cosine", 50, 100), lr_multiplier("constant", 50, 100)
    (0.5, 1.0)
    """
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, steps / total_steps)))
