import itertools

import torch

from cdc_plugin.core.random_streams import TRAINING, VIEWS, fork_rng, generator

CPU = torch.device("cpu")


def draws(*parts: int) -> tuple[int, ...]:
    return tuple(torch.randint(2**40, (4,), generator=generator(*parts)).tolist())


def test_a_stream_depends_on_seed_purpose_and_epoch_and_on_nothing_else():
    numbers = list(itertools.product((0, 1, 7), (TRAINING, VIEWS), (0, 1, 2)))
    assert len({draws(*parts) for parts in numbers}) == len(numbers)
    torch.manual_seed(1)
    torch.rand(5)
    assert draws(7, VIEWS, 2) == draws(7, VIEWS, 2)


def test_streams_of_neighbouring_seeds_are_unrelated():
    streams = torch.stack([torch.randn(2000, generator=generator(seed)) for seed in range(5)])
    off_diagonal = torch.corrcoef(streams)[~torch.eye(5, dtype=torch.bool)]
    assert off_diagonal.abs().max() < 0.1  # five standard deviations


def test_a_forked_stream_follows_its_generator_and_leaves_the_global_one_as_it_was():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with fork_rng(generator(1), CPU):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    for seed, process in ((1, 0), (2, 0), (1, 1)):  # each process has a stream of its own
        with fork_rng(generator(seed), CPU, process):
            assert torch.equal(torch.rand(3), first) == ((seed, process) == (1, 0))
