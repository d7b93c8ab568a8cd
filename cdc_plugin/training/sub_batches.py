"""Cut a batch into the sub-batches that are trained on one step after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cdc_plugin.training.distributed import ShardPlan

# Neighbours that `keep_for_training` looks at together. A constant number of them is left out: convolutions on CPUs
# are prepared again for every new number of images, which took 7 % of an epoch. Small sub-batches are trained whole.
BLOCK, SMALLEST_THINNED = 4, 32


@dataclass(frozen=True)
class SubBatch:
    """One step's share of a batch.

    Args:
        rows: of the batch.
        trained: (n,) those of them that the clustering head is trained on.
        own: which of this process's views are of ``trained``.
        shards: for each process, the places of its images among ``trained``.
    """

    rows: slice
    trained: Tensor
    own: Tensor
    shards: list[Tensor]


def split_batch(trusted: Tensor, plan: ShardPlan, rank: int, fast: bool, device: torch.device) -> Iterator[SubBatch]:
    """Yield the sub-batches of a batch.

    Args:
        trusted: (B,) the images that have been selected, on the CPU.
        plan: how the processes share the batch.
        fast: leave a quarter of the images out, see `keep_for_training`.
    """
    first_view = 0
    for rows, shards in zip(plan.sub_batches, plan.shards, strict=True):
        span, own = slice(int(rows[0]), int(rows[-1]) + 1), shards[rank]
        kept = torch.ones_like(rows, dtype=torch.bool)
        # Of a shard of fewer than three images, both could be left out.
        if fast and len(rows) >= SMALLEST_THINNED and min(map(len, shards)) >= 3:
            kept = keep_for_training(trusted[span])
        place = kept.cumsum(dim=0) - 1
        own_views = first_view + torch.arange(len(own))[kept[own]]
        kept_shards = [place[shard[kept[shard]]] for shard in shards]
        yield SubBatch(span, rows[kept].to(device), own_views.to(device), kept_shards)
        first_view += len(own)


def keep_for_training(trusted: Tensor) -> Tensor:
    """Return which images (b,) of a sub-batch are trained on: three of four neighbours.

    An image that is not trusted has no part in the pseudo-label loss, it only adds to the statistics of BatchNorm: it
    is left out first. Of four trusted ones the last has to wait for another epoch.
    """
    kept = torch.ones_like(trusted)
    blocks = len(trusted) // BLOCK * BLOCK
    doubtful = ~trusted[:blocks].view(-1, BLOCK)
    doubtful[:, -1] = True
    left_out = doubtful.int().argmax(dim=1) + torch.arange(0, blocks, BLOCK, device=trusted.device)
    kept[left_out] = False
    return kept
