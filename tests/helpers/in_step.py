"""Several processes of a run as threads of one: each asks the others for the same, in step."""

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cdc_plugin.training import runtime as distributed_module
from cdc_plugin.training.runtime import Distributed


class Threads:
    """Takes the place of `torch.distributed`: each process is a thread, and all must ask for the same."""

    def __init__(self, size: int) -> None:
        self.size, self.given = size, [("", None)] * size
        self.barrier = threading.Barrier(size, timeout=30)
        self.own = threading.local()

    def exchange(self, what: str, value: Any = None) -> list[Any]:
        self.given[self.own.rank] = (what, value)
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        asked = [name for name, _ in found]
        assert len(set(asked)) == 1, f"the processes are out of step: {asked}"
        return [each for _, each in found]

    def all_reduce(self, tensor: Tensor) -> None:
        parts = self.exchange(f"all_reduce {tuple(tensor.shape)} {tensor.dtype}", tensor.clone())
        for part in parts[-2::-1]:  # in no particular order, which nobody may rely on
            parts[-1] = parts[-1] + part
        tensor.copy_(parts[-1])

    def broadcast(self, tensor: Tensor, src: int) -> None:
        tensor.copy_(self.exchange(f"broadcast {tuple(tensor.shape)} {tensor.dtype}", tensor.clone())[src])

    def all_gather(self, parts: list[Tensor], tensor: Tensor) -> None:
        found = self.exchange(f"all_gather {tuple(tensor.shape)} {tensor.dtype}", tensor.clone())
        for part, each in zip(parts, found, strict=True):
            part.copy_(each)

    def broadcast_object_list(self, carried: list[Any], src: int, device: torch.device) -> None:
        found = self.exchange("broadcast_object_list", pickle.dumps(list(carried)))
        if self.own.rank != src:
            carried[:] = pickle.loads(found[src])

    def all_gather_object(self, parts: list[Any], value: Any) -> None:
        parts[:] = self.exchange("all_gather_object", value)

    def monitored_barrier(self, timeout: Any) -> None:
        self.exchange("barrier")


class Silence:
    """A `torch.distributed` that nobody may use."""

    def __getattr__(self, name: str) -> Any:
        pytest.fail(f"torch.distributed.{name} was asked for")


def in_step(size: int, work: Callable[[Distributed], Any]) -> list[Any]:
    """What ``work`` gives in each of so many processes."""
    threads, results, errors = Threads(size), [None] * size, {}

    def process(rank: int) -> None:
        threads.own.rank = rank
        torch.set_num_threads(1)  # as in the main thread: oneDNN counts per thread
        try:
            results[rank] = work(Distributed(rank, size, rank))
            threads.exchange("the end")
        except BaseException as error:
            errors[rank] = error
            threads.barrier.abort()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_module, "dist", threads)
        running = [threading.Thread(target=process, args=(rank,), daemon=True) for rank in range(size)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    for error in sorted(errors.values(), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
