"""Locks between processes, of one machine or several, as files that tell their owner; those of the dead are taken over.

No lock of the operating system: these do not work on every network file system. Two owners at once, which a process
that was stopped for minutes can cause, do the same work twice and harm nothing, as all files are written whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from cdc_plugin.data.row_file import DISK_FULL, clear_error

BEAT = 5.0  # seconds after which an owner shows again that it lives
PATIENCE = 60.0  # seconds without a beat after which it is taken for dead
PAUSE = 0.2

log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock beside ``path``; waits for whoever has it.

    On a disk that is too full for a lock one does without: there may be no room for the entry either, but for that
    older ones are removed.

    Raises:
        UserError: the folder can not be written.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        _take(lock)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise clear_error(error, lock) from error
        log.debug("no lock (%s)", error)
        yield
        return
    done = threading.Event()
    pulse = threading.Thread(target=_beat, args=(lock, done), name="lock", daemon=True)
    pulse.start()
    try:
        yield
    finally:
        done.set()
        pulse.join()
        with contextlib.suppress(OSError):
            lock.unlink(missing_ok=True)


def is_dead(file: Path) -> bool:
    """Whether a lock or a half-written file is of a process of this machine that is no more."""
    if file.suffix == ".lock":
        try:
            owner = file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return False
    else:
        owner = file.name.removesuffix(".part")
    match = re.fullmatch(rf"(?:.*\.)?{re.escape(socket.gethostname())}\.(\d+)", owner)
    return match is not None and not _is_alive(int(match.group(1)))


def _take(lock: Path) -> None:
    beat, since, waiting = -1, time.monotonic(), False
    while True:
        try:
            handle = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            pass
        except PermissionError:
            if os.name != "nt":  # Windows says this of a lock that is being removed
                raise
        else:
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(f"{socket.gethostname()}.{os.getpid()}")
            except OSError:
                lock.unlink(missing_ok=True)  # without an owner it would be waited for
                raise
            return
        try:
            seen = lock.stat().st_mtime_ns
        except OSError:
            continue  # just given back
        if seen != beat:
            beat, since = seen, time.monotonic()
        # Not by the lock's own time: the clocks of two machines differ.
        if is_dead(lock) or time.monotonic() - since > PATIENCE:
            log.info("%s is of a process that ended; taken over", lock.name)
            with contextlib.suppress(OSError):
                lock.unlink(missing_ok=True)
            continue
        if not waiting:
            log.info("another process makes %s; waiting for it", lock.name.removesuffix(".lock"))
            waiting = True
        time.sleep(PAUSE)


def _beat(lock: Path, done: threading.Event) -> None:
    while not done.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(lock)


def _is_alive(process: int) -> bool:
    if os.name == "nt":
        return True  # a signal would end it there; its missing beat tells
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
