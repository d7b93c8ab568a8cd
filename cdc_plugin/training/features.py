"""The features of all images: each process has those of its own share, in memory or, where they are many, on disk."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cdc_plugin.data.cache import cache_folder, entry, make_room, scratch_folder, used
from cdc_plugin.data.row_file import RowFile, RowWriter, open_whole
from cdc_plugin.errors import UserError
from cdc_plugin.training.distributed import NEIGHBOURS, SINGLE, Distributed

BLOCK = 2048
IN_MEMORY = 64 * 1024**2  # bytes; more rows lie in a file, so that memory does not grow with the number of images
# Rows that k-means and its like see at once; of larger sets a random sample. At least so many a cluster.
SAMPLE, SAMPLE_A_CLUSTER = 20_000, 50


def find_rows(key: str | None, shape: tuple[int, ...]) -> Tensor | RowFile | None:
    """Rows of this shape that were kept under this key, or None."""
    path = None if key is None else entry("features", key, "f32")
    found = None if path is None else open_whole(path, shape, np.float32)
    if path is None or found is None:
        return None
    used(path)
    return torch.from_numpy(found[:]) if _bytes(shape) <= IN_MEMORY else found


def keep_rows(key: str | None, shape: tuple[int, ...], parts: Iterable[Tensor]) -> Tensor | RowFile:
    """Rows of this shape that come part by part: few in memory, many in a file of the cache.

    Args:
        key: by which `find_rows` finds them again; None where nobody will ask.
    """
    path = None if key is None else entry("features", key, "f32")
    if _bytes(shape) <= IN_MEMORY:
        rows = _together(shape, parts)
        if path is not None:
            with contextlib.suppress(UserError):  # a full disk, say; they are at hand all the same
                make_room(path, _bytes(shape))
                _write(path, shape, [rows])
        return rows
    if path is not None:
        make_room(path, _bytes(shape))
        _write(path, shape, parts)
        return RowFile(path, shape, np.float32)
    # Of use to this process only: the file is gone when the process ends, however it ends.
    folder = scratch_folder()
    if folder is None:
        return _together(shape, parts)
    path = folder / f"features-{uuid.uuid4().hex[:16]}.f32"
    if folder == cache_folder():
        make_room(path, _bytes(shape))
    _write(path, shape, parts)
    found = RowFile(path, shape, np.float32)
    with contextlib.suppress(OSError):  # Windows keeps it until the cache is full
        path.unlink()
    return found


def _together(shape: tuple[int, ...], parts: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """All rows; never twice in memory."""
    whole, first = torch.empty(shape, dtype=dtype), 0
    for part in parts:
        whole[first : first + len(part)] = part
        first += len(part)
    return whole


def _write(path: Path, shape: tuple[int, ...], parts: Iterable[Tensor]) -> None:
    with RowWriter(path, shape[0], shape[1:], np.float32) as writer:
        first = 0
        for part in parts:
            writer.put(first, part.numpy())
            first += len(part)
        writer.finish()


def _bytes(shape: tuple[int, ...]) -> int:
    return 4 * prod(shape)


@dataclass(frozen=True)
class Features:
    """(N, D) features.

    Args:
        own: (n, D) those of this process's share of the images (see `Distributed.share_of`), on the CPU.
        count: N.
    """

    own: Tensor | RowFile
    count: int
    distributed: Distributed = SINGLE

    def __len__(self) -> int:
        return self.count

    def blocks(self) -> Iterator[Tensor]:
        """This process's features, block by block; at least one, which is empty where it has no image."""
        size = NEIGHBOURS if self.distributed.exact else BLOCK  # sums are rounded otherwise in blocks of another size
        for start in range(0, max(1, len(self.own)), size):
            rows = self.own[start : start + size]
            yield rows if isinstance(rows, Tensor) else torch.from_numpy(rows)

    def map(self, work: Callable[[Tensor], Tensor]) -> Tensor:
        """What ``work`` makes of every row, (N, ...), from blocks of this process and all others."""
        done = (work(block).cpu() for block in self.blocks())
        start = next(done)
        # Put in place at once: small tensors that are kept between large ones would leave holes in memory.
        whole = _together((len(self.own), *start.shape[1:]), chain([start], done), start.dtype)
        return self.distributed.gather(whole, self.distributed.shares_of(self.count))

    def sample(self, clusters: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows (n, D) for k-means into so many clusters, and which (n,): all, or a random part of very many."""
        most = max(SAMPLE, SAMPLE_A_CLUSTER * clusters)
        if self.count <= most:
            return self.map(lambda block: block), torch.arange(self.count)
        chosen = torch.randperm(self.count, generator=generator)[:most].sort().values
        shares = self.distributed.shares_of(self.count)
        owned = [torch.isin(chosen, share, assume_unique=True).nonzero().flatten() for share in shares]
        first = sum(map(len, shares[: self.distributed.rank]))
        rows = self.own[(chosen[owned[self.distributed.rank]] - first).numpy()]
        own = rows if isinstance(rows, Tensor) else torch.from_numpy(rows)
        return self.distributed.gather(own, owned), chosen
