"""Handle the request of a cluster to end: SIGTERM, and SIGUSR1, which SLURM's ``--signal`` sends ahead of it.

A command ends at once, as by Ctrl-C; while it trains it may ask for time to save its state: `noticing_termination`.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
# Within so many seconds a second signal is an echo of the first: SLURM signals every process of a job step, and
# torchrun forwards to its processes the signal that they have already received.
ECHO = 2.0


class Terminated(KeyboardInterrupt):
    """Somebody asked this process to end. What holds for Ctrl-C holds for it: no ``except Exception`` may stop it."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.name = signal.Signals(number).name
        self.exit_code = 128 + number  # as shells report it
        super().__init__(f"stopped by {self.name}")


def find_interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interruption behind an error: a library that is interrupted while it cleans up may fail at that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


def add_hint(interruption: KeyboardInterrupt, hint: str) -> None:
    """Add how to continue, for the command to print and for a traceback to show."""
    interruption.args = ("; ".join([*map(str, interruption.args), hint]),)
    interruption.hint = hint  # type: ignore[attr-defined]


@contextlib.contextmanager
def noticing_interrupts() -> Iterator[list[KeyboardInterrupt]]:
    """Yield a list that keeps each Ctrl-C: where C code loses one, as within ``import numpy``, other errors follow."""
    heard: list[KeyboardInterrupt] = []
    earlier = signal.getsignal(signal.SIGINT)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        heard.append(KeyboardInterrupt())
        raise heard[-1]

    ours = earlier is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield heard
    finally:
        if ours:
            signal.signal(signal.SIGINT, earlier)


@dataclass
class Notice:
    """Whether this process was asked to end, and by which signal."""

    number: int | None = None

    @property
    def asked(self) -> bool:
        return self.number is not None

    def end(self) -> None:
        """End now, if asked; to be called when everything worth keeping is on disk."""
        if self.number is not None:
            raise Terminated(self.number)


@contextlib.contextmanager
def ending_on_termination() -> Iterator[None]:
    """Raise `Terminated` in the main thread at once on a signal, so that unfinished files are cleaned up."""

    def end(number: int, _frame: FrameType | None) -> None:
        if not _is_echo():
            raise Terminated(number)

    with _handled(end):
        yield


@contextlib.contextmanager
def noticing_termination() -> Iterator[Notice]:
    """Record the first signal, so that the caller can save and then end; raise on a second one.

    A caller that does not end by itself is ended when it leaves the context. Nothing is recorded in a thread other
    than the main one, which cannot handle signals, nor where a script handles them in its own way.
    """
    notice = Notice()

    def note(number: int, _frame: FrameType | None) -> None:
        if _is_echo():
            return
        if notice.asked:
            raise Terminated(number)
        notice.number = number

    with _handled(note):
        yield notice
    notice.end()


Handler = Callable[[int, FrameType | None], None]
_ours: list[Handler] = []
_heard = [-math.inf]  # when the last signal arrived; signals concern the whole process


def _is_echo() -> bool:
    now = time.monotonic()
    if now - _heard[0] < ECHO:
        return True
    _heard[0] = now
    return False


@contextlib.contextmanager
def _handled(handler: Handler) -> Iterator[None]:
    earlier: dict[int, Handler | int | None] = {}
    if threading.current_thread() is threading.main_thread():
        # Handlers of a script or of Lightning, and signals that somebody has chosen to ignore, are left alone.
        free = (signal.SIG_DFL, *_ours)
        earlier = {number: signal.getsignal(number) for number in SIGNALS if signal.getsignal(number) in free}
    _ours.append(handler)
    try:
        for number in earlier:
            signal.signal(number, handler)
        yield
    finally:
        for number, former in earlier.items():
            signal.signal(number, former)
        _ours.remove(handler)


def end_with_parent() -> None:
    """End this process when the one that started it is gone, or at once if it is gone already."""

    def watch() -> None:
        while os.getppid() == _parent:
            time.sleep(1)
        os._exit(1)

    # A process whose torchrun was killed would wait for the others for hours, deaf to signals.
    threading.Thread(target=watch, name="parent", daemon=True).start()


def _meet_parent() -> None:
    global _parent
    _parent = os.getppid()


# At import, not on first use: importing torch takes seconds, during which the parent may be killed.
_parent = os.getppid()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_meet_parent)
