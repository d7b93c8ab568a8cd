"""Say where and how a run computes: device, precision, and the processes that ``torchrun`` starts to train as one.

Over several processes the backbone is data-parallel: every process has its shard of each batch. Features are gathered,
so that all processes see the whole batch for selection, targets and heads; gradients of the backbone are averaged by
`torch.nn.parallel.DistributedDataParallel`. One, two or three processes end within rounding of each other.
"""

import contextlib
import datetime
import functools
import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cdc_plugin.config.resolve import count_sub_batches
from cdc_plugin.core.torch_defaults import torch_defaults
from cdc_plugin.errors import ConfigError, DataError, UserError, option
from cdc_plugin.training.signals import end_with_parent

if dist.is_available():
    # DistributedDataParallel imports it, and its functions keep the group that there is at that time, and the threads
    # of that group, until the interpreter is torn down; a thread that then lets go of a tensor aborts the process.
    import torch.distributed.nn

Shared = TypeVar("Shared")
Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
JOIN_TIMEOUT = datetime.timedelta(minutes=10)  # for all processes to start
DEVICES, EXPECTED = ("cpu", "cuda", "mps"), "expected auto, cpu, cuda, cuda:1 or mps"
WAIT_TIMEOUT = datetime.timedelta(hours=2)  # for a process that may be reading all images


@dataclass(frozen=True)
class Distributed:
    """Which of how many processes this is; the default is a single process, which exchanges nothing."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine

    @property
    def main(self) -> bool:
        """Return whether this process writes files and prints."""
        return self.rank == 0

    def shards_of(self, count: int) -> list[Tensor]:
        """Return for each process which of ``count`` images are its own: near-equal runs of consecutive ones."""
        return list(torch.arange(count).tensor_split(self.size))

    def own_shard(self, count: int) -> Tensor:
        """Return which of ``count`` images are this process's."""
        return self.shards_of(count)[self.rank]

    def broadcast_from_main(self, make: Callable[[], Shared]) -> Shared:
        """Call ``make`` in the main process and return its result, or raise its UserError, in all of them."""
        if self.size == 1:
            return make()
        carried: list[Any] = [None]
        if self.main:
            try:
                carried[0] = make()
            except UserError as error:  # the others must not wait for what will never come
                carried[0] = error
        dist.broadcast_object_list(carried, src=0, device=torch.device("cpu"))
        if isinstance(carried[0], UserError):
            carried[0].told = not self.main
            raise carried[0]
        return carried[0]

    def raise_together(self, make: Callable[[], Shared]) -> Shared:
        """Call ``make`` in each process; a UserError in any of them ends all, and one of them reports it."""
        if self.size == 1:
            return make()
        mistake, raised = None, torch.zeros(self.size)
        try:
            result = make()
        except UserError as error:
            mistake, raised[self.rank] = error, 1
        first = self.all_reduce(raised).nonzero().flatten().tolist()[:1]
        if not first:
            return result
        mistake = mistake or UserError(f"process {first[0]} has reported an error")
        mistake.told = first != [self.rank]
        raise mistake

    def check_same_images(self, digest: str, image_count: int) -> None:
        """Refuse to train on different files: every process must see the same list of images."""
        seen: list[Any] = [None] * self.size
        dist.all_gather_object(seen, (digest, image_count))
        for rank, (other, count) in enumerate(seen):
            if other != seen[0][0]:
                error = DataError(
                    f"process {rank} sees other images than process 0 ({count} readable images against {seen[0][1]}); "
                    "the data must be the same files on all machines: compare the folders and the warnings about "
                    "skipped files"
                )
                error.told = not self.main
                raise error

    def wait(self) -> None:
        """Return when all processes have come here."""
        if self.size > 1:
            dist.barrier() if torch.cuda.is_available() else dist.monitored_barrier(timeout=WAIT_TIMEOUT)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return bool(self.all_reduce(torch.tensor(float(flag))) > 0)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Give a tensor the main process's values, in place, and return it: devices may round differently."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def gather(self, rows: Tensor, shards: Sequence[Tensor]) -> Tensor:
        """Return the rows of all processes in order; ``shards`` holds for each the places (n,) of its ``rows``."""
        if self.size == 1:
            return rows
        largest = max(len(places) for places in shards)
        padded = rows.new_zeros(largest, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in shards]
        dist.all_gather(parts, padded.contiguous())
        everything = rows.new_empty(sum(map(len, shards)), *rows.shape[1:])
        for places, part in zip(shards, parts, strict=True):
            everything[places.to(rows.device)] = part[: len(places)]
        return everything

    def gather_with_gradient(self, rows: Tensor, shards: Sequence[Tensor]) -> Tensor:
        """Gather rows for a loss that all processes compute alike on the whole batch."""
        return rows if self.size == 1 else _Gather.apply(rows, self, shards)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, distributed: Distributed, shards: Sequence[Tensor]) -> Tensor:
        context.places, context.size = shards[distributed.rank], distributed.size
        return distributed.gather(rows.detach(), shards)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Times the number of processes, over which DistributedDataParallel averages.
        return gradient[context.places.to(gradient.device)] * context.size, None, None


SINGLE = Distributed()


@dataclass(frozen=True)
class ShardPlan:
    """How the processes share a batch: each has a near-equal shard of every sub-batch."""

    sub_batches: list[Tensor]  # (b,) rows of the batch, for each sub-batch
    shards: list[list[Tensor]]  # for each sub-batch and process, its rows of the sub-batch

    @functools.cached_property
    def owned(self) -> list[Tensor]:
        """Return for each process its rows of the batch, sub-batch after sub-batch."""
        rows = [[rows[shard] for shard in shards] for rows, shards in zip(self.sub_batches, self.shards, strict=True)]
        return [torch.cat(own) for own in zip(*rows, strict=True)]


@functools.lru_cache(maxsize=64)  # batches of an epoch have the same size, but for one image
def plan_shards(count: int, sub_batch_size: int, size: int) -> ShardPlan:
    """Return how ``size`` processes share a batch of ``count`` images."""
    rows = list(torch.arange(count).tensor_split(count_sub_batches(count, sub_batch_size)))
    return ShardPlan(rows, [list(torch.arange(len(part)).tensor_split(size)) for part in rows])


RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
# Set by torchrun, Lightning and SLURM for the processes that they start.
GROUP = (
    *RESTARTS,
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@contextlib.contextmanager
def stay_alone() -> Iterator[None]:
    """Keep to this process what runs inside, although it is one of several: no other would come to join it."""
    group = {name: os.environ.pop(name) for name in GROUP if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(group)


@contextlib.contextmanager
def init_distributed() -> Iterator[Distributed]:
    """Join the processes that ``torchrun`` has started; without it, yield a single process."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count == "1" or "RANK" not in os.environ:
        yield SINGLE
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_initialized():  # a script of the user's own has joined already
        if torch.device("cpu") not in map(torch.device, _devices_of_group()):
            raise ConfigError(
                "the processes exchange GPU tensors only, and a run shares words and CPU tensors too; start the group "
                'with init_process_group("cpu:gloo,cuda:nccl"), or let cdc_plugin start it'
            )
        with _leave_no_network():
            yield Distributed(dist.get_rank(), dist.get_world_size(), local_rank)
        return
    end_with_parent()
    if torch.cuda.is_available():
        torch.cuda.set_device(_check_device_count(local_rank))
    try:
        # torchrun may keep what an earlier attempt has left in the store: addresses of processes that are gone.
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=JOIN_TIMEOUT)))
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {size}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=WAIT_TIMEOUT)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the {count} processes that WORLD_SIZE names did not find each other ({reason[:150]}); start all of them "
            "with torchrun and the same --rdzv-endpoint, or unset WORLD_SIZE and RANK to run a single process"
        ) from error
    try:
        with _leave_no_network():
            yield Distributed(dist.get_rank(), dist.get_world_size(), local_rank)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _leave_no_network() -> Iterator[None]:
    """Free data-parallel networks that a cycle keeps: they would keep the group, and its threads, beyond its end.

    A thread that lets go of a tensor while the interpreter is torn down aborts the process.
    """
    try:
        yield
    finally:
        gc.collect()


def _devices_of_group() -> list[str]:
    return [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]


def _check_device_count(local_rank: int) -> int:
    """Return which GPU is this process's; refuse more processes than GPUs, which NCCL answers with a hang."""
    count, stated = torch.cuda.device_count(), os.environ.get("LOCAL_WORLD_SIZE")
    processes = int(stated or local_rank + 1)
    if processes > count:
        error = ConfigError(
            f"there are {processes} or more processes on this machine, which has {count} GPUs; take "
            f"--nproc-per-node={count}, or {option('device', 'cpu')} with CUDA_VISIBLE_DEVICES= in front"
        )
        error.told = stated is not None and local_rank > 0  # all processes know, and the first one says it
        raise error
    return local_rank


def was_restarted() -> bool:
    """Return whether ``torchrun`` or SLURM has started this command again after a fault, so that it resumes."""
    counts = (os.environ.get(name, "0") for name in RESTARTS)
    return any(count.isdigit() and int(count) > 0 for count in counts)


def show_nothing(items: Iterable[Any], total: int, description: str) -> Iterable[Any]:
    """Return the items as they are: the progress of a caller that shows none."""
    return items


@dataclass(frozen=True)
class Runtime:
    """Where and how a run computes."""

    device: torch.device
    precision: str = "float32"  # or bfloat16 or float16, by autocast; auto is bfloat16 on GPUs that have it
    distributed: Distributed = SINGLE
    progress: Progress = show_nothing  # wraps an iterable of so many items in a bar with a description

    def __post_init__(self) -> None:
        if self.precision == "float16" and self.device.type == "mps":  # torch 2.6 scales such losses in float64
            raise ConfigError("precision=float16 does not train on MPS; take precision=bfloat16 or float32")
        if self.precision == "auto":
            fast = self.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            object.__setattr__(self, "precision", "bfloat16" if fast else "float32")

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context in which networks compute in this precision."""
        if self.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.precision))


@contextlib.contextmanager
def restore_torch(deterministic: bool = False) -> Iterator[None]:
    """Compute as torch does by default, whatever the caller has switched off, and leave everything as it was.

    GPUs try which of their convolutions is fastest, or take those that give the same bits every time.
    """
    threads = torch.get_num_threads()
    chosen = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fastest = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU multiplies its first matrices
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch_defaults():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = fastest
        torch.use_deterministic_algorithms(chosen[0], warn_only=chosen[1])


def choose_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` takes CUDA, then Apple's MPS, then the CPU.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    several = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() and not several else "cpu")
    try:
        device = torch.device(name)
        if device.type not in DEVICES:  # torch knows twenty names; of a machine that is absent, some wait for ever
            raise ValueError(EXPECTED)
        if several and device.type == "mps":
            raise ValueError("the processes of torchrun cannot exchange what is on it")
        if several and device.index is not None:
            raise ValueError("each process of torchrun takes a GPU of its own: name none")
        torch.empty(0, device=device)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
        if "'MPS' backend" in reason:  # that it lacks the most basic operation
            reason = "torch finds no GPU of Apple's"
        if reason.startswith("Expected one of"):
            reason = EXPECTED
        other = "cuda" if several and name.startswith("cuda:") else "cpu"
        raise ConfigError(
            f"device {name!r} cannot be used here ({reason[:150]}); try {option('device', other)}"
        ) from error
    return device


def lr_multiplier(schedule: str, steps: int, total_steps: int) -> float:
    """Return the factor on a learning rate after so many steps: 1, or a cosine that ends at 0.

    >>> lr_multiplier("cosine", 50, 100), lr_multiplier("constant", 50, 100)
    (0.5, 1.0)
    """
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, steps / total_steps)))
