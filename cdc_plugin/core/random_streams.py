"""Draw independent random streams by purpose, so that none depends on what ran before."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

# Purposes of random numbers: generator(seed, PURPOSE, ...).
ORDER, TRAINING, INITIALISATION, VIEWS, AUGMENTATION, FINAL, QUALITY, REVIEW, PROBE, NEIGHBOURS = range(1, 11)
KINDS, COUNT = 11, 12


def generator(*parts: int) -> torch.Generator:
    """Build a CPU generator that depends on these numbers only, for instance (seed, purpose, epoch).

    A resumed run then equals an undisturbed one.

    >>> draws = [int(torch.randint(1000, (), generator=generator(0, TRAINING, epoch))) for epoch in (0, 1, 0)]
    >>> draws[0] == draws[2] != draws[1]
    True
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:  # splitmix64 steps, so that neighbouring seeds give unrelated streams
        state = (state + part * 0xBF58476D1CE4E5B9 + 1) & (2**64 - 1)
        state ^= state >> 30
        state = (state * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 27
    return torch.Generator().manual_seed(state >> 1)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on a device, from locked memory where the host then need not wait for the copy.

    On MPS the host waits: a copy beside other work would read memory that may have been given back.
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@contextlib.contextmanager
def fork_rng(randomness: torch.Generator, device: torch.device, process: int = 0) -> Iterator[None]:
    """Seed torch's global generator, which weights and dropout draw from, for each process; restore it afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(torch.randint(2**62, (), generator=randomness)) + process)
        yield
