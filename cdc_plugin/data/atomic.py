"""Write files that are never half-written, and tables whose names do no harm and can be read back; read small files."""

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cdc_plugin.errors import OutputError, shorten

READ_LIMIT = 1 << 26  # bytes of a file that describes something
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# What a spreadsheet may take for a formula, also behind a ";" at which some of them split, but no number; what ends a
# line; bytes that are not UTF-8.
_ESCAPED = re.compile("^'|(?:^|;)\\s*(?!-[0-9.]+$)[=+\\-@＝＋－＠]|[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")


def read_small_text(path: Path) -> str:
    """Return the text of a regular file of reasonable size, as a folder of a stranger may hold anything by any name."""
    if not has_content(path) or path.stat().st_size > READ_LIMIT:
        raise OSError(errno.EINVAL, f"no regular file of 1 byte to {READ_LIMIT >> 20} MB", str(path))
    return path.read_text(encoding="utf-8")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file; OSError or ValueError where there is none."""
    try:
        content = json.loads(read_small_text(path))
    except RecursionError as error:
        raise ValueError("it is nested beyond reason") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, found {shorten(content)}")
    return content


def has_content(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a regular file of some size: pipes, devices and /proc/kmsg, of size 0, may never end."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):  # a NUL in the path
        return False
    return stat.S_ISREG(state.st_mode) and state.st_size > 0


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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


def escape_cell(value: Any) -> Any:
    r"""Return a cell as every CSV file of this package holds it: ``'`` and the text as in JSON, where it needs that.

    >>> escape_cell("cat.png"), escape_cell("=1+1.png"), escape_cell("a\nb.png"), escape_cell(-0.5)
    ('cat.png', "'=1+1.png", "'a\\nb.png", -0.5)
    """
    if not isinstance(value, str) or not _ESCAPED.search(value):
        return value
    return "'" + json.dumps(value)[1:-1].replace(";", r"\u003b").replace("\x7f", r"\u007f")


def unescape_cell(cell: str) -> str:
    """Return the text that `escape_cell` was given."""
    try:
        return json.loads(f'"{cell[1:]}"') if cell.startswith("'") else cell
    except ValueError:  # somebody has typed the '
        return cell


def join_csv(lines: Iterable[Sequence[Any]]) -> str:
    """Return lines as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(escape_cell, line) for line in lines)
    return text.getvalue()
