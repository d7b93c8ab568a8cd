"""Predict many images in parts, which several processes share and which survive a crash.

Finished parts lie in a hidden folder beside the output, one file per part, written atomically. The name of a file holds
a digest of everything the part depends on, so that parts of another model or of other images are never mixed in.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdc_plugin import __version__
from cdc_plugin.data.atomic import read_json_object, write_atomically, write_text
from cdc_plugin.data.cache import compute_digest
from cdc_plugin.data.images import Progress
from cdc_plugin.data.side import describe_side
from cdc_plugin.data.sources.arrays import split_rows
from cdc_plugin.data.sources.base import ImageSource
from cdc_plugin.data.stream import CHUNK, ImageStream
from cdc_plugin.errors import OutputError, UserError
from cdc_plugin.evaluation.predict import Prediction, PredictionPart, Predictor
from cdc_plugin.models.clusterer import Clusterer, prototype_tensors
from cdc_plugin.training.progress import log
from cdc_plugin.training.runtime import Distributed

# Images that a crash can cost, and that a process takes at once. A multiple of the usual batch sizes: batches, and
# with them the last bits of the numbers, are then the same as without parts.
PART = 8192
INPUTS = "inputs.json"
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


def predict_in_parts(
    predictor: Predictor, folder: Path, distributed: Distributed, progress: Progress | None = None
) -> Prediction | None:
    """Predict with all processes, but not what an interrupted run finished; return None in all but the main one.

    The caller removes the folder of finished parts; a single part is not written.
    """
    ranges = list(split_rows(range(len(predictor.stream)), PART))
    if len(ranges) == 1:
        return predictor.collect(list(predictor.predict_parts(ranges, progress))) if distributed.main else None
    parts = PartFolder(folder, len(ranges), describe_inputs(predictor))
    if distributed.broadcast_from_main(lambda: parts.inputs) != parts.inputs:
        raise UserError(
            f"process {distributed.rank} has another model or other images than process 0; --model and --data must "
            "name the same files on all machines"
        )
    finished = set(distributed.broadcast_from_main(parts.resume))
    missing = [number for number in range(len(ranges)) if number not in finished]
    mine = missing[distributed.rank :: distributed.size]
    computed = predictor.predict_parts([ranges[number] for number in mine], progress if distributed.main else None)
    for number, part in zip(mine, computed, strict=True):
        parts.save(number, part)
    distributed.wait()
    return predictor.collect(parts) if distributed.main else None


def choose_parts_folder(out: Path) -> Path:
    """Return where the parts of an output are kept until it is written.

    >>> choose_parts_folder(Path("/tmp/new.csv")).name
    '.new.csv.parts'
    """
    out = out.absolute()
    return out.parent / f".{out.name}.parts"


@dataclass(frozen=True)
class PartFolder:
    """The parts of one prediction, read from disk whenever they are iterated."""

    path: Path
    count: int  # of all parts
    inputs: dict[str, str | int]  # what the parts depend on

    def __iter__(self) -> Iterator[PredictionPart]:
        return (self.load(number) for number in range(self.count))

    def file(self, number: int) -> Path:
        digest = compute_digest([json.dumps(self.inputs, sort_keys=True)])
        return self.path / f"{number:06d}-{digest}.npz"

    def resume(self) -> list[int]:
        """Return the finished parts and remove every other file; only one process may call it."""
        if not self.path.is_dir():
            return []
        finished = [number for number in range(self.count) if self._is_readable(number)]
        keep = {self.file(number).name for number in finished} | {INPUTS}
        others = [file for file in self.path.iterdir() if file.name not in keep]
        for file in others:
            file.unlink(missing_ok=True)
        discarded = sum(not file.name.startswith(".") and file.suffix == ".npz" for file in others)
        if discarded:
            earlier = self._read_inputs()
            changed = [name for name in self.inputs if earlier.get(name) != self.inputs[name]]
            reason = f"{' and '.join(changed)} changed" if changed else "they are damaged"
            log.warning("%d finished parts in %s are not used: %s", discarded, self.path, reason)
        if finished:
            log.warning("resuming: %d of %d parts are finished (%s)", len(finished), self.count, self.path)
        return finished

    def save(self, number: int, part: PredictionPart) -> None:
        """Keep a part; any process may call it."""
        skipped = np.frombuffer(json.dumps(part.skipped).encode(), np.uint8)
        arrays = {"positions": part.positions, "skipped": skipped}
        arrays |= {f"column {name}": values for name, values in part.columns.items()}

        def write(temporary: Path) -> None:
            with open(temporary, "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]

        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot create the folder {self.path}: {error.strerror}; give another --out") from error
        if self._read_inputs() != self.inputs:
            write_text(self.path / INPUTS, json.dumps(self.inputs, indent=2) + "\n")
        write_atomically(self.file(number), write)

    def load(self, number: int) -> PredictionPart:
        """Read a part that was saved; refuse one that is missing or damaged."""
        try:
            with open(self.file(number), "rb") as file, np.load(file, allow_pickle=False) as arrays:
                names = [name for name in arrays.files if name.startswith("column ")]
                columns = {name.removeprefix("column "): arrays[name] for name in names}
                skipped = [(int(position), str(reason)) for position, reason in json.loads(arrays["skipped"].tobytes())]
                return PredictionPart(arrays["positions"], columns, skipped)
        except DAMAGED as error:
            raise OutputError(
                f"part {number + 1} of {self.count} cannot be read from {self.path} ({error}); run the same command "
                "again; with several machines, --out must be on a disk that all of them share"
            ) from error

    def _is_readable(self, number: int) -> bool:
        try:
            self.load(number)
        except OutputError:  # a file system that lost its last writes in a power failure
            return False
        return True

    def _read_inputs(self) -> dict[str, Any]:
        try:
            return read_json_object(self.path / INPUTS)
        except (OSError, ValueError):
            return {}


def describe_inputs(predictor: Predictor) -> dict[str, str | int]:
    """Return everything that a part depends on; batch size and device change no more than the last bits."""
    return {
        "program": __version__,
        "model": compute_digest(_describe_model(predictor.model)),
        "level": 0 if predictor.groups is None else int(predictor.groups.max()) + 1,
        "features": int(predictor.keep_features),
        "data": _hash_data(predictor.stream),
        "images": len(predictor.stream),
        "images per part": PART,
    }


def _describe_model(model: Clusterer) -> Iterator[str | bytes]:
    backbone, tensors = model.backbone, dict(model.state_dict())
    if model.prototypes is not None:
        tensors |= prototype_tensors(model.prototypes)
    # Networks differ in more than their weights, in a padding for example.
    yield re.sub(r" at 0x[0-9a-f]+", "", repr(model))
    yield repr((backbone.input_size, describe_side(backbone.input_size), backbone.mean.tolist(), backbone.std.tolist()))
    yield repr([head.spec for head in (model.clustering_head, model.calibration_head)])
    for name, tensor in tensors.items():
        yield name
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hash_data(stream: ImageStream) -> str:
    source = stream.source
    if isinstance(source, ImageSource) or source.digest:
        return source.digest
    path = Path(source.description)
    if path.suffix.lower() in (".npy", ".npz") and path.is_file():
        state = path.stat()
        return compute_digest([str(source.shape), str(state.st_size), str(state.st_mtime_ns)])
    blocks = source.blocks(source.split(range(len(source)), CHUNK))
    return compute_digest(np.ascontiguousarray(block).tobytes() for block in blocks)
