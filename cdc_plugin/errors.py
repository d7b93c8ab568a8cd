"""Exceptions that a user can cause and mend; the command line turns them into one line and exit code 2."""

from contextvars import ContextVar
from typing import Any

# Whether the person types flags (set by the commands) or Python.
COMMAND_LINE: ContextVar[bool] = ContextVar("command line", default=False)


class UserError(Exception):
    """Say what was expected, what was found and what to type next.

    ``told`` is set where another process of the same run reports it.
    """

    told = False


class ConfigError(UserError, ValueError):
    """A setting or an argument is unknown, out of range, or contradicts another."""


class CheckpointError(UserError):
    """A checkpoint cannot be read, recognised or used."""


class DataError(UserError):
    """Images or labels cannot be found, read or used."""


class OutputError(UserError):
    """A result cannot be written, found again or resumed."""


def option(name: str, value: Any = True) -> str:
    """Return an option as the caller types it: ``--batch-size 64`` in a shell, ``batch_size=64`` in Python.

    >>> option("freeze_backbone")
    'freeze_backbone=True'
    >>> option("out", "runs/photos")
    "out='runs/photos'"
    """
    if not COMMAND_LINE.get():
        return f"{name}={value!r}"
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def shorten(value: Any, most: int = 80) -> str:
    """Return a value as an error shows it, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a very long number"
    return text if len(text) <= most else f"{text[:most]}..."
