"""Find the number of clusters in the features of a run."""

from collections.abc import Sequence

import torch

from cdc_plugin.core.cluster_count import SEEN_A_CLUSTER, Count, count_clusters
from cdc_plugin.core.probe import principal_components
from cdc_plugin.core.random_streams import COUNT, generator
from cdc_plugin.training.features import Features

SEEN = 2000  # rows that are looked at, at least; more where more clusters may be found


def find_number(features: Features, between: Sequence[int], seed: int) -> Count:
    """Return how many clusters the features fall into; all processes get what the main one finds."""
    low, high = between
    randomness = generator(seed, COUNT)
    rows, _ = features.sample(high, randomness)
    rows = rows[torch.randperm(len(rows), generator=randomness)[: max(SEEN, SEEN_A_CLUSTER * high)]]
    find = features.distributed.broadcast_from_main
    return find(lambda: count_clusters(principal_components(rows), low, high, randomness))
