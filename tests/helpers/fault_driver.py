"""Run ``cdc-refine`` with faults: at the k-th call of a function the process is killed, the disk is full, and so on.

As a script (``fault_driver.py FAULTS WORD...``) it can be started by ``torchrun``, too.
"""

from __future__ import annotations

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
    """What fails, and where.

    Args:
        target: ``module:function`` or ``module:Class.method``.
        do: name of an action below.
        call: the first matching call that fails, counted from 1.
        times: how many calls fail; 0 for all that follow.
        matching: text that must be found in the call's first two arguments.
        after: the function runs first.
        rank: of several processes, the one that fails.
        once: a file that the fault creates; if it exists, nothing fails.
        path: a file for actions that need one.
    """

    target: str
    do: str = "kill"
    call: int = 1
    times: int = 1
    matching: str = ""
    after: bool = False
    rank: int | None = None
    once: str | None = None
    path: str | None = None


def kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def terminate(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fill_disk(fault: Fault) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def exhaust_gpu(fault: Fault) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nSee documentation for details")


def exhaust_memory(fault: Fault) -> None:
    # torch's message; the second line must not reach a user.
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 99999999999 bytes. Error code 12 (Cannot allocate memory)\nframe 0: c10::alloc_cpu"
    )


def delete(fault: Fault) -> None:
    assert fault.path is not None
    Path(fault.path).unlink()


def terminate_twice(fault: Fault) -> None:
    from cdc_plugin.training import signals

    terminate(fault)
    signals.ECHO = 0.0
    terminate(fault)


def deny(fault: Fault) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


ACTIONS = (kill, terminate, terminate_twice, interrupt, fill_disk, deny, exhaust_gpu, exhaust_memory, delete)


def apply_fault(fault: Fault, work: Callable[..., Any], arguments: tuple, named: dict[str, Any]) -> Any:
    """Call the function with the fault, and return its result if it survives."""
    if fault.do == "nan":
        return work(*arguments, **named) * float("nan")
    if fault.do.startswith("half-"):  # of the file that torch.save writes
        work(*arguments, **named)
        os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
        action = fault.do.removeprefix("half-").replace("-", "_")
    else:
        action = fault.do.replace("-", "_")
        if fault.after:
            result = work(*arguments, **named)
    {one.__name__: one for one in ACTIONS}[action](fault)
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
