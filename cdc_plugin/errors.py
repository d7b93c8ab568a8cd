"""Exceptions that a user can cause and mend; the command line turns them into one line and exit code 2."""

import re
import shlex
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

# The command that the person typed, its program and its words (set by the commands); empty for a call from Python.
COMMAND_LINE: ContextVar[tuple[str, ...]] = ContextVar("command line", default=())


# What breaks a line, changes a terminal or turns the direction of writing.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


_IMAGE = re.compile(r"\b([Aa]n )?([Ii])mage(?=s?\b)")


_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # as torch says it


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory, of the machine or of a device, was not enough."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


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


def join_words(words: Iterable[object]) -> str:
    """Return words as the shell of this system takes them: cmd and PowerShell know double quotes alone.

    >>> join_words(["--out", "runs/photos", "seed=1"])
    '--out runs/photos seed=1'
    """
    texts = [str(word) for word in words]
    if sys.platform != "win32":
        return shlex.join(texts)
    return " ".join(text if re.fullmatch(r"[\w.:\\/=+-]+", text) else f'"{text}"' for text in texts)


def shorten(value: Any, most: int = 80) -> str:
    """Return a value as an error shows it, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a very long number"
    return text if len(text) <= most else f"{text[:most]}..."


def say(text: str, noun: str) -> str:
    """Return a sentence about images as one about what a sample is called, see `data.sources.features.name_sample`.

    >>> say("Images are right; an image is wrong", "sample"), say("2 images", "image")
    ('Samples are right; a sample is wrong', '2 images')
    """

    def exchange(found: re.Match[str]) -> str:
        article = "" if found[1] is None else f"{found[1][0]} "
        return article + (noun if found[2] == "i" else noun.capitalize())

    return text if noun == "image" else _IMAGE.sub(exchange, text)


def flatten(text: str, most: int = 2000) -> str:
    r"""Return a message as one line that does nothing to a terminal, without its middle if it is very long.

    >>> flatten("nothing at a\nb")
    'nothing at a\\nb'
    """
    text = _UNPRINTABLE.sub(lambda found: repr(found.group())[1:-1], text)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
