"""Shares of several processes, and what they exchange; the processes are threads here, see `in_step`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cdc_plugin.config.schema import RefineConfig, sub_batches
from cdc_plugin.errors import UserError
from cdc_plugin.training import distributed as distributed_module
from cdc_plugin.training.distributed import (
    MOST_EXACT,
    NEIGHBOURS,
    PIECES,
    SINGLE,
    Distributed,
    deal,
    joined,
    restarted,
    settled,
    sizes_of,
)
from tests.helpers.in_step import Silence, in_step

SIZES = range(1, 9)
COUNTS = range(1, 200)


def ordered(parts: list[Tensor], count: int) -> bool:
    """Nothing is lost, nothing is there twice, and all of it is in order."""
    return torch.equal(torch.cat(parts), torch.arange(count))


def near_equal(counts: list[int]) -> bool:
    return max(counts) - min(counts) <= 1


def test_whole_runs_of_32_neighbours_are_shared_by_hand():
    shares = Distributed(size=2).shares_of(100)
    assert [(int(share[0]), int(share[-1])) for share in shares] == [(0, 63), (64, 99)]
    assert [len(share) for share in Distributed(size=3).shares_of(40)] == [32, 8, 0]
    assert Distributed(rank=1, size=3).share_of(40).tolist() == list(range(32, 40))


@pytest.mark.parametrize("size", SIZES)
def test_of_any_number_of_images_none_is_lost_and_none_has_two_owners(size):
    for count in COUNTS:
        shares = Distributed(size=size).shares_of(count)
        assert len(shares) == size
        assert ordered(shares, count)
        assert near_equal([-(-len(share) // NEIGHBOURS) for share in shares])
        # However many processes there are, 32 neighbours are seen together.
        assert all(int(share[0]) % NEIGHBOURS == 0 for share in shares if len(share))
        ranks = [Distributed(rank, size).share_of(count) for rank in range(size)]
        assert all(torch.equal(*pair) for pair in zip(ranks, shares, strict=True))


def test_a_batch_is_dealt_by_hand():
    plan_shards_of = deal(10, 2, Distributed(size=2))
    assert [rows.tolist() for rows in plan_shards_of.sub_batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [[own.tolist() for own in shares] for shares in plan_shards_of.shares] == [[[0, 1, 2], [3, 4]]] * 2
    assert [own.tolist() for own in plan_shards_of.owned] == [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]]
    second = plan_shards_of.together(range(1, 2), rank=1)
    assert [own.tolist() for own in second.shares] == [[0, 1, 2], [3, 4]]
    assert second.pieces == [1, 1]


def test_pieces_of_an_exact_world_by_hand():
    # 38 and 37 images in pieces of two are 19 pieces, of which the first process has ten.
    plan_shards_of = deal(75, 2, Distributed(size=2, exact=True))
    assert [[len(own) for own in shares] for shares in plan_shards_of.shares] == [[20, 18], [20, 17]]
    assert plan_shards_of.whole(0).pieces == [2] * 20
    assert plan_shards_of.whole(1).pieces == [2] * 9 + [2] * 8 + [1]


@pytest.mark.parametrize("exact", [False, True], ids=["near-equal", "exact"])
@pytest.mark.parametrize("size", SIZES)
def test_a_batch_of_any_size_is_dealt_whole_and_in_order(size, exact):
    for count in COUNTS:
        parts = sub_batches(count, 80)
        plan_shards_of = deal.__wrapped__(count, parts, Distributed(size=size, exact=exact))
        lengths = [len(rows) for rows in plan_shards_of.sub_batches]
        assert len(lengths) == parts
        assert near_equal(lengths)
        assert ordered(plan_shards_of.sub_batches, count)
        for rows, shares, pieces in zip(
            plan_shards_of.sub_batches, plan_shards_of.shares, plan_shards_of.pieces, strict=True
        ):
            assert len(shares) == size
            assert ordered(shares, len(rows))
            owners = [set(pieces[own].tolist()) for own in shares]
            assert sum(map(len, owners)) == int(pieces[-1]) + 1  # none has two owners
            assert near_equal([len(own) for own in owners])
            assert exact or near_equal([len(own) for own in shares])
        assert torch.equal(torch.cat(plan_shards_of.owned).sort().values, torch.arange(count))


def test_a_process_owns_its_shares_of_all_sub_batches_one_after_another():
    for count, size in [(151, 2), (75, 3), (199, 5), (9, 8)]:
        plan_shards_of = deal(count, 3, Distributed(size=size, exact=True))
        for rank, own in enumerate(plan_shards_of.owned):
            parts = zip(plan_shards_of.sub_batches, plan_shards_of.shares, strict=True)
            assert torch.equal(own, torch.cat([rows[shares[rank]] for rows, shares in parts]))
            whole = plan_shards_of.whole(rank)
            assert sum(whole.pieces) == len(own)
            assert all(torch.equal(*pair) for pair in zip(whole.shares, plan_shards_of.owned, strict=True))


def test_pieces_do_not_depend_on_the_number_of_processes():
    for count in range(1, 200, 7):
        alone = deal(count, 1, Distributed(exact=True))
        assert len(alone.pieces[0].unique()) >= min(count, PIECES)
        for size in (2, 3, 8):
            several = deal(count, 1, Distributed(size=size, exact=True))
            assert torch.equal(several.pieces[0], alone.pieces[0])
            sizes = [pieces for rank in range(size) for pieces in several.whole(rank).pieces]
            assert sizes == alone.whole(0).pieces


def test_sub_batches_that_are_seen_together_are_those_of_the_whole():
    plan_shards_of = deal(101, 4, Distributed(size=3, exact=True))
    first = len(plan_shards_of.sub_batches[0])
    middle, whole = plan_shards_of.together(range(1, 3), rank=2), plan_shards_of.whole(2)
    count = len(plan_shards_of.sub_batches[1]) + len(plan_shards_of.sub_batches[2])
    assert torch.equal(torch.cat(middle.shares).sort().values, torch.arange(count))
    for own, all_of_them in zip(middle.shares, whole.shares, strict=True):
        inside = (all_of_them >= first) & (all_of_them < first + count)
        assert torch.equal(own + first, all_of_them[inside])


def test_sizes_of_pieces_by_hand():
    assert sizes_of(torch.tensor([0, 0, 1, 1, 1, 4])) == [2, 3, 1]
    assert sizes_of(torch.tensor([], dtype=torch.long)) == []


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 31, 33, 64, 151])
def test_rows_of_all_processes_are_gathered_in_order(count, size):
    rows = torch.arange(count * 6).view(count, 2, 3)
    for values in (rows, rows.float() / 7, rows % 2 == 0):
        gathered = in_step(
            size,
            lambda distributed, values=values: distributed.gather(
                values[distributed.share_of(count)], distributed.shares_of(count)
            ),
        )
        assert all(torch.equal(whole, values) and whole.dtype == values.dtype for whole in gathered)


def test_rows_that_are_dealt_by_turns_are_gathered_in_order():
    rows = torch.arange(75.0)
    for exact in (False, True):
        plan_shards_of = [deal(75, 3, Distributed(rank, 3, exact=exact)).owned for rank in range(3)]
        found = in_step(
            3,
            lambda distributed, plan_shards_of=plan_shards_of: distributed.gather(
                rows[plan_shards_of[distributed.rank][distributed.rank]], plan_shards_of[0]
            ),
            exact,
        )
        assert all(torch.equal(whole, rows) for whole in found)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_gradient_of_what_all_compute_alike_reaches_each_process_by_its_own_rows(size):
    rows, weights = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 3)
    whole = rows.clone().requires_grad_()
    ((whole @ weights).square().sum() * whole.mean()).backward()  # every row has a part in every gradient

    def work(distributed: Distributed) -> Tensor:
        own = rows[distributed.share_of(40)].requires_grad_()
        together = distributed.gather_with_gradient(own, distributed.shares_of(40))
        assert torch.equal(together, rows)
        ((together @ weights).square().sum() * together.mean()).backward()
        return own.grad

    torch.testing.assert_close(torch.cat(in_step(size, work)), whole.grad)


def test_sums_agreements_and_flags_of_several_processes():
    def work(distributed: Distributed) -> tuple[Any, ...]:
        own = torch.tensor([1.0, float(distributed.rank)])
        summed, agreed = distributed.total(own.clone()), distributed.broadcast_(own.clone() + 5)
        mine = distributed.total(distributed.only_main(own + 1))
        distributed.wait()
        return (
            summed.tolist(),
            agreed.tolist(),
            mine.tolist(),
            distributed.any(distributed.rank == 2),
            distributed.any(False),
        )

    assert in_step(3, work) == [([3.0, 3.0], [6.0, 5.0], [2.0, 1.0], True, False)] * 3


def test_sums_and_agreements_are_made_in_place():
    def work(distributed: Distributed) -> list[bool]:
        tensor = torch.ones(2)
        return [
            distributed.total(tensor) is tensor,
            distributed.broadcast_(tensor) is tensor,
            tensor.tolist() == [2.0, 2.0],
        ]

    assert in_step(2, work) == [[True] * 3] * 2


def test_a_process_of_its_own_exchanges_nothing(monkeypatch):
    monkeypatch.setattr(distributed_module, "dist", Silence())
    rows = torch.arange(6.0)
    assert SINGLE.main
    assert SINGLE.gather(rows, [torch.arange(6)]) is rows
    assert SINGLE.gather_with_gradient(rows, [torch.arange(6)]) is rows
    assert SINGLE.total(rows) is SINGLE.broadcast_(rows) is SINGLE.only_main(rows) is rows
    assert SINGLE.any(True)
    assert not SINGLE.any(False)
    assert SINGLE.broadcast_from_main(lambda: 7) == SINGLE.raise_together(lambda: 7) == 7
    SINGLE.wait()


def test_what_the_main_process_makes_is_in_all_of_them_and_made_once():
    made = []
    found = in_step(
        3,
        lambda distributed: distributed.broadcast_from_main(
            lambda: made.append(distributed.rank) or {"a": torch.ones(2)}
        ),
    )
    assert made == [0]
    assert all(torch.equal(each["a"], torch.ones(2)) for each in found)


def test_a_mistake_that_the_main_process_finds_ends_all_and_is_told_by_one():
    def refuse() -> None:
        raise UserError("nothing at nowhere")

    def work(distributed: Distributed) -> tuple[str, bool]:
        with pytest.raises(UserError) as caught:
            distributed.broadcast_from_main(refuse)
        return str(caught.value), caught.value.told

    assert in_step(3, work) == [("nothing at nowhere", distributed > 0) for distributed in range(3)]


@pytest.mark.parametrize("mistaken", [{0, 1, 2}, {1, 2}, {2}, set()], ids=str)
def test_a_mistake_that_any_process_finds_ends_all_and_is_told_by_one(mistaken):
    def work(distributed: Distributed) -> Any:
        def open_file() -> int:
            if distributed.rank in mistaken:
                raise UserError(f"nothing at node {distributed.rank}")
            return distributed.rank

        try:
            return distributed.raise_together(open_file)
        except UserError as error:
            return str(error), error.told

    found = in_step(3, work)
    if not mistaken:
        assert found == [0, 1, 2]
    else:
        assert [text for text, told in found if not told] == [f"nothing at node {min(mistaken)}"]


@pytest.mark.parametrize(
    ("size", "device", "asked", "exact"),
    [
        (1, "cpu", None, False),
        (1, "cpu", True, True),
        (2, "cpu", None, True),
        (2, "cpu", True, True),
        (2, "cpu", False, False),
        (2, "cuda", True, False),
        (MOST_EXACT, "cpu", None, True),
        (MOST_EXACT + 1, "cpu", True, False),
    ],
)
def test_a_world_is_exact_on_processors_that_synchronise_and_takes_one_thread_then(
    two_threads, size, device, asked, exact
):
    found = settled(Distributed(size - 1, size, 0), RefineConfig(sync_batchnorm=asked), torch.device(device))
    assert found == Distributed(size - 1, size, 0, exact=exact)
    assert torch.get_num_threads() == (1 if exact else 2)


@pytest.mark.parametrize(("size", "asked"), [(1, True), (2, None), (2, True)])
def test_compiled_networks_can_not_synchronise(two_threads, size, asked):
    config = RefineConfig(compile=True, sync_batchnorm=asked)
    with pytest.raises(UserError, match="sync_batchnorm=false"):
        settled(Distributed(0, size), config, torch.device("cpu"))
    config.sync_batchnorm = False
    assert settled(Distributed(0, size), config, torch.device("cpu")) == Distributed(0, size)
    assert torch.get_num_threads() == 2


@pytest.fixture
def environment(monkeypatch):
    """environment(RANK="0", ...): none of the words that torchrun says but those given."""

    def say(**words: str) -> None:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
            monkeypatch.delenv(name, raising=False)
        for name, word in words.items():
            monkeypatch.setenv(name, word)

    say()
    return say


@pytest.mark.parametrize("words", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "4"}], ids=str)
def test_without_torchrun_a_process_is_alone(environment, monkeypatch, words):
    environment(**words)
    monkeypatch.setattr(distributed_module, "dist", Silence())
    with joined() as distributed:
        assert distributed is SINGLE


class Joined:
    """A script of the user's own has joined; it must stay so."""

    is_initialized, get_rank, get_world_size = (staticmethod(lambda value=value: value) for value in (True, 1, 3))


def test_a_script_that_has_joined_already_is_left_as_it_is(environment, monkeypatch):
    environment(WORLD_SIZE="3", RANK="1", LOCAL_RANK="1")
    monkeypatch.setattr(distributed_module, "dist", Joined())
    with joined() as distributed:
        assert distributed == Distributed(1, 3, 1)


def test_processes_that_do_not_find_each_other_are_told_what_to_do(environment, monkeypatch):
    environment(WORLD_SIZE="4", RANK="1")
    monkeypatch.setattr(distributed_module, "end_with_parent", lambda: None)

    def lost(*_: Any, **__: Any) -> None:
        raise ConnectionError("no answer\nmore lines")

    monkeypatch.setattr(distributed_module.dist, "rendezvous", lost)
    with pytest.raises(UserError, match=r"the 4 processes .* \(no answer\); .*torchrun.* unset WORLD_SIZE"), joined():
        pytest.fail("nobody is there")


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ({}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, True),
        ({"SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_RESTART_COUNT": "?"}, False),
    ],
    ids=str,
)
def test_a_command_knows_when_it_was_started_again(environment, words, again):
    environment(**words)
    assert restarted() is again
