"""Finished parts of a prediction on disk: after a fault the same command computes only what is missing.

They lie in a hidden folder beside the output, one file a part, each written whole or not at all. The name of a file
holds a digest of what the part depends on, so that parts of another model or of other images are never mixed in.
"""

from __future__ import annotations

import json
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.data.sources.base import digest_of
from cdc_plugin.errors import UserError
from cdc_plugin.training.progress import log

NOTES = "about.json"
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


class Part(NamedTuple):
    """Predictions for some consecutive images.

    Args:
        places: (n,) which image of the source each row is.
        columns: (n,) each; none at all where no image could be read.
        skipped: place and reason of every image that could not be read.
    """

    places: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]
    skipped: list[tuple[int, str]]


def parts_beside(out: Path) -> Path:
    """Where the parts of an output are kept while it is not written."""
    out = out.absolute()
    return out.parent / f".{out.name}.parts"


def remove_parts(folder: Path) -> None:
    """Remove all parts, of whatever prediction: the output is written."""
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class PartFolder:
    """The parts of one prediction, read from disk as often as they are asked for.

    Args:
        count: of all parts.
        about: what the parts depend on.
    """

    path: Path
    count: int
    about: dict[str, str | int]

    def __iter__(self) -> Iterator[Part]:
        return (self.load(number) for number in range(self.count))

    def file(self, number: int) -> Path:
        digest = digest_of([json.dumps(self.about, sort_keys=True)])
        return self.path / f"{number:06d}-{digest}.npz"

    def resume(self) -> list[int]:
        """Which parts are finished; whatever else is in the folder is removed. To be called by one process."""
        if not self.path.is_dir():
            return []
        finished = [number for number in range(self.count) if self._is_whole(number)]
        keep = {self.file(number).name for number in finished} | {NOTES}
        others = [file for file in self.path.iterdir() if file.name not in keep]
        for file in others:
            file.unlink(missing_ok=True)
        discarded = sum(not file.name.startswith(".") and file.suffix == ".npz" for file in others)
        if discarded:
            log.warning("%d finished parts in %s are not used: %s", discarded, self.path, self._why())
        if finished:
            log.warning("going on: %d of %d parts are finished (%s)", len(finished), self.count, self.path)
        return finished

    def save(self, number: int, part: Part) -> None:
        """Keep a part; any process may call it."""
        notes = np.frombuffer(json.dumps(part.skipped).encode(), np.uint8)
        arrays = {f"column {name}": values for name, values in part.columns.items()}

        def write(temporary: Path) -> None:
            with open(temporary, "wb") as file:
                np.savez(file, places=part.places, skipped=notes, **arrays)  # type: ignore[arg-type]

        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {self.path}: {error.strerror}; give another --out") from error
        if self._noted() != self.about:
            text = json.dumps(self.about, indent=2) + "\n"
            write_atomically(self.path / NOTES, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        write_atomically(self.file(number), write)

    def load(self, number: int) -> Part:
        """A part that was saved.

        Raises:
            UserError: it is not there, or damaged.
        """
        try:
            return self._read(number)
        except DAMAGED as error:
            raise UserError(
                f"part {number + 1} of {self.count} cannot be read from {self.path} ({error}); run the same command "
                "again; where several machines work together, --out must lie on a disk that all of them share"
            ) from error

    def _read(self, number: int) -> Part:
        with open(self.file(number), "rb") as file, np.load(file, allow_pickle=False) as arrays:
            columns = {
                name.removeprefix("column "): arrays[name] for name in arrays.files if name.startswith("column ")
            }
            skipped = [(int(place), str(reason)) for place, reason in json.loads(arrays["skipped"].tobytes())]
            return Part(arrays["places"], columns, skipped)

    def _is_whole(self, number: int) -> bool:
        try:
            self._read(number)
        except DAMAGED:  # a file system that lost its last writes with the power
            return False
        return True

    def _noted(self) -> dict[str, Any]:
        try:
            found = json.loads((self.path / NOTES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _why(self) -> str:
        noted = self._noted()
        changed = [name for name in self.about if noted.get(name) != self.about[name]]
        return f"{' and '.join(changed)} changed" if changed else "they are damaged"
