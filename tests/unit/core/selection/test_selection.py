import numpy as np
import pytest
import torch

from cdc_plugin.core.selection import _top_samples, make_selector, select_confident, select_confident_column
from cdc_plugin.core.selection.base import SelectionInput
from cdc_plugin.errors import ConfigError
from tests.helpers import random_probs

BOTH = [select_confident, select_confident_column]


def by_loops(probs: np.ndarray, by_column: bool, shares: list[float] | None = None) -> tuple[list[bool], list[int]]:
    """Sec. 3.2 word by word: lists, sums, floors."""
    batch, clusters = probs.shape
    mask, quota = [False] * batch, []
    for cluster in range(clusters):
        depth = batch // clusters if shares is None else max(1, round(batch * shares[cluster]))
        ranked = sorted(range(batch), key=lambda sample: (-probs[sample, cluster], sample))[:depth]
        mass = sum(float(probs[s, cluster] if by_column else probs[s].max()) for s in ranked)
        quota.append(int(mass + 1e-5) if abs(mass - round(mass)) < 1e-5 else int(mass))
        for sample in ranked[: quota[-1]]:
            mask[sample] = True
    return mask, quota


def test_unsure_cluster_contributes_fewer_samples():
    sure, unsure = [[0.99, 0.01]] * 4, [[0.4, 0.6]] * 4
    selection = select_confident(torch.tensor(sure + unsure))
    assert selection.quota.tolist() == [3, 2]  # floor(4 * .99), floor(4 * .6)
    assert selection.labels.tolist() == [0] * 4 + [1] * 4
    # Equal probabilities are taken in the order of the samples.
    assert selection.mask.tolist() == [True, True, True, False, True, True, False, False]


def test_readings_of_the_equation_part_where_a_cluster_is_nearly_empty():
    probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.2, 0.8]])
    # Cluster 1 lists samples 3 and 0: confidences .8 + .9, but probabilities of cluster 1 .8 + .1.
    assert select_confident(probs).quota.tolist() == [1, 1]
    assert select_confident_column(probs).quota.tolist() == [1, 0]


@pytest.mark.parametrize(("batch", "clusters"), [(60, 10), (61, 10), (20, 2), (50, 50), (37, 3)])
@pytest.mark.parametrize("select", BOTH)
def test_selection_agrees_with_plain_loops(select, batch, clusters):
    for seed in range(5):
        probs = random_probs(batch, clusters, seed)
        selection = select(probs)
        mask, quota = by_loops(probs.numpy(), by_column=select is select_confident_column)
        assert selection.quota.tolist() == quota
        assert selection.mask.tolist() == mask
        assert torch.equal(selection.labels, probs.argmax(dim=1))


@pytest.mark.parametrize("shares", [[0.5, 0.32, 0.17, 0.01], [0.97, 0.01, 0.01, 0.01]])
@pytest.mark.parametrize("select", BOTH)
def test_clusters_of_estimated_sizes_are_selected_from_by_their_shares(select, shares):
    for seed in range(5):
        probs = random_probs(61, 4, seed)
        selection = select(probs, torch.tensor(shares))
        mask, quota = by_loops(probs.numpy(), select is select_confident_column, shares)
        assert selection.quota.tolist() == quota
        assert selection.mask.tolist() == mask


@pytest.mark.parametrize("select", BOTH)
def test_equal_shares_select_as_none_do(select):
    probs = random_probs(60, 4)
    assert torch.equal(select(probs, torch.full((4,), 0.25)).mask, select(probs).mask)


@pytest.mark.parametrize("select", BOTH)
def test_the_order_of_samples_and_the_numbers_of_clusters_do_not_matter(select):
    probs = random_probs(80, 8)
    samples, clusters = (torch.randperm(n, generator=torch.Generator().manual_seed(1)) for n in (80, 8))
    other = select(probs[samples][:, clusters])
    assert torch.equal(other.mask, select(probs).mask[samples])
    assert torch.equal(other.quota, select(probs).quota[clusters])


@pytest.mark.parametrize("select", BOTH)
def test_sure_batches_are_trusted_whole_unsure_ones_not_and_no_quota_exceeds_its_list(select):
    sure, unsure = select(torch.eye(5).repeat(6, 1)), select(torch.full((20, 20), 1 / 20))
    assert (sure.quota.tolist(), sure.mask.all()) == ([6] * 5, True)
    assert (unsure.quota.tolist(), unsure.mask.any()) == ([0] * 20, False)
    collapsed = select(torch.eye(3)[[1] * 12])
    assert collapsed.labels.tolist() == [1] * 12
    assert int(collapsed.quota.max()) <= 4


@pytest.mark.parametrize("select", BOTH)
def test_more_clusters_than_images_in_a_batch_are_refused_with_advice(select):
    with pytest.raises(ConfigError, match=r"batch of 4 images .* 5 clusters; pass batch_size=10 or more"):
        select(random_probs(4, 5))


@pytest.mark.parametrize(
    ("name", "select"), [("confident", select_confident), ("confident-column", select_confident_column)]
)
def test_selectors_give_what_their_functions_give_and_remember_nothing(name, select):
    selector = make_selector(name, 100, 8, threshold=0.95, momentum=0.9, device=torch.device("cpu"))
    for seed in range(2):
        probs = random_probs(80, 8, seed)
        selection, expected = selector(SelectionInput(probs, torch.arange(80), probs, probs)), select(probs)
        assert torch.equal(selection.labels, expected.labels)
        assert torch.equal(selection.mask, expected.mask)
        assert torch.equal(selection.quota, expected.quota)
    assert selector.state == {}


@pytest.mark.parametrize("clusters", [2, 10, 60])
@pytest.mark.parametrize("levels", [3, 50, 10**6])
def test_the_best_samples_are_those_of_a_stable_sort_with_and_without_ties(clusters, levels, randomness):
    probs = torch.randint(1, levels + 1, (300, clusters), generator=randomness).float()
    probs /= levels * clusters
    whole = probs.sort(dim=0, descending=True, stable=True).indices[: 300 // clusters]
    assert torch.equal(_top_samples(probs), whole)


def test_a_large_set_is_sorted_in_parts_with_the_same_outcome(monkeypatch):
    probs = random_probs(200, 7).mul(8).round().div(8)  # with ties
    whole = select_confident(probs)
    monkeypatch.setattr("cdc_plugin.core.selection.AT_ONCE", 400)
    parts = select_confident(probs)
    assert torch.equal(whole.mask, parts.mask)
    assert torch.equal(whole.quota, parts.quota)
