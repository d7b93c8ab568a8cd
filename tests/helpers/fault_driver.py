"""Run ``cdc-refine`` with faults: at the k-th call of a function the process is killed, the disk is full, and so on.

As a script (``fault_driver.py FAULTS WORD...``) it can be started by ``torchrun``, too.
"""

import errno
import functools
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What fails, and where."""

    target: str  # module:function or module:Class.method
    do: str = "kill"  # an action of `act`, the same after half- of a file was written, or nan
    call: int = 1  # the first matching call that fails
    times: int = 1  # how many calls fail; 0 for all that follow
    matching: str = ""  # text that must be found in the call's first two arguments
    after: bool = False  # the function runs first
    rank: int | None = None  # of several processes, the one that fails
    once: str | None = None  # a file that the fault creates; if it exists, nothing fails
    path: str | None = None  # a file for actions that need one


SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
# torch's messages; the second line must not reach a user.
GPU = "CUDA out of memory. Tried to allocate 20.00 MiB.\nSee documentation for details"
MEMORY = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 99999999999 bytes. Error code 12 (Cannot allocate memory)\nframe 0: c10::alloc_cpu"
)


def act(name: str, fault: Fault) -> None:
    """Send this process a signal, delete a file, or raise an error."""
    import torch

    from cdc_plugin.training import signals

    if name in SIGNALS:
        os.kill(os.getpid(), SIGNALS[name])
        time.sleep(60 if name == "kill" else 0)
    elif name == "terminate-twice":
        act("terminate", fault)
        signals.ECHO = 0.0
        act("terminate", fault)
    elif name == "delete":
        Path(str(fault.path)).unlink()
    else:
        raise {
            "fill-disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "deny": OSError(errno.EROFS, os.strerror(errno.EROFS)),
            "exhaust-gpu": torch.OutOfMemoryError(GPU),
            "exhaust-memory": RuntimeError(MEMORY),
        }[name]


def apply_fault(fault: Fault, work: Callable[..., Any], arguments: tuple, named: dict[str, Any]) -> Any:
    """Call the function with the fault, and return its result if it survives."""
    half = fault.do.startswith("half-")  # of the file that torch.save writes
    if fault.do == "nan":
        return work(*arguments, **named) * float("nan")
    if fault.after or half:
        result = work(*arguments, **named)
    if half:
        os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
    act(fault.do.removeprefix("half-"), fault)
    return result if fault.after else work(*arguments, **named)


def install(fault: Fault) -> None:
    """Replace the target by a function with the fault, wherever the package has imported it."""
    if fault.rank is not None and int(os.environ.get("RANK", "0")) != fault.rank:
        return
    home, _, name = fault.target.partition(":")
    owner: Any = importlib.import_module(home)
    *classes, name = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    work, calls = getattr(owner, name), 0

    @functools.wraps(work)
    def faulty(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        if fault.matching in " ".join(map(str, arguments[:2])):
            calls += 1
            due = calls >= fault.call and (not fault.times or calls < fault.call + fault.times)
            if due and not (fault.once and os.path.exists(fault.once)):
                if fault.once:
                    Path(fault.once).touch()
                return apply_fault(fault, work, arguments, named)
        return work(*arguments, **named)

    setattr(owner, name, faulty)
    for module in [module for key, module in sys.modules.items() if key.startswith("cdc_plugin.")]:
        if vars(module).get(name) is work:
            setattr(module, name, faulty)


def run(words: list[str], faults: list[Fault]) -> None:
    import cdc_plugin.pipeline  # noqa: F401  (everything that a run imports, so that the fault reaches it)
    from cdc_plugin.cli.refine import refine_command

    for fault in faults:
        install(fault)
    refine_command(words)


if __name__ == "__main__":
    run(sys.argv[2:], [Fault(**fault) for fault in json.loads(sys.argv[1])])
