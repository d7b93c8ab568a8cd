"""How things are measured here: CPU time of one thread, device time on GPUs, peak memory, growth, limits."""

import contextlib
import functools
import math
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

Section = str | Callable[..., str]


@dataclass(frozen=True)
class Setting:
    """What the command was asked for."""

    quick: bool = False
    device: str = "cpu"
    backbone: str | None = None
    data: str | None = None
    words: tuple[str, ...] = ()  # ``key=value`` settings of a run, as ``cdc-refine`` takes them


@dataclass(frozen=True)
class Limit:
    """A promise: a figure that may not be above a bound."""

    name: str
    value: float
    bound: float

    @property
    def kept(self) -> bool:
        return self.value <= self.bound

    def __str__(self) -> str:
        return f"{self.name:64s} {self.value:9.3f}  limit <= {self.bound:<6g} {'kept' if self.kept else 'NOT KEPT'}"


@dataclass
class Found:
    """What a benchmark found: figures by row and column, and the limits that they have to keep."""

    title: str
    rows: dict[str, dict[str, float]]
    limits: list[Limit] = field(default_factory=list)

    def table(self) -> str:
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        # Sizes in their order, then all other columns in theirs.
        sizes = {name: name.replace(",", "") for name in columns}
        columns.sort(key=lambda name: int(sizes[name]) if sizes[name].isdecimal() else math.inf)
        lines = [f"\n{self.title}", " " * 44 + "".join(f"{column:>18}" for column in columns)]
        for name, row in self.rows.items():
            cells = [f"{row[column]:.4g}" if column in row else "" for column in columns]
            lines.append(f"  {name:42}" + "".join(f"{cell:>18}" for cell in cells))
        return "\n".join([*lines, *map(str, self.limits)])

    def as_json(self) -> dict[str, Any]:
        limits = [{**vars(limit), "kept": limit.kept} for limit in self.limits]
        return {"title": self.title, "rows": self.rows, "limits": limits}


class Stopwatch:
    """Time in sections: what a nested one takes does not count for the one around it, unless that is ``whole``.

    ``seconds`` is by (outermost section, innermost section): the same work can belong to several stages of a run.
    """

    def __init__(self, device: str = "cpu", whole: Sequence[str] = ()) -> None:
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._device, self._whole = torch.device(device), whole
        self._open, self._since = list[str](), 0.0

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def of(self, stage: str) -> dict[str, float]:
        """Seconds of a stage by section; its own name stands for what no section took."""
        return {section: seconds for (outer, section), seconds in self.seconds.items() if outer == stage}

    @property
    def place(self) -> tuple[str, str] | None:
        """Where seconds are counted now: (outermost section, innermost section)."""
        if not self._open:
            return None
        return self._open[0], next((name for name in self._open if name in self._whole), self._open[-1])

    def _count(self) -> None:
        now, place = device_seconds(self._device), self.place
        if place:
            self.seconds[place] += now - self._since
        self._since = now


def device_seconds(device: torch.device) -> float:
    """A clock: CPU seconds of this process, or on other devices wall time once they have done their work."""
    if device.type == "cpu":
        return time.process_time()
    (torch.cuda if device.type == "cuda" else torch.mps).synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def timed(watch: Stopwatch, places: Sequence[tuple[Any, str, Section]]) -> Iterator[None]:
    """Time functions where they are looked up: (module or class, name, section or how to tell it from the call)."""

    def with_time(work: Callable[..., Any], section: Section) -> Callable[..., Any]:
        @functools.wraps(work)
        def timed_work(*args: Any, **kwargs: Any) -> Any:
            with watch.section(section if isinstance(section, str) else section(*args)):
                return work(*args, **kwargs)

        return timed_work

    with contextlib.ExitStack() as stack:
        for owner, name, section in places:
            stack.enter_context(patch.object(owner, name, with_time(getattr(owner, name), section)))
        yield


# Settings of every run that is measured: nothing is left to be chosen, and random weights may collapse.
RUN_FLAGS = {"clusters": 10, "augment.flip": False, "augment.crop_scale": 0.4, "on_collapse": "warn"}


def cpu_seconds(work: Callable[[], object], repeats: int = 1, warm: bool = True) -> float:
    """Least CPU time of one call; after one that is not counted, unless the work is so long that it does not matter."""
    if warm:
        work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The exponent p of seconds = a * size^p that fits best: the slope in log-log paper."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(seconds, 1e-9)), 1)[0])


def peak_memory() -> int:
    """Return the most memory that this process has had at a time, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file() and (peak := re.search(r"VmHWM:\s*(\d+)", status.read_text())):
        return int(peak[1]) * 1024
    import resource  # less good: a child begins with the figure of the process that started it

    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def command_seconds(arguments: Sequence[str], repeats: int = 3) -> float:
    """Return the least CPU time of a Python command, start of the interpreter included."""
    import resource  # finer than os.times, whose ticks of 10 ms can hide a short command

    command, times = [sys.executable, *arguments], []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, env=child_environment())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(sum(after[:2]) - sum(before[:2]))  # user and system
    return min(times)


def child_environment() -> dict[str, str]:
    """One thread, and the package of this checkout."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
