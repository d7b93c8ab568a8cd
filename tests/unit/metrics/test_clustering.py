from itertools import permutations

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix

from cdc_plugin.errors import UserError
from cdc_plugin.metrics import (
    accuracy,
    adjusted_rand_index,
    contingency,
    correct_samples,
    match_clusters,
    normalized_mutual_information,
    summary_hard,
    true_columns,
)
from tests.helpers.metric_cases import softmax_table


def random_partitions(seed: int, clusters: int, classes: int, samples: int = 400):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    predicted = np.where(rng.random(samples) < 0.6, labels % clusters, rng.integers(0, clusters, samples))
    return predicted, labels


def test_matching_by_hand_prefers_the_best_total_over_the_best_single_cluster():
    predicted = [0] * 5 + [1] * 4
    labels = [3] * 3 + [8] * 2 + [3] * 4
    # Cluster 0 alone would take class 3 (3 of 5), but cluster 1 is all class 3: 2 + 4 beats 3 + 0.
    assert match_clusters(predicted, labels, 2).tolist() == [8, 3]
    assert accuracy(predicted, labels, 2) == pytest.approx(6 / 9)


def test_cluster_without_a_class_is_marked_and_counts_as_wrong():
    predicted, labels = [0, 0, 1, 2, 2], [5, 5, 5, 6, 6]
    assert match_clusters(predicted, labels, 4).tolist() == [5, -1, 6, -1]
    assert correct_samples(predicted, labels, 4).tolist() == [True, True, False, True, True]


def test_label_minus_one_is_a_class_and_fewer_clusters_than_classes_cannot_all_be_right():
    assert accuracy([0, 0, 1, 2], [-1, -1, -1, 4], 3) == pytest.approx(0.75)
    assert accuracy([0, 0, 1, 1], [0, 1, 2, 2], 2) == pytest.approx(0.75)


@pytest.mark.parametrize(("clusters", "classes"), [(10, 10), (4, 9), (9, 4), (1, 5), (5, 1), (1, 1)])
def test_scores_agree_with_scikit_learn(clusters, classes):
    predicted, labels = random_partitions(clusters * 31 + classes, clusters, classes)
    assert (contingency(predicted, labels) == contingency_matrix(labels, predicted).T).all()
    nmi = normalized_mutual_info_score(labels, predicted)
    assert normalized_mutual_information(predicted, labels) == pytest.approx(nmi, abs=1e-9)
    ari = adjusted_rand_score(labels, predicted)
    assert adjusted_rand_index(predicted, labels) == pytest.approx(ari, abs=1e-9)


def test_accuracy_equals_the_best_over_all_permutations():
    predicted, labels = random_partitions(3, 5, 5, samples=60)
    best = max(np.mean(np.array(order)[predicted] == labels) for order in permutations(range(5)))
    assert accuracy(predicted, labels, 5) == pytest.approx(best)


def test_scores_do_not_change_when_clusters_are_renumbered_and_labels_renamed():
    predicted, labels = random_partitions(5, 6, 6)
    order = np.random.default_rng(1).permutation(6)
    names = np.array([900, -4, 17, 0, 23, 6])
    before = summary_hard(predicted, labels, 6)
    assert summary_hard(order[predicted], names[labels], 6) == pytest.approx(before, abs=1e-12)


def test_all_right_is_one_and_no_case_gives_nan():
    labels = np.arange(12) % 3
    assert summary_hard(labels, labels, 3) == pytest.approx({"ACC": 1, "NMI": 1, "ARI": 1})
    for predicted, truth, clusters in [([0], [0], 1), ([0], [4], 3), ([0, 0], [0, 1], 1), ([0, 1], [0, 0], 2)]:
        assert np.isfinite(list(summary_hard(predicted, truth, clusters).values())).all()


def test_pair_counts_of_many_samples_do_not_overflow():
    labels = np.zeros(300_000, dtype=np.int64)
    labels[:100_000] = 1
    predicted = labels.copy()
    predicted[:30_000] = 0
    assert adjusted_rand_index(predicted, labels) == pytest.approx(adjusted_rand_score(labels, predicted))


def test_true_columns_by_hand_with_classes_that_have_no_cluster_and_the_reverse():
    probs = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6], [0.6, 0.4], [0.6, 0.4]])
    # Class 7 is cluster 0, class 5 is cluster 1; classes 6 and 8 are left and get numbers after the last column.
    assert true_columns(probs, [7, 7, 5, 5, 6, 8]).tolist() == [0, 0, 1, 1, 2, 3]
    assert true_columns(np.eye(4)[[2, 2, 1, 3]], [8, 8, 8, 4]).tolist() == [2, 2, 2, 3]
    # More right samples outweigh any probability: as numbered three are right, with 1.55; else two, with 3.45.
    probs = np.array([[0.51, 0.49]] * 3 + [[0.99, 0.01]] * 2)
    assert true_columns(probs, [0, 0, 0, 1, 1]).tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(("clusters", "classes"), [(5, 5), (3, 5), (5, 3)])
def test_true_columns_are_the_best_over_all_matchings(clusters, classes):
    for seed in range(5):
        # So few samples that several matchings make the most right; the one with the most probability counts.
        probs, labels = softmax_table(seed, 12, clusters, classes)
        padded = np.hstack([probs, np.zeros((12, max(0, classes - clusters)))])
        right = padded.argmax(axis=1)

        def quality(columns, padded=padded, right=right):
            return (columns == right).sum(), padded[np.arange(12), columns].sum()

        best = max(quality(np.array(order)[labels]) for order in permutations(range(padded.shape[1]), classes))
        assert quality(true_columns(probs, labels)) == pytest.approx(best)


def test_right_by_columns_is_right_by_matching():
    for clusters, classes in [(10, 10), (4, 9), (9, 4)]:
        probs, labels = softmax_table(3, 500, clusters, classes)
        predicted = probs.argmax(axis=1)
        assert ((predicted == true_columns(probs, labels)) == correct_samples(predicted, labels, clusters)).all()


def test_bad_input_is_refused_in_words():
    with pytest.raises(UserError, match="one length"):
        contingency([0, 1], [0, 1, 2])
    with pytest.raises(UserError, match="at least one sample"):
        accuracy([], [], 2)
    with pytest.raises(UserError, match="0 to 1 for clusters=2; found 0 to 2"):
        accuracy([0, 2], [0, 1], 2)
    with pytest.raises(UserError, match="whole numbers"):
        contingency([0.5, 1.0], [0, 1])
