import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cdc_plugin.core.selection import Confident, addons, check_selection, make_selector, select_confident
from cdc_plugin.core.selection.addons import (
    MODERATE,
    SYNCHRONOUS,
    Extended,
    gradient_similarity,
    gradient_synchronisation,
    prototype_proximity,
    prototype_similarity,
)
from cdc_plugin.core.selection.base import Selection, SelectionInput
from cdc_plugin.core.selection.thresholds import FlexMatch
from cdc_plugin.errors import ConfigError

BOTH = [gradient_synchronisation, prototype_proximity]
CPU = torch.device("cpu")
THIRD = list(range(0, 60, 3))  # every third sample of a random batch


def direction(degrees: float) -> list[float]:
    return [math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]


def trusting(probs: torch.Tensor, trusted: list[int]) -> Selection:
    mask = torch.zeros(len(probs), dtype=torch.bool)
    mask[trusted] = True
    labels = probs.argmax(dim=1)
    return Selection(labels, mask, torch.bincount(labels[mask], minlength=probs.shape[1]))


def random_batch(batch: int = 60, clusters: int = 5, seed: int = 0) -> tuple[SelectionInput, torch.Tensor]:
    """Groups that are near enough for the filters to admit some samples and refuse others; also the weights."""
    random = torch.Generator().manual_seed(seed)
    weights = torch.randn(clusters, 8, generator=random)
    kinds = torch.randint(clusters, (batch,), generator=random)
    hidden = F.normalize(weights, dim=1)[kinds] + 0.15 * torch.randn(batch, 8, generator=random)
    features = F.normalize(weights, dim=1)[kinds] + 0.3 * torch.randn(batch, 8, generator=random)
    return SelectionInput(F.softmax(hidden @ weights.T, dim=1), torch.arange(batch), features, hidden), weights


def admitted_by_loops(
    selection: Selection, seen: SelectionInput, vectors: np.ndarray, asked: float | None
) -> list[bool]:
    """Means of unit vectors, cosines and comparisons, a sample at a time; ``asked=None``: the farthest trusted."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    labels, mask = selection.labels.tolist(), selection.mask.tolist()
    admitted = []
    for sample in range(len(unit)):
        friends = [j for j in range(len(unit)) if mask[j] and labels[j] == labels[sample]]
        if mask[sample] or not friends or float(seen.probs[sample].max()) <= MODERATE:
            admitted.append(False)
            continue
        mean = sum(unit[j] for j in friends)
        cosines = {j: float(unit[j] @ mean / np.linalg.norm(mean)) for j in [*friends, sample]}
        least = min(cosines[j] for j in friends) if asked is None else asked
        admitted.append(cosines[sample] >= least)
    return admitted


def test_prototype_filter_admits_what_is_nearer_than_the_farthest_trusted_sample():
    sure, unsure, other = [0.8, 0.2], [0.7, 0.3], [0.2, 0.8]
    probs = torch.tensor([sure, sure, sure, sure, unsure, other])
    # The prototype of cluster 0 points to 0 degrees, both trusted samples are 20 degrees away.
    features = torch.tensor([direction(angle) for angle in (-20, 20, 10, 30, 10, 10)]) * 3
    selection = trusting(probs, [0, 1])
    after = prototype_proximity(selection, SelectionInput(probs, torch.arange(6), features, features))
    # Refused: one farther away, one less than moderately confident, one of a cluster where nothing is trusted.
    assert after.mask.tolist() == [True, True, True, False, False, False]
    assert after.quota.tolist() == [3, 0]
    assert selection.mask.tolist() == [True, True] + [False] * 4


def test_gradient_filter_admits_what_pulls_the_same_way():
    probs = torch.tensor([[0.8, 0.1, 0.1]] * 4 + [[0.76, 0.12, 0.12], [0.8, 0.2, 0.0], [0.1, 0.8, 0.1]])
    # Inputs of the trusted samples lie at -20 and 20 degrees, so their mean gradient has its input at 0.
    hidden = torch.tensor([direction(angle) for angle in (-20, 20, 20, 30, 5, 0, 0)])
    selection = trusting(probs, [0, 1])
    similarity = gradient_similarity(selection, probs, hidden)
    twenty, thirty, five = (math.cos(math.radians(angle)) for angle in (20, 30, 5))
    # (-1, .5, .5) and (-1, 1, 0) have the cosine 1.5 / (sqrt(1.5) sqrt(2)); (-.24, .12, .12) is parallel to the first.
    expected = [twenty, twenty, twenty, thirty, five, 1.5 / math.sqrt(3), 0.0]
    torch.testing.assert_close(similarity, torch.tensor(expected))
    after = gradient_synchronisation(selection, SelectionInput(probs, torch.arange(7), hidden, hidden))
    assert after.mask.tolist() == [True, True, True, False, True, False, False]  # .940, .866, .996, .866, 0
    assert after.quota.tolist() == [4, 0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_filters_agree_with_plain_loops_and_gradients_by_autograd(seed):
    seen, weights = random_batch(seed=seed)
    weights = weights.double().requires_grad_()
    selection = trusting(seen.probs, THIRD)
    gradients = []
    for hidden, label in zip(seen.hidden.double(), selection.labels, strict=True):
        loss = F.cross_entropy((weights @ hidden).unsqueeze(0), label.unsqueeze(0))
        gradients.append(torch.autograd.grad(loss, weights)[0].flatten())
    expected = admitted_by_loops(selection, seen, torch.stack(gradients).numpy(), SYNCHRONOUS)
    assert (gradient_synchronisation(selection, seen).mask & ~selection.mask).tolist() == expected
    expected = admitted_by_loops(selection, seen, seen.features.double().numpy(), None)
    assert (prototype_proximity(selection, seen).mask & ~selection.mask).tolist() == expected


@pytest.mark.parametrize("add", BOTH)
def test_quota_grows_by_what_is_admitted_and_nothing_is_dropped(add):
    admitted = refused = 0
    for seed in range(4):
        seen, _ = random_batch(seed=seed)
        before = trusting(seen.probs, THIRD)
        after = add(before, seen)
        new = after.mask & ~before.mask
        assert after.mask[before.mask].all()
        assert torch.equal(after.labels, before.labels)
        assert torch.equal(after.quota - before.quota, torch.bincount(after.labels[new], minlength=5))
        admitted += int(new.sum())
        refused += int((~after.mask & (seen.probs.max(dim=1).values > MODERATE)).sum())
    assert min(admitted, refused) > 20  # the batches try both answers


@pytest.mark.parametrize("add", BOTH)
def test_order_of_the_samples_and_numbers_of_the_clusters_do_not_matter(add):
    seen, _ = random_batch()
    samples = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    clusters = torch.tensor([3, 0, 4, 1, 2])
    shuffled = SelectionInput(seen.probs[samples][:, clusters], samples, seen.features[samples], seen.hidden[samples])
    one = add(trusting(seen.probs, THIRD), seen)
    other = add(
        trusting(shuffled.probs, torch.isin(samples, torch.tensor(THIRD)).nonzero().flatten().tolist()), shuffled
    )
    assert torch.equal(other.mask, one.mask[samples])
    assert torch.equal(other.quota, one.quota[clusters])


@pytest.mark.parametrize("add", BOTH)
def test_saturated_probabilities_empty_vectors_and_no_trusted_sample_admit_nothing_and_give_no_nan(add):
    probs = torch.eye(3)[[0, 0, 1, 1]]
    nothing = torch.zeros(4, 6)
    selection = trusting(probs, [0, 2])
    assert torch.equal(add(selection, SelectionInput(probs, torch.arange(4), nothing, nothing)).mask, selection.mask)
    assert torch.isfinite(gradient_similarity(selection, probs, nothing)).all()
    assert torch.isfinite(prototype_similarity(selection, nothing)).all()
    seen, _ = random_batch()
    assert not add(trusting(seen.probs, []), seen).mask.any()


def test_gradients_keep_their_direction_where_confidence_is_all_but_1():
    rest = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [0.0, 0.0, 1.0]])
    hidden = torch.ones(3, 2)
    for size in (1e-2, 1e-12, 1e-30):
        probs = rest * size
        probs[:, 0] = 1 - probs.sum(dim=1)
        similarity = gradient_similarity(trusting(probs, [0]), probs, hidden)
        # (-1, 3/4, 1/4) and (-1, 0, 1): 1.25 / (sqrt(1.625) sqrt(2)).
        torch.testing.assert_close(similarity, torch.tensor([1.0, 1.0, 1.25 / math.sqrt(3.25)]))


def test_vectors_that_cancel_have_no_direction_to_follow():
    probs = torch.tensor([[0.8, 0.2]] * 4)
    selection = trusting(probs, [0, 1, 2])
    for turn in range(0, 120, 7):  # three that cancel but for rounding, and a fourth that is like one of them
        vectors = torch.tensor([direction(turn + angle) for angle in (0, 120, 240, 0)])
        assert gradient_similarity(selection, probs, vectors).abs().max() < 0.01
    opposed = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    assert not prototype_proximity(selection, SelectionInput(probs, torch.arange(4), opposed, opposed)).mask[3]


def test_selectors_are_made_by_name():
    for name in ("confident", "confident-column", "fixed", "flexmatch", "freematch", "gsf", "freematch+gsf+ppf"):
        check_selection(name)
    assert type(make_selector("confident", 60, 5, 0.9, 0.9, CPU)) is Confident
    extended = make_selector("flexmatch+ppf", 60, 5, 0.9, 0.9, CPU)
    assert isinstance(extended, Extended)
    assert type(extended.base) is FlexMatch
    assert (extended.image_count, extended.clusters, extended.threshold, extended.momentum) == (60, 5, 0.9, 0.9)


@pytest.mark.parametrize("name", ["gsf", "ppf"])
def test_an_addon_alone_is_added_to_the_confident_selection(name):
    seen, _ = random_batch()
    expected = addons.get(name)(select_confident(seen.probs), seen)
    for spelling in (name, f"confident+{name}"):
        selection = make_selector(spelling, 60, 5, 0.9, 0.9, CPU)(seen)
        assert torch.equal(selection.mask, expected.mask)
        assert torch.equal(selection.quota, expected.quota)


def test_addons_together_admit_what_either_admits_in_any_order():
    for seed in range(4):
        seen, _ = random_batch(seed=seed)
        alone = [make_selector(name, 60, 5, 0.9, 0.9, CPU)(seen) for name in ("gsf", "ppf")]
        for name in ("confident+gsf+ppf", "confident+ppf+gsf", "gsf+ppf"):
            together = make_selector(name, 60, 5, 0.9, 0.9, CPU)(seen)
            assert torch.equal(together.mask, alone[0].mask | alone[1].mask)
            grown = together.quota - select_confident(seen.probs).quota
            assert int(grown.sum()) == int((together.mask & ~select_confident(seen.probs).mask).sum())


def test_an_extended_selection_remembers_and_restores_as_its_base_does():
    seen, _ = random_batch()
    base, extended = (make_selector(name, 60, 5, 0.6, 0.9, CPU) for name in ("flexmatch", "flexmatch+ppf"))
    base(seen)
    extended(seen)
    assert torch.equal(extended.state["learned"], base.state["learned"])
    assert (base.state["learned"] >= 0).any()
    fresh = make_selector("flexmatch+ppf", 60, 5, 0.6, 0.9, CPU)
    fresh.state.update(extended.state)
    again, _ = random_batch(seed=1)
    assert torch.equal(fresh(again).mask, extended(again).mask)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("confidant", "unknown selection 'confidant'; did you mean 'confident'"),
        ("confidant+gsf", "unknown selection 'confidant'; did you mean 'confident'"),
        ("flexmatch+gfs", "unknown selection add-on 'gfs'; did you mean 'gsf'"),
        ("confident+", "unknown selection add-on ''"),
        ("confident+freematch", "unknown selection add-on 'freematch' .*known: gsf, ppf"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name, message):
    with pytest.raises(ConfigError, match=message):
        check_selection(name)
    with pytest.raises(ConfigError, match=message):
        make_selector(name, 60, 5, 0.9, 0.9, CPU)
