"""Which images are shown: by hand, against a plain loop, and where there is nothing to choose from."""

from __future__ import annotations

import numpy as np
import pytest

from cdc_plugin.report.gallery.choose import (
    choose_examples,
    confusion,
    rank_pairs,
    spread_over_clusters,
    take_turns,
)


def random_predictions(
    count: int, clusters: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities (N, C), cluster, confidence and second confidence."""
    probs = np.random.default_rng(seed).dirichlet(np.full(clusters, 0.3), count).astype(np.float32)
    ordered = np.sort(probs, axis=1)
    return probs, probs.argmax(axis=1), ordered[:, -1], ordered[:, -2]


def test_each_kind_of_example_by_hand():
    cluster = np.zeros(6, dtype=np.int64)
    confidence = np.array([0.90, 0.99, 0.55, 0.40, 0.48, 0.80])
    second = np.array([0.06, 0.01, 0.40, 0.10, 0.45, 0.15])
    (found,) = choose_examples(cluster, confidence, second, 1, 2)
    assert found.typical == [1, 0]
    assert found.borderline == [4, 2]  # margins .03 and .15
    assert found.doubtful == [3, 5]  # .40; .48 and .55 are among the borderline already


@pytest.mark.parametrize("clusters", [2, 7])
def test_the_kinds_are_disjoint_and_of_their_own_cluster(clusters):
    _, cluster, confidence, second = random_predictions(300, clusters)
    for number, found in enumerate(choose_examples(cluster, confidence, second, clusters, 5)):
        every = found.typical + found.borderline + found.doubtful
        assert len(set(every)) == len(every) == 15
        assert set(cluster[every]) == {number}


def test_the_first_of_each_kind_is_the_extreme_one():
    _, cluster, confidence, second = random_predictions(500, 4)
    for number, found in enumerate(choose_examples(cluster, confidence, second, 4, 3, distance=-confidence)):
        own = np.flatnonzero(cluster == number)
        between = own[second[own] >= 0.05]
        assert found.typical[0] == own[np.argmax(confidence[own])]
        assert found.borderline[0] == between[np.argmin((confidence - second)[between])]
        lowest = own[np.argmin(confidence[own])]
        assert lowest in (found.doubtful[0], found.borderline[0])


@pytest.mark.parametrize(
    ("size", "kinds"), [(0, (0, 0, 0)), (1, (1, 0, 0)), (2, (1, 1, 0)), (3, (1, 1, 1)), (5, (2, 2, 1))]
)
def test_a_small_cluster_is_shared_out(size, kinds):
    cluster = np.zeros(size, dtype=np.int64)
    found = choose_examples(cluster, np.full(size, 0.6), np.full(size, 0.4), 2, 4)[0]
    assert (len(found.typical), len(found.borderline), len(found.doubtful)) == kinds


def test_nothing_is_doubtful_where_every_image_is_certain():
    count = 1000
    found = choose_examples(np.zeros(count, dtype=np.int64), np.ones(count), np.zeros(count), 1, 4)[0]
    assert found.borderline == found.doubtful == []
    assert len(set(found.typical)) == 4
    assert max(found.typical) - min(found.typical) > count // 2  # from all over the data


def test_equally_sure_images_go_by_their_distance():
    distance = np.array([5.0, 1.0, 3.0, 2.0, 0.0])
    confidence = np.array([0.9999, 0.9998, 1.0, 0.9997, 0.97])
    found = choose_examples(np.zeros(5, dtype=np.int64), confidence, np.zeros(5), 1, 3, distance=distance)[0]
    assert found.typical == [1, 3, 2]


def test_near_duplicates_are_typical_once_and_again_only_where_there_is_nothing_else():
    looks = np.array([[0.0], [1.0], [100.0], [101.0], [50.0]])
    confidence = np.array([0.999, 0.998, 0.997, 0.996, 0.995])
    zeros = np.zeros(5, dtype=np.int64)

    def typical(count: int) -> list[int]:
        return choose_examples(zeros, confidence, np.zeros(5), 1, count, fingerprint=lambda i: looks[i])[0].typical

    assert typical(3) == [0, 2, 4]
    assert typical(4) == [0, 2, 4, 1]


def test_few_images_are_looked_at_where_none_is_a_copy():
    seen = []

    def look(index: int) -> np.ndarray:
        seen.append(index)
        return np.array([10.0 * index])

    choose_examples(np.zeros(1000, dtype=np.int64), np.ones(1000), np.zeros(1000), 1, 4, fingerprint=look)
    assert len(seen) == 4


def test_the_choice_does_not_depend_on_the_order_of_the_images():
    _, cluster, confidence, second = random_predictions(400, 5)
    shuffle = np.random.default_rng(1).permutation(400)
    plain = choose_examples(cluster, confidence, second, 5, 3, distance=-confidence)
    mixed = choose_examples(cluster[shuffle], confidence[shuffle], second[shuffle], 5, 3, distance=-confidence[shuffle])
    for one, other in zip(plain, mixed, strict=True):
        assert one.typical == shuffle[other.typical].tolist()
        assert one.borderline == shuffle[other.borderline].tolist()


def test_confusion_by_hand():
    probs = np.array([[0.6, 0.4, 0], [0.9, 0, 0.1], [0.3, 0.7, 0]], dtype=np.float32)
    expected = [[1.5, 0.4, 0.1], [0.3, 0.7, 0], [0, 0, 0]]
    np.testing.assert_allclose(confusion(np.array([0, 0, 1]), probs), expected, atol=1e-6)


def test_confusion_agrees_with_a_plain_loop_and_counts_every_image():
    probs, cluster, _, _ = random_predictions(400, 6)
    plain = np.zeros((6, 6))
    for row, own in zip(probs.astype(np.float64), cluster, strict=True):
        plain[own] += row
    found = confusion(cluster, probs)
    np.testing.assert_allclose(found, plain, atol=1e-9)
    assert found.sum() == pytest.approx(400, rel=1e-6)


def test_pairs_add_both_directions_and_come_most_confused_first():
    expected = np.array([[90.0, 2.0, 5.0], [3.0, 80.0, 9.0], [1.0, 2.0, 70.0]])
    assert rank_pairs(expected, np.array([97, 92, 73]), 9) == [(1, 2, 11.0), (0, 2, 6.0), (0, 1, 5.0)]
    assert rank_pairs(expected, np.array([97, 92, 73]), 1) == [(1, 2, 11.0)]


def test_pairs_below_one_image_or_one_per_cent_are_left_out():
    def pair(images: float, size: int) -> list:
        return rank_pairs(np.array([[size, images], [0.0, size]]), np.array([size, size]), 9)

    assert pair(0.99, 10) == []
    assert pair(1.0, 10) == [(0, 1, 1.0)]
    assert pair(19.9, 1000) == []
    assert pair(20.0, 1000) == [(0, 1, 20.0)]


def test_the_best_of_every_cluster_comes_before_the_second_best_of_any():
    cluster = np.array([0, 0, 0, 1, 1, 2])
    score = np.array([9.0, 8.0, 7.0, 1.0, 2.0, 5.0])
    assert spread_over_clusters(np.arange(6), score, cluster).tolist() == [0, 5, 4, 1, 3, 2]
    assert spread_over_clusters(np.array([2, 3]), score, cluster).tolist() == [2, 3]
    assert spread_over_clusters(np.array([], dtype=np.int64), score, cluster).tolist() == []


def test_orders_take_turns_and_no_image_is_taken_twice():
    assert take_turns([[1, 2, 3], [1, 3, 5], []], 9, 9) == [[1, 2], [3, 5], []]
    assert take_turns([[1, 2, 3], [1, 3, 5]], 3, 9) == [[1, 2], [3]]
    assert take_turns([[1, 2, 3, 4], [5]], 9, 2) == [[1, 2], [5]]
    assert take_turns([[1], [2]], 0, 9) == [[], []]
