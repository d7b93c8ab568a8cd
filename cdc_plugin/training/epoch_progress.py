"""Keep what is known of an epoch before it ends, so that a run can stop and resume between two batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Stats = dict[str, float]


class EpochProgress:
    """What is known of an epoch before it ends: the logs of its batches, cluster sizes, the random stream."""

    def __init__(self, clusters: int, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self.logs: list[Stats] = list(state.get("logs", []))
        self.sizes: Tensor = state.get("sizes", torch.zeros(clusters, dtype=torch.long)).clone()
        self.randomness = torch.Generator()
        if "randomness" in state:
            self.randomness.set_state(state["randomness"])

    def count_labels(self, labels: Tensor) -> None:
        """Add the pseudo-labels (B,) of a batch to the sizes of the clusters."""
        self.sizes += torch.bincount(labels, minlength=len(self.sizes)).cpu()

    def summarise(self) -> Stats:
        """Return means over the batches, and what the clusters look like on the weak views."""
        mean = {key: sum(log[key] for log in self.logs) / len(self.logs) for key in self.logs[0]}
        share = self.sizes / self.sizes.sum()
        return {**mean, "largest_cluster": share.max().item(), "used_clusters": int((self.sizes > 0).sum())}

    def state(self) -> dict[str, Any]:
        """Return what a later `EpochProgress` continues from."""
        return {"logs": list(self.logs), "sizes": self.sizes.clone(), "randomness": self.randomness.get_state()}
