"""Compute as torch does by default, whatever a caller has switched on or off around it."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def torch_defaults() -> Iterator[None]:
    """Compute in float32 on the CPU unless told otherwise, with gradients.

    The caller's choices and torch's random numbers, of which every new layer takes some, are left as they were.

    >>> torch.set_default_dtype(torch.float64)
    >>> with torch_defaults():
    ...     torch.ones(1).dtype
    torch.float32
    >>> torch.set_default_dtype(torch.float32)
    """
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as usual:
        if dtype != torch.float32:  # of the whole process: other threads may be computing
            usual.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        for kind in ("cpu", "cuda", "mps"):
            if torch.is_autocast_enabled(kind):
                usual.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            usual.enter_context(torch.device("cpu"))
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            yield
