"""Prediction of many images in parts, which several processes share and which survive a fault."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from cdc_plugin import __version__
from cdc_plugin.data.images import CHUNK, Progress
from cdc_plugin.data.sources.base import ImageSource, digest_of
from cdc_plugin.data.sources.rows import in_blocks
from cdc_plugin.data.stream import ImageStream
from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.part_files import PartFolder
from cdc_plugin.evaluation.predict import Prediction, Predictor
from cdc_plugin.models.clusterer import Clusterer, prototype_tensors
from cdc_plugin.training.distributed import Distributed

# Images that a fault can cost, and that a process takes at once. A multiple of the usual batch sizes: the batches,
# and with them the last bits of the numbers, are then those of images in one piece.
PART = 8192


def predict_in_parts(
    predictor: Predictor, folder: Path, distributed: Distributed, progress: Progress | None = None
) -> Prediction | None:
    """The same by all processes of a distributed; parts that an interrupted run has finished are not computed again.

    Args:
        folder: where finished parts are kept, for the caller to remove; a single part is not.

    Returns:
        The prediction in the main process, None in the others.
    """
    stream = predictor.stream
    pieces = list(in_blocks(range(len(stream)), PART))
    if len(pieces) == 1:
        return predictor.prediction(list(predictor.parts(pieces, progress))) if distributed.main else None
    kept = PartFolder(folder, len(pieces), fingerprint(predictor))
    if distributed.broadcast_from_main(lambda: kept.about) != kept.about:
        raise UserError(
            f"process {distributed.rank} found another model or other images than process 0; "
            "--model and --data must name the same files on all machines"
        )
    finished = set(distributed.broadcast_from_main(kept.resume))
    missing = [number for number in range(len(pieces)) if number not in finished]
    mine = missing[distributed.rank :: distributed.size]
    parts = predictor.parts([pieces[number] for number in mine], progress if distributed.main else None)
    for number, part in zip(mine, parts, strict=True):
        kept.save(number, part)
    distributed.wait()
    return predictor.prediction(kept) if distributed.main else None


def fingerprint(predictor: Predictor) -> dict[str, str | int]:
    """All that a part depends on; a batch size and a device change no more than the last bits."""
    model, stream = predictor.model, predictor.stream
    return {
        "program": __version__,
        "model": _digest_of_model(model),
        "data": _digest_of_data(stream),
        "images": len(stream),
        "images a part": PART,
    }


def _digest_of_model(model: Clusterer) -> str:
    def described() -> Iterator[str | bytes]:
        backbone, tensors = model.backbone, dict(model.state_dict())
        if model.prototypes is not None:
            tensors |= prototype_tensors(model.prototypes)
        # Networks differ in more than their weights: in a padding, say.
        yield re.sub(r" at 0x[0-9a-f]+", "", repr(model))
        yield repr((backbone.input_size, backbone.mean.tolist(), backbone.std.tolist()))
        yield repr([head.spec for head in (model.clustering_head, model.calibration_head)])
        for name, tensor in tensors.items():
            yield name
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return digest_of(described())


def _digest_of_data(stream: ImageStream) -> str:
    source = stream.source
    if isinstance(source, ImageSource):
        return source.digest
    path = Path(source.description)
    if path.suffix.lower() in (".npy", ".npz") and path.is_file():
        state = path.stat()
        return digest_of([str(source.shape), str(state.st_size), str(state.st_mtime_ns)])
    blocks = source.blocks(in_blocks(range(len(source)), CHUNK))
    return digest_of(np.ascontiguousarray(block).tobytes() for block in blocks)
