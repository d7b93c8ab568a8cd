import numpy as np
import pytest
import torch

from cdc_plugin.core.selection import selections
from cdc_plugin.core.selection.base import SelectionInput, Selector
from cdc_plugin.core.selection.thresholds import (
    FlexMatch,
    FreeMatch,
    adaptive_thresholds,
    curriculum_thresholds,
    remember,
    select_above,
)
from tests.helpers import random_probs

ALL = ["fixed", "flexmatch", "freematch"]


def seen_of(probs: torch.Tensor, rows: torch.Tensor | None = None) -> SelectionInput:
    return SelectionInput(probs, torch.arange(len(probs)) if rows is None else rows, probs, probs)


def make(name: str, images: int, clusters: int, threshold: float = 0.8, momentum: float = 0.9) -> Selector:
    return selections.get(name)(images, clusters, threshold, momentum, torch.device("cpu"))


class FlexMatchByLoops:
    """The paper's algorithm with dictionaries and plain numbers."""

    def __init__(self, images: int, clusters: int, threshold: float) -> None:
        self.memory = dict.fromkeys(range(images), -1)
        self.clusters, self.threshold = clusters, threshold

    def __call__(self, probs: np.ndarray, rows: list[int]) -> list[bool]:
        counts = [sum(label == c for label in self.memory.values()) for c in range(self.clusters)]
        unused = sum(label == -1 for label in self.memory.values())
        asked = []
        for count in counts:
            beta = count / max(*counts, unused)
            asked.append(self.threshold * beta / (2 - beta))
        mask = []
        for sample, row in zip(probs, rows, strict=True):
            label = int(sample.argmax())
            mask.append(bool(sample[label] >= asked[label]))
            if sample[label] >= self.threshold:
                self.memory[row] = label
        return mask


class FreeMatchByLoops:
    """The paper's averages as plain numbers."""

    def __init__(self, clusters: int, momentum: float) -> None:
        self.level, self.shares, self.momentum = 1 / clusters, [1 / clusters] * clusters, momentum

    def __call__(self, probs: np.ndarray) -> list[bool]:
        batch = len(probs)
        self.level = self.momentum * self.level + (1 - self.momentum) * sum(max(row) for row in probs) / batch
        for c in range(len(self.shares)):
            mean = sum(row[c] for row in probs) / batch
            self.shares[c] = self.momentum * self.shares[c] + (1 - self.momentum) * mean
        asked = [share / max(self.shares) * self.level for share in self.shares]
        return [bool(max(row) >= asked[int(row.argmax())]) for row in probs]


def test_a_sample_that_just_reaches_the_threshold_is_trusted():
    probs = torch.tensor([[0.8, 0.2], [0.79, 0.21], [0.1, 0.9], [0.5, 0.5]])
    selector = make("fixed", 4, 2)
    selection = selector(seen_of(probs))
    assert selector.state == {}
    assert selection.mask.tolist() == [True, False, True, False]
    assert selection.labels.tolist() == [0, 0, 1, 0]
    assert selection.quota.tolist() == [1, 1]
    assert select_above(probs, torch.tensor([0.6, 0.95])).mask.tolist() == [True, True, False, False]


def test_curriculum_asks_less_of_clusters_that_are_little_learnt():
    learned = torch.tensor([0, 0, 0, 0, 1, 1, -1, -1, -1])
    # Counts 4, 2, 0, and 3 without a label: beta 1, 1/2, 0; beta / (2 - beta) is 1, 1/3, 0.
    expected = torch.tensor([0.9, 0.3, 0.0])
    torch.testing.assert_close(curriculum_thresholds(learned, 3, 0.9), expected)
    learned = torch.tensor([0, 0, 1, -1, -1, -1, -1, -1])
    # It warms up: 5 without a label are more than the 2 of cluster 0: beta 2/5, 1/5; mapped 2/8, 1/9.
    expected = 0.9 * torch.tensor([1 / 4, 1 / 9])
    torch.testing.assert_close(curriculum_thresholds(learned, 2, 0.9), expected)


def test_memory_changes_only_where_an_image_is_sure():
    learned = torch.tensor([-1, 2, 1, -1, 0])
    probs = torch.tensor([[0.9, 0.1, 0.0], [0.3, 0.4, 0.3], [0.0, 0.2, 0.8]])
    after = remember(learned, torch.tensor([3, 1, 2]), probs, 0.8)
    assert after.tolist() == [-1, 2, 2, 0, 0]
    assert learned.tolist() == [-1, 2, 1, -1, 0]  # the old one is still what it was


def test_adaptive_thresholds_are_the_level_of_the_largest_cluster_and_lower_for_others():
    asked = adaptive_thresholds(torch.tensor(0.6), torch.tensor([0.5, 0.25, 0.25]))
    torch.testing.assert_close(asked, torch.tensor([0.6, 0.3, 0.3]))


def test_flexmatch_trusts_everything_at_first_and_counts_a_batch_only_afterwards():
    selector = FlexMatch(4, 2, threshold=0.8, momentum=0.0, device=torch.device("cpu"))
    probs = torch.tensor([[0.9, 0.1], [0.85, 0.15], [0.55, 0.45], [0.45, 0.55]])
    assert selector(seen_of(probs)).mask.all()
    assert selector.state["learned"].tolist() == [0, 0, -1, -1]
    # Cluster 0: beta = 2 / max(2, 2), so .8 is asked for; cluster 1: nothing yet.
    assert selector(seen_of(probs)).mask.tolist() == [True, True, False, True]


def test_freematch_counts_the_batch_itself():
    selector = FreeMatch(4, 2, threshold=0.0, momentum=0.5, device=torch.device("cpu"))
    probs = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.55, 0.45], [0.35, 0.65]])
    selection = selector(seen_of(probs))
    # Mean confidence .7, mean probabilities .625 and .375; averaged with 1/2: .6 and (.5625, .4375).
    torch.testing.assert_close(selector.state["level"], torch.tensor(0.6))
    torch.testing.assert_close(selector.state["shares"], torch.tensor([0.5625, 0.4375]))
    # Thresholds .6 and .4375 / .5625 * .6 = .467.
    assert selection.mask.tolist() == [True, True, False, True]
    assert selection.labels.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("threshold", [0.6, 0.9])
@pytest.mark.parametrize("clusters", [3, 10])
def test_flexmatch_agrees_with_plain_loops_over_epochs(clusters, threshold):
    images = 60
    selector, oracle = make("flexmatch", images, clusters, threshold), FlexMatchByLoops(images, clusters, threshold)
    for epoch in range(3):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch))
        for number, rows in enumerate(order.split(20)):
            probs = random_probs(20, clusters, 10 * epoch + number, sharpness=1.0 + epoch)
            selection = selector(seen_of(probs, rows))
            assert selection.mask.tolist() == oracle(probs.double().numpy(), rows.tolist())
            assert torch.equal(selection.labels, probs.argmax(dim=1))
    assert selector.state["learned"].tolist() == list(oracle.memory.values())


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999])
def test_freematch_agrees_with_plain_loops_over_batches(momentum):
    selector, oracle = make("freematch", 60, 5, momentum=momentum), FreeMatchByLoops(5, momentum)
    for number in range(6):
        probs = random_probs(40, 5, number, sharpness=0.5 + number)
        assert selector(seen_of(probs)).mask.tolist() == oracle(probs.double().numpy())
    torch.testing.assert_close(selector.state["shares"], torch.tensor(oracle.shares, dtype=torch.float32))


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_samples_and_the_numbers_of_clusters_do_not_matter(name):
    one, other = make(name, 50, 6), make(name, 50, 6)
    clusters = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    for seed in range(4):
        probs = random_probs(50, 6, seed)
        samples = torch.randperm(50, generator=torch.Generator().manual_seed(seed))
        selection, shuffled = one(seen_of(probs)), other(seen_of(probs[samples][:, clusters], samples))
        assert torch.equal(shuffled.mask, selection.mask[samples])
        assert torch.equal(shuffled.quota, selection.quota[clusters])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("batch", "clusters"), [(50, 6), (4, 9)])
def test_quota_is_the_number_of_trusted_samples_of_each_cluster(name, batch, clusters):
    selector = make(name, batch, clusters)
    for seed in range(3):
        selection = selector(seen_of(random_probs(batch, clusters, seed)))
        trusted = torch.bincount(selection.labels[selection.mask], minlength=clusters)
        assert torch.equal(selection.quota, trusted)


@pytest.mark.parametrize("name", ALL)
def test_an_empty_cluster_gives_no_nan(name):
    probs = torch.zeros(12, 3)
    probs[:, 1] = 1.0
    selector = make(name, 12, 3)
    for _ in range(3):
        selection = selector(seen_of(probs))
        assert selection.mask.all()
        assert selection.quota.tolist() == [0, 12, 0]
    assert all(torch.isfinite(value).all() for value in selector.state.values())


@pytest.mark.parametrize("name", ["flexmatch", "freematch"])
def test_a_selector_goes_on_from_a_saved_state(name):
    straight, first, second = make(name, 40, 5), make(name, 40, 5), make(name, 40, 5)
    batches = [seen_of(random_probs(40, 5, seed)) for seed in range(6)]
    for seen in batches[:3]:
        straight(seen)
        first(seen)
    saved = dict(first.state)
    first(batches[3])  # what was saved must not change with what goes on
    second.state.update({key: value.clone() for key, value in saved.items()})
    for seen in batches[3:]:
        assert torch.equal(second(seen).mask, straight(seen).mask)
    assert second.state.keys() == straight.state.keys()
    assert all(torch.equal(second.state[key], value) for key, value in straight.state.items())
