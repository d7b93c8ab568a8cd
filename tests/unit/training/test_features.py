"""Features of all images, of which each process has its own: in memory or in files, they are the same."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cdc_plugin.core.prototypes import standardize_rows
from cdc_plugin.data.images import open_images
from cdc_plugin.errors import UserError
from cdc_plugin.models.heads import ClusterHead
from cdc_plugin.training import features as module
from cdc_plugin.training.features import (
    Features,
    extract_features,
    find_rows,
    head_probabilities,
    keep_rows,
    kmeans_assignment,
)
from cdc_plugin.training.runtime import Distributed, Runtime
from tests.helpers.in_step import in_step

CPU = torch.device("cpu")
ROWS = torch.arange(21.0).view(7, 3) / 8


def parts(rows: Tensor, *sizes: int) -> Iterator[Tensor]:
    return iter(rows.split(list(sizes)))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache folder of its own, which is not there yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CDC_CACHE", str(folder))
    monkeypatch.delenv("CDC_CACHE_GB", raising=False)
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*")) if folder.exists() else []


@pytest.mark.parametrize("limit", [0, 7 * 3 * 4 - 1, 7 * 3 * 4])
def test_rows_in_memory_or_in_a_file_are_the_same_and_found_again(monkeypatch, cache, limit):
    monkeypatch.setattr(module, "IN_MEMORY", limit)
    assert find_rows("key", (7, 3)) is None
    kept = keep_rows("key", (7, 3), parts(ROWS, 3, 0, 4))
    found = find_rows("key", (7, 3))
    assert torch.equal(kept, ROWS)
    assert torch.equal(found, ROWS)
    found.mul_(0)  # a change of what was found never reaches the file
    assert torch.equal(find_rows("key", (7, 3)), ROWS)
    assert files(cache) == ["features-key.npy"]
    assert np.array_equal(np.load(cache / "features-key.npy"), ROWS.numpy())
    (cache / "features-key.npy").unlink()  # rows that are still in use are read all the same
    assert torch.equal(kept, ROWS)
    assert find_rows("key", (7, 3)) is None


def test_what_is_found_counts_as_used_and_neither_another_shape_nor_a_cut_file_is_found(cache):
    keep_rows("key", (7, 3), parts(ROWS, 7))
    file = cache / "features-key.npy"
    os.utime(file, (1000, 1000))
    for key, shape in (("key", (8, 3)), ("key", (7, 2)), ("key", (6, 3)), ("other", (7, 3))):
        assert find_rows(key, shape) is None
    assert file.stat().st_mtime == 1000
    find_rows("key", (7, 3))
    assert file.stat().st_mtime > 1000
    os.truncate(file, 40)
    assert find_rows("key", (7, 3)) is None


@pytest.mark.parametrize("wish", ["given", "off"])
@pytest.mark.parametrize("limit", [0, 1000])
def test_rows_that_nobody_will_ask_for_leave_nothing(monkeypatch, cache, wish, limit):
    if wish == "off":
        monkeypatch.setenv("CDC_CACHE", "off")
    monkeypatch.setattr(module, "IN_MEMORY", limit)
    for key in [None, "key"] if wish == "off" and limit else [None]:
        assert torch.equal(keep_rows(key, (7, 3), parts(ROWS, 2, 5)), ROWS)
        assert find_rows(key, (7, 3)) is None
    assert files(cache) == []


def test_a_cache_without_room_is_no_trouble_to_few_rows_and_half_of_many_are_never_kept(monkeypatch, cache):
    monkeypatch.setenv("CDC_CACHE_GB", "0")
    assert torch.equal(keep_rows("key", (7, 3), parts(ROWS, 7)), ROWS)
    assert files(cache) == []
    monkeypatch.setattr(module, "IN_MEMORY", 0)
    with pytest.raises(UserError, match="CDC_CACHE_GB"):
        keep_rows("key", (7, 3), parts(ROWS, 7))
    monkeypatch.delenv("CDC_CACHE_GB")

    def failing() -> Iterator[Tensor]:
        yield ROWS[:3]
        raise KeyError("image 4")

    with pytest.raises(KeyError):
        keep_rows("key", (7, 3), failing())
    assert find_rows("key", (7, 3)) is None
    assert files(cache) == []


def kinds_of(rows: Tensor) -> list[Tensor]:
    """The same rows in memory and in a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "IN_MEMORY", 0)
        return [rows, keep_rows(f"{len(rows)}", tuple(rows.shape), [rows])]


def test_blocks_are_the_rows_in_order(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 3)
    for own in kinds_of(ROWS):
        features = Features(own, 7)
        assert [len(block) for block in features.blocks()] == [3, 3, 1]
        assert all(isinstance(block, Tensor) for block in features.blocks())
        assert torch.equal(torch.cat(list(features.blocks())), ROWS)
        assert len(features) == 7
    # A process without images has one empty block.
    blocks = list(Features(torch.empty(0, 3), 7, Distributed(1, 2)).blocks())
    assert [tuple(block.shape) for block in blocks] == [(0, 3)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [33, 151])
def test_work_on_all_rows_is_gathered_from_blocks_of_all_processes(monkeypatch, count, size):
    monkeypatch.setattr(module, "BLOCK", 20)
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))

    def work(distributed: Distributed) -> list[Tensor]:
        features = Features(rows[distributed.own_shard(count)], count, distributed)
        return [features.map(lambda block: block.square()), features.map(lambda block: block[:, 0] > 0)]

    for squares, positive in in_step(size, work):
        assert torch.equal(squares, rows.square())
        assert torch.equal(positive, rows[:, 0] > 0)


def test_few_rows_are_sampled_whole_and_nothing_is_drawn(randomness):
    before = randomness.get_state()
    rows, chosen = Features(ROWS, 7).sample(2, randomness)
    assert torch.equal(rows, ROWS)
    assert chosen.tolist() == list(range(7))
    assert torch.equal(randomness.get_state(), before)


@pytest.mark.parametrize(("clusters", "expected"), [(2, 40), (10, 50), (13, 65)])
def test_a_sample_has_enough_rows_per_cluster_and_is_the_same_however_rows_are_kept(monkeypatch, clusters, expected):
    monkeypatch.setattr(module, "SAMPLE", 40)
    monkeypatch.setattr(module, "SAMPLE_A_CLUSTER", 5)
    rows = torch.arange(302.0).view(151, 2)

    def sample(distributed: Distributed, seed: int = 3) -> tuple[Tensor, Tensor]:
        randomness = torch.Generator().manual_seed(seed)
        return Features(rows[distributed.own_shard(151)], 151, distributed).sample(clusters, randomness)

    found, chosen = sample(Distributed())
    assert len(chosen) == expected
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert torch.equal(found, rows[chosen])
    assert not torch.equal(sample(Distributed(), seed=4)[1], chosen)
    on_disk = Features(kinds_of(rows)[1], 151).sample(clusters, torch.Generator().manual_seed(3))
    for others in ([on_disk], in_step(2, sample), in_step(3, sample), in_step(8, sample)):
        assert all(torch.equal(other[0], found) and torch.equal(other[1], chosen) for other in others)


def test_features_do_not_depend_on_order_and_come_without_gradient(tiny_backbone, digits):
    images = open_images(digits[0][:20], 32)
    turned = open_images(digits[0][:20][::-1].copy(), 32)
    features = extract_features(tiny_backbone, images, Runtime(CPU))
    assert features.shape == (20, 8)
    assert not features.requires_grad
    torch.testing.assert_close(extract_features(tiny_backbone, turned, Runtime(CPU)).flip(0), features)
    low = extract_features(tiny_backbone, images, Runtime(CPU, "bfloat16"))
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, features, rtol=0.1, atol=0.1)


def test_probabilities_of_a_head_use_running_statistics():
    head = ClusterHead(4, 6, 3).train()
    features = torch.randn(10, 4)
    together = head_probabilities(head, features)
    alone = np.concatenate([head_probabilities(head, row) for row in features.split(1)])
    np.testing.assert_allclose(alone, together, atol=1e-6)
    np.testing.assert_allclose(together.sum(axis=1), 1, atol=1e-6)


def test_kmeans_ignores_offset_and_length_of_features():
    directions = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))[torch.arange(30) % 3]
    features = directions * torch.rand(30, 1) * 9 + 5
    found = kmeans_assignment(features, 3, torch.Generator().manual_seed(0))
    assert all(len(set(found[start::3])) == 1 for start in range(3))
    assert torch.isfinite(standardize_rows(features)).all()
