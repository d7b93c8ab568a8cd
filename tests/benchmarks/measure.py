"""How things are measured here: CPU time of one thread, device time on GPUs, peak memory, growth, limits."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Section = str | Callable[..., str]


@dataclass(frozen=True)
class Setting:
    """What the command was asked for.

    Args:
        words: ``key=value`` settings of a run, as ``cdc-refine`` takes them.
    """

    quick: bool = False
    device: str = "cpu"
    backbone: str | None = None
    data: str | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limit:
    """A promise: a figure that may not be above (or below) a bound."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def kept(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign, verdict = ">=" if self.at_least else "<=", "kept" if self.kept else "NOT KEPT"
        return f"{self.name:64s} {self.value:9.3f}  limit {sign} {self.bound:<6g} {verdict}"


@dataclass
class Found:
    """What a benchmark found: figures by row and column, and the limits that they have to keep."""

    title: str
    rows: dict[str, dict[str, float]]
    limits: list[Limit] = field(default_factory=list)

    def table(self) -> str:
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        columns.sort(key=_size)  # sizes in their order, then all other columns in theirs
        lines = [f"\n{self.title}", " " * 44 + "".join(f"{column:>18}" for column in columns)]
        for name, row in self.rows.items():
            cells = [f"{row[column]:.4g}" if column in row else "" for column in columns]
            lines.append(f"  {name:42}" + "".join(f"{cell:>18}" for cell in cells))
        return "\n".join([*lines, *map(str, self.limits)])

    def as_json(self) -> dict[str, Any]:
        limits = [{**vars(limit), "kept": limit.kept} for limit in self.limits]
        return {"title": self.title, "rows": self.rows, "limits": limits}


class Stopwatch:
    """Splits time into sections. What a nested section takes does not count for the one around it.

    ``seconds`` is by (outermost section, innermost section): the same work can belong to several stages of a run.

    Args:
        whole: sections that are not split: what they contain counts for them.
    """

    def __init__(self, device: str = "cpu", whole: Sequence[str] = ()) -> None:
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._whole = whole
        self._device, self._open = torch.device(device), list[str]()
        self._since = 0.0

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


def _size(column: str) -> float:
    digits = column.replace(",", "")
    return int(digits) if digits.isdigit() else math.inf


def device_seconds(device: torch.device) -> float:
    """A clock: CPU seconds of this process, or on other devices wall time once they have done their work."""
    if device.type == "cpu":
        return time.process_time()
    (torch.cuda if device.type == "cuda" else torch.mps).synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def timed(watch: Stopwatch, places: Sequence[tuple[Any, str, Section]]) -> Iterator[None]:
    """Time functions where they are looked up: (module or class, name, section or how to tell it from the call)."""
    with contextlib.ExitStack() as stack:
        for owner, name, section in places:
            stack.enter_context(_timed_one(watch, owner, name, section))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Another function in the place of one, for a while."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def _timed_one(watch: Stopwatch, owner: Any, name: str, section: Section) -> contextlib.AbstractContextManager[None]:
    work = getattr(owner, name)

    @functools.wraps(work)
    def with_time(*args: Any, **kwargs: Any) -> Any:
        with watch.section(section if isinstance(section, str) else section(*args)):
            return work(*args, **kwargs)

    return replaced(owner, name, with_time)


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
    x, y = ([math.log(max(value, 1e-9)) for value in values] for values in (sizes, seconds))
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - middle_x) ** 2 for a in x)


def peak_memory() -> int:
    """Most memory that this process has had at a time, in bytes.

    Not ru_maxrss where there is a better figure: a child begins with that of the process that started it.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        lines = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        if lines:
            return int(lines[0].split()[1]) * 1024
    import resource

    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def command_seconds(arguments: Sequence[str], repeats: int = 3) -> float:
    """Least CPU time of a Python command, start of the interpreter included."""
    times = []
    for _ in range(repeats):
        before = os.times()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=child_environment())
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        times.append(spent)
    return min(times)


def child_environment() -> dict[str, str]:
    """One thread, and the package of this checkout."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
