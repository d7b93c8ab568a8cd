"""Write files that are never half-written."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cdc_plugin.errors import OutputError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, flush it to disk, and rename it into place.

    Raises:
        OutputError: the disk is full, or the folder cannot be written.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder) / "notes.txt", lambda temporary: temporary.write_text("all of it"))
    ...     os.listdir(folder)
    ['notes.txt']
    """
    with open_atomically(path) as temporary:
        write(temporary)


@contextlib.contextmanager
def open_atomically(path: Path) -> Iterator[Path]:
    """Give a temporary file to fill, as `write_atomically` does, with its errors."""
    advice = (
        "what was written before is whole: free some space and run again, cdc-refine and cdc-pretrain with --resume"
    )
    try:
        with replace_atomically(path) as temporary:
            yield temporary
    except OSError as error:
        if error.errno in DISK_FULL:
            raise OutputError(f"no space left while writing {path}; {advice}") from error
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    except Exception as error:
        # The writers of torch and safetensors report a full disk in words of their own.
        is_theirs = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
        words = ("write", "file", "i/o error", "iostream", "unexpected pos")
        if is_theirs and any(word in str(error).lower() for word in words):
            reason = str(error).splitlines()[0][:150]
            raise OutputError(f"cannot write {path} (disk full? {reason}); {advice}") from error
        raise


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Give a temporary file ``.NAME.xxxxxxxx`` to fill; it gets its name at the end, or is removed after an error."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        # mkstemp makes private files; results are as readable as any other file of the user.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
