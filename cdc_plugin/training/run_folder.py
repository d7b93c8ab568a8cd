"""The result folder: which one a run writes to, and the state that it is resumed from."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cdc_plugin.config.load import load_config
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

CONFIG, STATE, HISTORY, LOG = "config.yaml", "last.pt", "metrics.jsonl", "train.log"
PREDICTIONS, REPORT, PAGE = "predictions.csv", "report.json", "report.html"
OTHER_FILES = ("model.safetensors", "model.json", "trackers.json")
RESULT_FILES = (CONFIG, STATE, HISTORY, LOG, PREDICTIONS, REPORT, PAGE, *OTHER_FILES)
EVALUATION_FILES = (PAGE, REPORT, PREDICTIONS)
COMPARISON = "comparison.json"
CACHE = "cache"  # of images, in the folders of earlier releases
DEFAULT_PARENT = Path("cdc-runs")


def prepare_folder(out: str | None, name: str, resume: bool, overwrite: bool) -> Path:
    """The folder of this run, made if it is not there; refuses one that holds anything else or that is in use.

    It is this process's own until `leave_nothing_behind`. Without ``out`` every run gets a new numbered folder;
    ``--resume`` and ``--overwrite`` then take the last.
    """
    if resume and overwrite:
        raise UserError("--resume goes on with a run and --overwrite starts it anew: give one of them")
    folder = Path(out).expanduser() if out is not None else _numbered(name, latest=resume or overwrite)
    present = _make(folder)
    if present and not resume and not overwrite:
        raise UserError(
            f"{folder} is not empty ({_some(present)}); "
            "give another --out, or --resume to go on with that run, or --overwrite to replace its files"
        )
    if resume and present and not (folder / CONFIG).is_file():
        raise UserError(f"nothing to resume in {folder}: it has no {CONFIG}; give the folder of a run as --out")
    if resume and present:
        _check_whole(folder / CONFIG)
    _claim(folder)
    for leftover in _half_written(folder):
        leftover.unlink(missing_ok=True)
    return folder


@contextlib.contextmanager
def evaluation_folder(out: str | Path | None, name: str, overwrite: bool) -> Iterator[Path]:
    """The folder of an evaluation, as in `prepare_folder`. It may be a run's, whose other files are left alone."""
    folder = Path(out).expanduser() if out is not None else _numbered(name, latest=overwrite)
    present = _make(folder)
    if present and not overwrite:
        raise UserError(
            f"{folder} is not empty ({_some(present)}); give another --out, or --overwrite to replace "
            f"{', '.join(EVALUATION_FILES)} in it"
        )
    try:
        yield folder
    finally:
        leave_nothing_behind(folder)


@contextlib.contextmanager
def comparison_folder(out: str | Path | None, name: str, overwrite: bool) -> Iterator[Path]:
    """The folder of a comparison; one that holds a comparison already is gone on with, any other must be empty."""
    folder = Path(out).expanduser() if out is not None else _numbered(name, latest=overwrite)
    present = _make(folder)
    if present and not (folder / COMPARISON).is_file():
        raise UserError(f"{folder} holds no comparison but {_some(present)}; give another --out")
    try:
        yield folder
    finally:
        # One that could not start, on a mistyped path say, has made nothing worth keeping.
        inner = [(Path(path), files) for path, _, files in os.walk(folder, topdown=False) if Path(path) != folder]
        if not any(files for _, files in inner):
            for file in (COMPARISON, LOG):
                (folder / file).unlink(missing_ok=True)
            for path, _ in inner:
                path.rmdir()
        leave_nothing_behind(folder)


def clear_results(folder: Path) -> None:
    """Remove an earlier run's files and nothing else; its log is kept and goes on."""
    for file in RESULT_FILES:
        if file != LOG:
            (folder / file).unlink(missing_ok=True)


def leave_nothing_behind(folder: Path) -> None:
    """Give a folder free for other runs; take it back if a run that could not start has left nothing in it."""
    if (handle := _claims.pop(folder.absolute(), None)) is not None:
        os.close(handle)
    with contextlib.suppress(OSError):  # not empty: it stays
        folder.rmdir()
        if folder.parent == DEFAULT_PARENT:
            DEFAULT_PARENT.rmdir()


def stored_config(given: RefineConfig, folder: Path) -> RefineConfig:
    """The settings of a run that was killed before its first state: those of the folder, where it has them."""
    path = folder / CONFIG
    if given.backbone is not None or not path.is_file():
        return given
    return replace(load_config(path), device=given.device)


_claims: dict[Path, int] = {}  # open folders, whose locks this process holds


def _claim(folder: Path) -> None:
    """Keep other processes from writing to a folder at the same time.

    The operating system's lock on the folder itself: it ends with the process, however that ends, and leaves no file.
    Where there is none (Windows, some network file systems) nothing is claimed.
    """
    if fcntl is None or folder.absolute() in _claims:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise UserError(f"another run is writing to {folder}; wait for its end, or give another --out") from error
    else:
        _claims[folder.absolute()] = handle


def _check_whole(config: Path) -> None:
    """Refuse settings that something has cut: what is missing would silently be replaced by defaults."""
    try:
        names = re.findall(r"^(\w+):", config.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, ValueError) as error:
        raise UserError(f"{config} cannot be read ({error}); start anew with --overwrite") from error
    missing = [name for name in ("data", "epochs", "seed", "precision") if name not in names]
    if missing:
        raise UserError(f"{config} is not whole (it has no {', '.join(missing)}); start anew with --overwrite")


def write_state(folder: Path, state: dict[str, Any]) -> None:
    write_atomically(folder / STATE, lambda path: torch.save(state, path))


def read_state(folder: Path) -> dict[str, Any] | None:
    """The state of the last finished epoch, or None where a run has not got that far."""
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be read ({reason[:150]}); start anew with --overwrite") from error


def _make(folder: Path) -> list[str]:
    """Make the folder if it is not there; returns the names of what it holds already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The log is all that a run leaves which failed at once, on a mistyped path say.
        ignored = {LOG, CACHE, *(path.name for path in _half_written(folder))}
        present = sorted(path.name for path in folder.iterdir() if path.name not in ignored)
    except NotADirectoryError as error:
        raise UserError(f"--out {folder} is or lies in a file; give the path of a folder") from error
    except FileExistsError as error:
        raise UserError(f"--out {folder} is a file; give the path of a folder") from error
    except OSError as error:
        raise UserError(f"cannot make the result folder {folder}: {error.strerror}; give another --out") from error
    _check_writable(folder)
    return present


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _numbered(name: str, latest: bool) -> Path:
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    pattern = re.compile(rf"{re.escape(stem)}-(\d+)")
    taken = [pattern.fullmatch(path.name) for path in DEFAULT_PARENT.glob("*")] if DEFAULT_PARENT.is_dir() else []
    numbers = [int(match.group(1)) for match in taken if match]
    number = max(numbers, default=0) + (0 if latest and numbers else 1)
    return DEFAULT_PARENT / f"{stem}-{number}"


def _half_written(folder: Path) -> list[Path]:
    """Temporary files of a run that was killed while writing; see `write_atomically` for their names."""
    names = "|".join(re.escape(file) for file in RESULT_FILES)
    return [path for path in folder.glob(".*") if re.fullmatch(rf"\.({names})\.[a-z0-9_]{{8}}", path.name)]


def _check_writable(folder: Path) -> None:
    try:
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; give another --out") from error
