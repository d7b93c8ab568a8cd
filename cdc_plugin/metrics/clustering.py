"""How well a partition agrees with known classes: accuracy under the best matching, NMI and ARI.

``predicted`` (N,) is the cluster and ``labels`` (N,) the class of every sample. Both are arbitrary integers, unless
``clusters`` states that clusters go from 0 to ``clusters`` - 1, and there may be more clusters than classes or fewer.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdc_plugin.errors import UserError
from cdc_plugin.metrics.confidence import Booleans, Integers, check_probabilities


def contingency(predicted: ArrayLike, labels: ArrayLike) -> Integers:
    """Count the samples of every (cluster found, class found) pair, both in ascending order of their numbers."""
    clusters, classes = (np.unique(values, return_inverse=True) for values in _paired(predicted, labels))
    return _count_pairs(clusters[1], classes[1], len(clusters[0]), len(classes[0]))


def match_clusters(predicted: ArrayLike, labels: ArrayLike, clusters: int) -> Integers:
    """Return the label of each cluster's class, (clusters,), so that the most samples are right (Hungarian matching).

    It is -1 for a cluster that is left without a class, which happens when there are more clusters than classes.
    """
    matched, classes = _match(predicted, labels, clusters)
    return np.where(matched >= 0, classes[matched], -1)


def correct_samples(predicted: ArrayLike, labels: ArrayLike, clusters: int) -> Booleans:
    """Return (N,) whether each sample lies in the cluster that is matched to its class."""
    matched, classes = _match(predicted, labels, clusters)
    # Compared by class index, not by label: a label of -1 must not pass for "no class".
    return matched[np.asarray(predicted)] == np.searchsorted(classes, np.asarray(labels))


def true_columns(probs: ArrayLike, labels: ArrayLike) -> Integers:
    """Return the column of ``probs`` (N, C) for each sample's class, (N,): the likeliest where the prediction is right.

    Clusters are matched as in `match_clusters`; of several best matchings the one that gives the classes the most
    probability is taken, so that renumbering the clusters changes no figure. Classes that are left without a
    cluster, as there are fewer clusters than classes, get numbers of their own past the last column: C, C + 1, ...
    """
    from scipy.sparse import csr_array

    table = check_probabilities(probs)
    samples, clusters = table.shape
    predicted, truth = _paired(table.argmax(axis=1), labels)
    classes, class_index = np.unique(truth, return_inverse=True)
    counts = _count_pairs(predicted, class_index, clusters, len(classes))
    one_hot = csr_array((np.ones(samples, table.dtype), class_index, np.arange(samples + 1)), (samples, len(classes)))
    mass = (one_hot.T @ table).T.astype(np.float64)  # (clusters, classes) sums of probability
    # All masses together are below 1 after the division, and thus never outweigh one sample.
    matched = _assign(counts + mass / (2 * samples))
    with_cluster = np.flatnonzero(matched >= 0)
    column = np.full(len(classes), -1)
    column[matched[with_cluster]] = with_cluster
    column[column < 0] = clusters + np.arange(np.sum(column < 0))
    return column[class_index]


def accuracy(predicted: ArrayLike, labels: ArrayLike, clusters: int) -> float:
    """Return the share of samples in the cluster that is matched to their class."""
    return float(correct_samples(predicted, labels, clusters).mean())


def normalized_mutual_information(predicted: ArrayLike, labels: ArrayLike) -> float:
    """Return the mutual information over the mean of both entropies; 1 if neither partition splits at all."""
    counts = contingency(predicted, labels)
    if counts.shape == (1, 1):
        return 1.0
    joint = counts / counts.sum()
    cluster_share, class_share = joint.sum(axis=1), joint.sum(axis=0)
    filled, independent = joint > 0, np.outer(cluster_share, class_share)
    information = np.sum(joint[filled] * np.log(joint[filled] / independent[filled]))
    mean_entropy = (_entropy(cluster_share) + _entropy(class_share)) / 2
    # Rounding may carry the quotient a hair outside of its range.
    return float(np.clip(information / mean_entropy, 0.0, 1.0))


def adjusted_rand_index(predicted: ArrayLike, labels: ArrayLike) -> float:
    """Return the share of sample pairs that both partitions treat alike, corrected for chance (Hubert and Arabie)."""
    counts = contingency(predicted, labels)
    together = _pairs(counts)
    in_clusters, in_classes = _pairs(counts.sum(axis=1)), _pairs(counts.sum(axis=0))
    total = _pairs(counts.sum())
    if in_clusters == in_classes == together:
        return 1.0  # the same partition, among them the cases where the quotient below is 0 / 0
    by_chance = in_clusters * in_classes / total
    return float((together - by_chance) / ((in_clusters + in_classes) / 2 - by_chance))


def _match(predicted: ArrayLike, labels: ArrayLike, clusters: int) -> tuple[Integers, Integers]:
    """Return the index of each cluster's class or -1, (clusters,), and the label of each class index."""
    found, truth = _paired(predicted, labels)
    if found.min() < 0 or found.max() >= clusters:
        raise UserError(
            f"cluster numbers go from 0 to {clusters - 1} for clusters={clusters}; found {found.min()} to "
            f"{found.max()}; state the number of clusters that the predictions were made with"
        )
    classes, class_index = np.unique(truth, return_inverse=True)
    return _assign(_count_pairs(found, class_index, clusters, len(classes))), classes


def _assign(weights: NDArray[np.int64] | NDArray[np.float64]) -> Integers:
    """Return the index of each row's column, or -1, so that the sum of the weights is largest."""
    from scipy.optimize import linear_sum_assignment  # half a second of import, needed with labels only

    rows, columns = linear_sum_assignment(weights, maximize=True)
    matched = np.full(len(weights), -1, dtype=np.int64)
    matched[rows] = columns
    return matched


def _paired(predicted: ArrayLike, labels: ArrayLike) -> tuple[Integers, Integers]:
    """Return both as integer vectors of one length, or refuse them."""
    first, second = np.asarray(predicted), np.asarray(labels)
    if first.ndim != 1 or first.shape != second.shape or len(first) == 0:
        raise UserError(
            "predictions and labels are two lists of one length, at least one sample long; found shapes "
            f"{first.shape} and {second.shape}; pass one cluster and one label per image"
        )
    for name, values in (("predictions", first), ("labels", second)):
        if not (np.issubdtype(values.dtype, np.integer) or values.dtype == bool):
            raise UserError(f"{name} are whole numbers; found {values.dtype}; convert them to int64 first")
    return first.astype(np.int64), second.astype(np.int64)


def _count_pairs(rows: Integers, columns: Integers, height: int, width: int) -> Integers:
    return np.bincount(rows * width + columns, minlength=height * width).reshape(height, width)


def _entropy(shares: NDArray[np.float64]) -> float:
    shares = shares[shares > 0]
    return float(-np.sum(shares * np.log(shares)))


def _pairs(counts: NDArray[np.int64]) -> float:
    """Count the unordered pairs within the groups, as float: products of these pass 64-bit integers."""
    return float(np.sum(counts * (counts - 1) // 2))
