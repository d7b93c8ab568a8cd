"""How a process that is all ours is set up; a library would leave these things to its caller."""

from __future__ import annotations

import contextlib
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers for `mallopt`


def set_up_process() -> None:
    """To be called before torch is imported."""
    # Read by OpenMP when torch is imported: waiting threads sleep instead of spinning, which on a busy machine
    # took a third of the time and a quarter of the CPU seconds of the "active" policy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The C library keeps what is freed for the next tensor: to fetch pages anew for each took 5 % of a ResNet's time
    # and more than half of that of a weak view.
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError, OSError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(MMAP_THRESHOLD, 1 << 30)
            mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
