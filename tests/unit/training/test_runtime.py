"""Devices, shards of several processes, and what they exchange; the processes are threads here, see `in_step`."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from cdc_plugin.errors import DataError, UserError
from cdc_plugin.training import runtime as distributed_module
from cdc_plugin.training.runtime import (
    SINGLE,
    Distributed,
    Runtime,
    choose_device,
    init_distributed,
    plan_shards,
    stay_alone,
    was_restarted,
)
from tests.helpers.in_step import Silence, in_step


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "mps:9", "", "cpu:x", "meta", "mtia", "vulkan"])
def test_a_device_that_is_not_there_is_refused_in_one_line(name):
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(UserError, match="device='cpu'") as refusal:
        choose_device(name)
    assert "\n" not in str(refusal.value)
    assert "aten::" not in str(refusal.value)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_autocast_computes_in_the_precision_of_the_run(precision):
    with Runtime(torch.device("cpu"), precision).autocast():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == getattr(torch, precision)


def test_half_precision_is_refused_on_apples_devices():
    with pytest.raises(UserError, match="bfloat16"):
        Runtime(torch.device("mps"), "float16")


def test_a_batch_is_shared_by_hand():
    plan = plan_shards(10, 5, 2)
    assert [rows.tolist() for rows in plan.sub_batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [[shard.tolist() for shard in shards] for shards in plan.shards] == [[[0, 1, 2], [3, 4]]] * 2
    assert [rows.tolist() for rows in plan.owned] == [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]]


@pytest.mark.parametrize("size", range(1, 9))
def test_no_image_of_a_set_or_a_batch_is_lost_or_has_two_owners_and_shares_are_near_equal(size):
    for count in range(1, 120):
        shards, plan = Distributed(size=size).shards_of(count), plan_shards(count, 20, size)
        assert torch.equal(torch.cat(shards), torch.arange(count))
        assert torch.equal(Distributed(size - 1, size).own_shard(count), shards[-1])
        assert torch.equal(torch.cat(plan.owned).sort().values, torch.arange(count))
        for each in (shards, *plan.shards):
            assert max(map(len, each)) - min(map(len, each)) <= 1


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 31, 33, 64, 151])
def test_rows_of_all_processes_are_gathered_in_order(count, size):
    rows = torch.arange(count * 6).view(count, 2, 3)
    for values in (rows, rows.float() / 7, rows % 2 == 0):
        for shards in (Distributed(size=size).shards_of(count), plan_shards(count, 25, size).owned):

            def gather(distributed: Distributed, values: Tensor = values, shards: list = shards) -> Tensor:
                return distributed.gather(values[shards[distributed.rank]], shards)

            assert all(torch.equal(whole, values) and whole.dtype == values.dtype for whole in in_step(size, gather))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_gradient_of_what_all_compute_alike_reaches_each_process_by_its_own_rows(size):
    rows, weights = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 3)
    whole = rows.clone().requires_grad_()
    ((whole @ weights).square().sum() * whole.mean()).backward()  # every row has a part in every gradient

    def work(distributed: Distributed) -> Tensor:
        own = rows[distributed.own_shard(40)].requires_grad_()
        together = distributed.gather_with_gradient(own, distributed.shards_of(40))
        assert torch.equal(together, rows)
        ((together @ weights).square().sum() * together.mean()).backward()
        return own.grad

    # Times the number of processes: DistributedDataParallel takes the mean where the sum is meant.
    torch.testing.assert_close(torch.cat(in_step(size, work)), whole.grad * size)


def test_sums_agreements_and_flags_of_several_processes():
    made = []

    def work(distributed: Distributed) -> tuple[Any, ...]:
        own = torch.tensor([1.0, float(distributed.rank)])
        shared = distributed.broadcast_from_main(lambda: made.append(distributed.rank) or torch.ones(2))
        assert torch.equal(shared, torch.ones(2))
        summed, agreed = distributed.all_reduce(own.clone()), distributed.broadcast_(own.clone() + 5)
        distributed.wait()
        assert distributed.all_reduce(own) is distributed.broadcast_(own) is own
        return summed.tolist(), agreed.tolist(), distributed.any(distributed.rank == 2), distributed.any(False)

    assert in_step(3, work) == [([3.0, 3.0], [6.0, 5.0], True, False)] * 3
    assert made == [0]  # by the main process, once


def test_a_process_of_its_own_exchanges_nothing(monkeypatch):
    monkeypatch.setattr(distributed_module, "dist", Silence())
    rows = torch.arange(6.0)
    for gather in (SINGLE.gather, SINGLE.gather_with_gradient):
        assert gather(rows, [torch.arange(6)]) is rows
    assert SINGLE.all_reduce(rows) is SINGLE.broadcast_(rows) is rows
    assert (SINGLE.main, SINGLE.any(True), SINGLE.any(False)) == (True, True, False)
    assert SINGLE.broadcast_from_main(lambda: 7) == SINGLE.raise_together(lambda: 7) == 7
    SINGLE.wait()


@pytest.mark.parametrize(
    ("method", "mistaken"),
    [("broadcast_from_main", {0}), *(("raise_together", some) for some in ({0, 1, 2}, {1, 2}, {2}, set()))],
    ids=str,
)
def test_a_mistake_that_a_process_finds_ends_all_and_is_reported_by_one(method, mistaken):
    def work(distributed: Distributed) -> Any:
        def open_file() -> int:
            if distributed.rank in mistaken:
                raise UserError(f"nothing at node {distributed.rank}")
            return distributed.rank

        try:
            return getattr(distributed, method)(open_file)
        except UserError as error:
            return str(error), error.told

    found = in_step(3, work)
    if not mistaken:
        assert found == [0, 1, 2]
    else:
        assert [text for text, told in found if not told] == [f"nothing at node {min(mistaken)}"]
        assert len([told for _, told in found if told]) == 2


@pytest.mark.parametrize(("digests", "counts"), [(["a", "b", "a"], [9, 9, 9]), (["a", "a", "c"], [9, 9, 8])])
def test_processes_that_see_other_images_are_refused_and_one_of_them_says_so(digests, counts):
    assert in_step(3, lambda distributed: distributed.check_same_images("a", 9)) == [None] * 3

    def work(distributed: Distributed) -> tuple[str, bool]:
        with pytest.raises(DataError) as caught:
            distributed.check_same_images(digests[distributed.rank], counts[distributed.rank])
        return str(caught.value), caught.value.told

    odd = next(rank for rank in range(3) if digests[rank] != "a")
    found = in_step(3, work)
    assert all(f"process {odd}" in text and f"{counts[odd]} readable images" in text for text, _ in found)
    assert [told for _, told in found] == [False, True, True]


@pytest.fixture
def environment(monkeypatch):
    """environment(RANK="0", ...): none of the words that torchrun says but those given."""

    def say(**words: str) -> None:
        restarts = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", *restarts):
            monkeypatch.delenv(name, raising=False)
        for name, word in words.items():
            monkeypatch.setenv(name, word)

    say()
    return say


def test_without_torchrun_a_process_is_alone_and_a_script_that_has_joined_is_left_as_it_is(environment, monkeypatch):
    monkeypatch.setattr(distributed_module, "dist", Silence())
    for words in ({}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "4"}):
        environment(**words)
        with init_distributed() as distributed:
            assert distributed is SINGLE
    environment(WORLD_SIZE="3", RANK="1", LOCAL_RANK="1")
    joined = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 1, get_world_size=lambda: 3)
    joined.get_backend_config = lambda: "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(distributed_module, "dist", joined)
    with init_distributed() as distributed:
        assert distributed == Distributed(1, 3, 1)
    with stay_alone(), init_distributed() as distributed:
        assert distributed is SINGLE
    joined.get_backend_config = lambda: "cuda:nccl"
    with pytest.raises(UserError, match="cpu:gloo"), init_distributed():
        pytest.fail("words cannot be shared")


def test_under_torchrun_a_device_is_no_certain_gpu_and_not_apples(environment, monkeypatch):
    environment(WORLD_SIZE="2", RANK="0")
    for name in ("cuda:0", "mps"):
        with pytest.raises(UserError, match="torchrun"):
            choose_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(distributed_module, "end_with_parent", lambda: None)
    # Both refuse, one of them aloud: else the first would wait for the other until it is killed.
    for rank, more, told in (
        ("1", {}, False),
        ("0", {"LOCAL_WORLD_SIZE": "2"}, False),
        ("1", {"LOCAL_WORLD_SIZE": "2"}, True),
    ):
        environment(WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank, **more)
        with pytest.raises(UserError, match="nproc-per-node=1") as refusal, init_distributed():
            pytest.fail("two processes on one GPU")
        assert refusal.value.told is told


def test_processes_that_do_not_find_each_other_are_told_what_to_do(environment, monkeypatch):
    environment(WORLD_SIZE="4", RANK="1")
    monkeypatch.setattr(distributed_module, "end_with_parent", lambda: None)
    monkeypatch.setattr(distributed_module.dist, "rendezvous", Mock(side_effect=ConnectionError("no answer\nmore")))
    message = r"the 4 processes .* \(no answer\); .*torchrun.* unset WORLD_SIZE"
    with pytest.raises(UserError, match=message), init_distributed():
        pytest.fail("nobody is there")


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_command_knows_when_it_was_started_again(environment, name):
    assert not was_restarted()
    for count, again in {"0": False, "2": True, "?": False}.items():
        environment(**{name: count})
        assert was_restarted() is again
        with stay_alone():  # what was started again is the pretraining around it
            assert not was_restarted()
