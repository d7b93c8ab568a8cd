"""Where and how a run computes: device, precision, seeds, and files that are never half-written."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def generator(*parts: int) -> torch.Generator:
    """A CPU generator that depends on the given numbers only: (seed, purpose, epoch), say.

    Order and augmentation of an epoch then do not depend on what ran before, which is what makes a resumed
    run equal an undisturbed one.
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:  # splitmix64 steps, so that neighbouring seeds give unrelated streams
        state = (state + part * 0xBF58476D1CE4E5B9 + 1) & (2**64 - 1)
        state ^= state >> 30
        state = (state * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 27
    return torch.Generator().manual_seed(state >> 1)


def rate_factor(schedule: str, steps: int, total_steps: int) -> float:
    """What a rate is multiplied with after so many steps: 1, or a cosine that ends at 0."""
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, steps / total_steps)))


@contextlib.contextmanager
def fork_rng(randomness: torch.Generator, device: torch.device, process: int = 0) -> Iterator[None]:
    """Random weights, dropout and the like draw from torch's global generator: in here from a stream of their own.

    Args:
        process: which of several; each has a stream of its own.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(torch.randint(2**62, (), generator=randomness)) + process)
        yield


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, flush it to disk, and rename it into place."""
    with _clear_disk_errors(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            # mkstemp makes private files; results are as readable as any other file of the user.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _clear_disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left while writing {path}; what was written before is whole: free some space and "
                "run again, cdc-refine and cdc-pretrain with --resume"
            ) from error
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    except Exception as error:
        # The writers of torch and safetensors report a full disk in words of their own.
        theirs = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
        words = ("write", "file", "i/o error", "iostream", "unexpected pos")
        if theirs and any(word in str(error).lower() for word in words):
            reason = str(error).splitlines()[0][:150]
            raise UserError(
                f"cannot write {path} (disk full? {reason}); what was written before is whole: free some space "
                "and run again, cdc-refine and cdc-pretrain with --resume"
            ) from error
        raise
