"""The draw: every image with the same chance, one a stratum, and bounds that hold whatever is right."""

import functools
import itertools

import numpy as np
import pytest

from cdc_plugin.evaluation.audit.read import compute_accuracy_bound, compute_accuracy_interval
from cdc_plugin.evaluation.audit.sample import draw_pivotal, draw_rows


def exact_distribution(right: list[int] | np.ndarray, count: int) -> np.ndarray:
    """Chance of 0 ... count right images in a pivotal sample, by going through every duel: no simulation."""
    images, share = len(right), 0
    states = {0: np.eye(1, count + 1)[0], 1: np.zeros(count + 1)}  # by whether the image in play is right
    for here in right:
        together = share + count
        after = {0: np.zeros(count + 1), 1: np.zeros(count + 1)}
        for playing, chances in states.items():
            if together < images:
                after[playing] += chances * (1 - count / together)
                after[here] += chances * count / together
            else:
                first = (images - count) / (2 * images - together)
                after[here] += first * np.concatenate([np.zeros(playing), chances])[: count + 1]
                after[playing] += (1 - first) * np.concatenate([np.zeros(here), chances])[: count + 1]
        states, share = after, together if together < images else together - images
    return states[0] + states[1]


def chance_to_miss(right: list[int] | np.ndarray, count: int) -> tuple[float, float]:
    """How often the one-sided bound and the interval leave out the accuracy of all images."""
    truth, chances = float(np.mean(right)), exact_distribution(right, count)
    least, low, high = bounds_of(count)
    outside = (low > truth + 1e-9) | (high < truth - 1e-9)
    return float(chances[least > truth + 1e-9].sum()), float(chances[outside].sum())


@functools.cache
def bounds_of(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The one-sided bound and both ends of the interval for 0 ... count right answers."""
    ends = [compute_accuracy_interval(right, count) for right in range(count + 1)]
    least = [compute_accuracy_bound(right, count) for right in range(count + 1)]
    return np.array(least), np.array(ends)[:, 0], np.array(ends)[:, 1]


@pytest.mark.parametrize(("images", "count"), [(1, 1), (10, 1), (12, 4), (13, 4), (13, 12), (100, 99), (7, 7)])
def test_so_many_different_images_are_drawn(images, count):
    for seed in range(20):
        drawn = draw_pivotal(images, count, np.random.default_rng(seed))
        assert len(drawn) == count == len(set(drawn.tolist()))
        assert set(drawn.tolist()) <= set(range(images))


def test_one_image_of_every_stratum_is_drawn_and_all_where_more_are_asked_for():
    assert sorted(draw_rows(np.linspace(0, 1, 7), None, 50, 0)) == list(range(7))
    confidence = np.random.default_rng(0).random(60)
    rank = np.empty(60, dtype=int)
    rank[np.argsort(-confidence)] = np.arange(60)
    for seed in range(20):
        assert sorted(rank[draw_rows(confidence, None, 12, seed)] // 5) == list(range(12))


def test_selected_images_are_drawn_by_their_share():
    selected = np.arange(100) % 4 == 0  # as little to do with confidence as can be
    for seed in range(20):
        assert selected[draw_rows(np.linspace(0, 1, 100), selected, 20, seed)].sum() == 5


def test_every_image_is_drawn_as_often_as_any_other_although_the_strata_have_no_whole_size():
    draws = np.concatenate([draw_pivotal(7, 3, np.random.default_rng(seed)) for seed in range(4000)])
    share = np.bincount(draws, minlength=7) / 4000
    assert np.abs(share - 3 / 7).max() < 4 * np.sqrt(3 / 7 * 4 / 7 / 4000)


def test_the_same_seed_gives_the_same_draw_and_another_seed_another():
    confidence = np.round(np.random.default_rng(0).random(200), 1)  # with ties
    first, again, other = (draw_rows(confidence, None, 20, seed).tolist() for seed in (3, 3, 4))
    assert first == again != other


def test_the_order_of_the_questions_tells_nothing_of_the_confidence():
    confidence = np.linspace(0, 1, 1000)
    in_order = [
        np.corrcoef(np.arange(50), confidence[draw_rows(confidence, None, 50, seed)])[0, 1] for seed in range(40)
    ]
    assert abs(np.mean(in_order)) < 4 / np.sqrt(50 * 40)


def test_the_exact_distribution_is_that_of_the_draw():
    right = np.array([1, 0, 0, 1, 1, 0, 1])
    counts = [right[draw_pivotal(7, 3, np.random.default_rng(seed))].sum() for seed in range(4000)]
    found = np.bincount(counts, minlength=4) / 4000
    assert np.abs(found - exact_distribution(right, 3)).max() < 0.03


@pytest.mark.parametrize(("images", "count"), [(7, 3), (8, 6), (9, 4)])
def test_right_images_count_as_a_sum_of_independent_ones_whatever_is_right(images, count):
    """All roots of the generating polynomial are real, which is what Hoeffding's theorem needs; the mean is fair."""
    for right in itertools.product([0, 1], repeat=images):
        chances = exact_distribution(right, count)
        assert chances @ np.arange(count + 1) == pytest.approx(count * np.mean(right))
        kept = np.trim_zeros(np.where(chances < 1e-14, 0, chances))
        roots = np.roots(kept[::-1])
        assert np.all(np.abs(roots.imag) <= 1e-3 * (1 + np.abs(roots)))
        one_sided, two_sided = chance_to_miss(right, count)
        assert one_sided <= 0.05
        assert two_sided <= 0.05


@pytest.mark.parametrize(("images", "count"), [(300, 60), (317, 40), (90, 80)])
@pytest.mark.parametrize("kind", ["calibrated", "over-confident", "unrelated"])
def test_bounds_hold_in_95_percent_of_audits(images, count, kind):
    randomness = np.random.default_rng(1)
    confidence = np.sort(randomness.beta(4, 1, images))[::-1]
    chance = {"calibrated": confidence, "over-confident": confidence**4, "unrelated": np.full(images, 0.7)}[kind]
    one_sided, two_sided = chance_to_miss((randomness.random(images) < chance).astype(int), count)
    assert one_sided <= 0.05
    assert two_sided <= 0.05


def test_bounds_hold_in_simulated_audits_also_for_the_selected_images():
    randomness = np.random.default_rng(2)
    confidence = randomness.beta(3, 1, 150)
    right, selected = randomness.random(150) < confidence**2, confidence > 0.8
    missed = missed_selected = 0
    for seed in range(400):
        drawn = draw_rows(confidence, selected, 40, seed)
        kept = drawn[selected[drawn]]
        missed += compute_accuracy_bound(int(right[drawn].sum()), 40) > right.mean()
        missed_selected += compute_accuracy_bound(int(right[kept].sum()), len(kept)) > right[selected].mean()
    assert missed / 400 <= 0.05
    assert missed_selected / 400 <= 0.05


def test_the_stated_exception_is_as_small_as_stated():
    """One right image in 1,000: it is drawn in 5.1 % of the audits of 51, and the bound then lies above 1 / 1,000."""
    one_sided, _ = chance_to_miss([1] + [0] * 999, 51)
    assert one_sided == pytest.approx(0.051)
    assert one_sided <= -np.log(0.95)
    assert 0.001 < 1 - 0.95 ** (1 / 51)  # so the accuracy is below the limit that the condition names
