"""A batch in the parts that are trained on one step after another, and the images of each that are worth it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cdc_plugin.config.schema import RefineConfig, sub_batches
from cdc_plugin.training.distributed import Distributed, Rows, ShardPlan, deal, sizes_of

# Neighbours that `keep_for_training` looks at together. A constant number of them is left out: convolutions on CPUs are
# prepared anew for every number of images, which took 7 % of an epoch. Small sub-batches are trained whole.
_BLOCK, _WORTH_SAVING = 4, 32


@dataclass(frozen=True)
class Part:
    """A sub-batch.

    Args:
        rows: of the batch.
        trained: (n,) those of them that the clustering head is trained on.
        own: which of this process's views are of ``trained``.
        shared: whose ``trained`` are.
    """

    rows: slice
    trained: Tensor
    own: Tensor
    shared: Rows


def plan_shards_of(images: int, config: RefineConfig, distributed: Distributed) -> ShardPlan:
    """How a batch of so many images is shared by the processes."""
    assert config.sub_batch_size is not None
    return deal(images, sub_batches(images, config.sub_batch_size), distributed)


def parts_of(trusted: Tensor, config: RefineConfig, device: torch.device, distributed: Distributed) -> Iterator[Part]:
    """The sub-batches of a batch; where passes are saved, without a quarter of the images: see `keep_for_training`.

    Args:
        trusted: (B,) the images that have been selected, on the CPU.
    """
    deal, first = plan_shards_of(len(trusted), config, distributed), 0
    for rows, shares, pieces in zip(deal.sub_batches, deal.shares, deal.pieces, strict=True):
        whole, own = slice(int(rows[0]), int(rows[-1]) + 1), shares[distributed.rank]
        kept = torch.ones_like(rows, dtype=torch.bool)
        # Of fewer than three images, both could be left out.
        if config.passes == "fast" and len(rows) >= _WORTH_SAVING and min(map(len, shares)) >= 3:
            kept = keep_for_training(trusted[whole])
        views_of = first + torch.arange(len(own))[kept[own]]
        place = kept.cumsum(dim=0) - 1
        trained = Rows([place[share[kept[share]]] for share in shares], sizes_of(pieces[own[kept[own]]]))
        yield Part(whole, rows[kept].to(device), views_of.to(device), trained)
        first += len(own)


def keep_for_training(trusted: Tensor) -> Tensor:
    """The images (b,) of a sub-batch that are trained on: three of four neighbours, always as many of a sub-batch.

    An image that is not trusted has no part in the pseudo-label loss, it only adds to the statistics of BatchNorm: it
    is left out first. Of four trusted ones the last has to wait for another epoch.
    """
    kept = torch.ones_like(trusted)
    blocks = len(trusted) // _BLOCK * _BLOCK
    doubtful = ~trusted[:blocks].view(-1, _BLOCK)
    doubtful[:, -1] = True
    left_out = doubtful.int().argmax(dim=1) + torch.arange(0, blocks, _BLOCK, device=trusted.device)
    kept[left_out] = False
    return kept
