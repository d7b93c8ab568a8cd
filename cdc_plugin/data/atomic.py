"""Write files that are never half-written."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cdc_plugin.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, flush it to disk, and rename it into place."""
    with _clear_disk_errors(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            # mkstemp makes private files; results are as readable as any other file of the user.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _clear_disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left while writing {path}; what was written before is whole: free some space and "
                "run again, cdc-refine and cdc-pretrain with --resume"
            ) from error
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    except Exception as error:
        # The writers of torch and safetensors report a full disk in words of their own.
        theirs = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
        words = ("write", "file", "i/o error", "iostream", "unexpected pos")
        if theirs and any(word in str(error).lower() for word in words):
            reason = str(error).splitlines()[0][:150]
            raise UserError(
                f"cannot write {path} (disk full? {reason}); what was written before is whole: free some space "
                "and run again, cdc-refine and cdc-pretrain with --resume"
            ) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
