"""Give every purpose a random stream of its own, so that none depends on what ran before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Purposes of random numbers: generator(seed, PURPOSE, ...).
ORDER, TRAINING, INITIALISATION, VIEWS, AUGMENTATION, FINAL, QUALITY = 1, 2, 3, 4, 5, 6, 7


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
