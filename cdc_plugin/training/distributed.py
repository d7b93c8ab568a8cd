"""The processes of a run: one, or as many as ``torchrun`` starts, on one machine or several.

The backbone is data-parallel: every process has its share of each batch. What the backbone gives is gathered, so
that all processes have the whole batch for selection, targets and heads, and train as one process would.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cdc_plugin.cli.process import end_with_parent
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.errors import UserError

Shared = TypeVar("Shared")
JOINING = datetime.timedelta(minutes=10)  # that processes wait for the others to come
PATIENCE = datetime.timedelta(hours=2)  # that processes wait for another, which may be reading all images
# Images that stay together however many processes there are: of the whole set, and pieces of a sub-batch.
NEIGHBOURS, PIECES = 32, 16
MOST_EXACT = 8  # processes; with more, pieces would be plan_shards_of too unevenly


@dataclass(frozen=True)
class Distributed:
    """Which of how many processes this is; the default is a process of its own, for which nothing is exchanged.

    Args:
        local_rank: which process on this machine.
        exact: results are to be those of any other number of processes, bit for bit.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    exact: bool = False

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def shares_of(self, count: int) -> list[Tensor]:
        """Which of ``count`` images are whose: near-equal runs of consecutive ones, in whole NEIGHBOURS."""
        blocks = torch.arange(-(-count // NEIGHBOURS)).tensor_split(self.size)
        ends = [0, *(min(count, int(block[-1] + 1) * NEIGHBOURS) if len(block) else count for block in blocks)]
        return [torch.arange(first, last) for first, last in pairwise(ends)]

    def share_of(self, count: int) -> Tensor:
        """Which of ``count`` images are this process's."""
        return self.shares_of(count)[self.rank]

    def broadcast_from_main(self, make: Callable[[], Shared]) -> Shared:
        """What ``make`` gives in the main process, in all of them; the others do not call it."""
        if self.size == 1:
            return make()
        carried: list[Any] = [None]
        if self.main:
            try:
                carried = [make()]
            except UserError as error:  # the others must not wait for what will never come
                dist.broadcast_object_list([error], src=0, device=torch.device("cpu"))
                raise
        dist.broadcast_object_list(carried, src=0, device=torch.device("cpu"))
        if isinstance(carried[0], UserError):
            carried[0].told = True
            raise carried[0]
        return carried[0]

    def raise_together(self, make: Callable[[], Shared]) -> Shared:
        """What ``make`` gives in each process; a user's mistake that any of them finds ends all, and one tells it."""
        if self.size == 1:
            return make()
        mistake, raised = None, torch.zeros(self.size)
        try:
            found = make()
        except UserError as error:
            mistake, raised[self.rank] = error, 1
        first = self.total(raised).nonzero().flatten().tolist()[:1]
        if not first:
            return found
        mistake = mistake or UserError(f"process {first[0]} has found a mistake")
        mistake.told = first != [self.rank]
        raise mistake

    def wait(self) -> None:
        """Go on when all processes have come here."""
        if self.size > 1:
            dist.monitored_barrier(timeout=PATIENCE) if _on_cpu() else dist.barrier()

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process."""
        if self.size == 1:
            return flag
        raised = torch.tensor(float(flag))
        dist.all_reduce(raised)
        return bool(raised > 0)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """The main process's values, in place: devices may round differently."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def only_main(self, tensor: Tensor) -> Tensor:
        """The tensor in the main process and zeros in the others: its `total` is itself."""
        return tensor if self.main else torch.zeros_like(tensor)

    def gather(self, rows: Tensor, owned: Sequence[Tensor]) -> Tensor:
        """Rows of all processes in order.

        Args:
            rows: (n, ...) those of this process.
            owned: for each process, the places (n,) of its rows among all.
        """
        if self.size == 1:
            return rows
        largest = max(len(places) for places in owned)
        padded = rows.new_zeros(largest, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in owned]
        dist.all_gather(parts, padded.contiguous())
        whole = rows.new_empty(sum(map(len, owned)), *rows.shape[1:])
        for places, part in zip(owned, parts, strict=True):
            whole[places.to(rows.device)] = part[: len(places)]
        return whole

    def gather_with_gradient(self, rows: Tensor, owned: Sequence[Tensor]) -> Tensor:
        """As `gather`, for a loss that all processes compute alike on the whole; its gradient reaches the own rows."""
        return rows if self.size == 1 else _Gathered.apply(rows, self, owned)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, distributed: Distributed, owned: Sequence[Tensor]) -> Tensor:
        context.places = owned[distributed.rank]
        return distributed.gather(rows.detach(), owned)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[context.places.to(gradient.device)], None, None


SINGLE = Distributed()


@dataclass(frozen=True)
class Rows:
    """Images that all processes pass through the network together.

    Args:
        shares: for each process, the places (n,) of its images among all of them.
        pieces: how many of this process's images are in each piece.
    """

    shares: list[Tensor]
    pieces: list[int]


@dataclass(frozen=True)
class ShardPlan:
    """How a batch is plan_shards_of to the processes: each has a near-equal share of every sub-batch.

    Args:
        sub_batches: (b,) rows of the batch, for each sub-batch.
        shares: for each sub-batch and process, its rows of the sub-batch.
        pieces: for each sub-batch, the piece (b,) that each of its rows is in; no piece has two owners.
    """

    sub_batches: list[Tensor]
    shares: list[list[Tensor]]
    pieces: list[Tensor]

    @functools.cached_property
    def owned(self) -> list[Tensor]:
        """For each process, its rows of the batch, sub-batch after sub-batch."""
        return self.whole(0).shares

    def whole(self, rank: int) -> Rows:
        """All sub-batches as one."""
        return self.together(range(len(self.sub_batches)), rank)

    def together(self, numbers: range, rank: int) -> Rows:
        """Consecutive sub-batches as one; places are among their rows."""
        first = int(self.sub_batches[numbers[0]][0])
        parts = [[self.sub_batches[n][rows] - first for rows in self.shares[n]] for n in numbers]
        shares = [torch.cat(own) for own in zip(*parts, strict=True)]
        return Rows(shares, [size for n in numbers for size in sizes_of(self.pieces[n][self.shares[n][rank]])])


@functools.lru_cache(maxsize=64)  # batches of an epoch have the same size, but for one image
def deal(count: int, sub_batches: int, distributed: Distributed) -> ShardPlan:
    """ShardPlan ``count`` images in so many sub-batches; an exact distributed cuts no piece in two."""
    parts = list(torch.arange(count).tensor_split(sub_batches))
    pieces = [torch.arange(len(part)) // (max(1, len(part) // PIECES) if distributed.exact else 1) for part in parts]
    shares = []
    for piece in pieces:
        owners = [numbers.tolist() for numbers in piece.unique().tensor_split(distributed.size)]
        shares.append([torch.isin(piece, torch.tensor(own)).nonzero().flatten() for own in owners])
    return ShardPlan(parts, shares, pieces)


def sizes_of(pieces: Tensor) -> list[int]:
    """How many rows each piece has, from the piece (n,) of each row."""
    return pieces.unique_consecutive(return_counts=True)[1].tolist()


def settled(distributed: Distributed, config: RefineConfig, device: torch.device) -> Distributed:
    """The distributed of a run: exact, with one thread a process, where BatchNorm is synchronised on CPUs."""
    wanted = distributed.size > 1 if config.sync_batchnorm is None else config.sync_batchnorm
    if wanted and config.compile:
        raise UserError("compiled networks can not take BatchNorm over several processes; add sync_batchnorm=false")
    exact = wanted and device.type == "cpu" and distributed.size <= MOST_EXACT
    if exact:
        torch.set_num_threads(1)  # with more of them sums have another order
    return replace(distributed, exact=exact)


@contextlib.contextmanager
def joined() -> Iterator[Distributed]:
    """Join the processes that ``torchrun`` has started; without it, a distributed of one."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count == "1" or "RANK" not in os.environ:
        yield SINGLE
        return
    if dist.is_initialized():  # a script of the user's own has joined already
        yield Distributed(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    end_with_parent()
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    try:
        # torchrun may keep what an earlier try has left in the store: addresses of processes that are no more.
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=JOINING)))
        store = dist.PrefixStore(f"try {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {size}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the {count} processes that WORLD_SIZE names did not find each other ({reason[:150]}); start all of them "
            "with torchrun and the same --rdzv-endpoint, or unset WORLD_SIZE and RANK to run alone"
        ) from error
    try:
        yield Distributed(dist.get_rank(), dist.get_world_size(), local_rank)
    finally:
        dist.destroy_process_group()


def restarted() -> bool:
    """Whether ``torchrun`` or SLURM has started this command again after a fault: then it goes on with its run."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count.isdigit() and int(count) > 0 for count in counts)


def _on_cpu() -> bool:
    return not torch.cuda.is_available()
