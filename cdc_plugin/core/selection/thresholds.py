"""Select by a required confidence: fixed, by curriculum (FlexMatch), self-adaptive (FreeMatch).

CDC is compared with the last two in its appendix ("Dynamic Thresholding in SSL"): only its selection is replaced,
so FreeMatch's fairness loss is left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cdc_plugin.core.kmeans import count_members
from cdc_plugin.core.selection.base import Selection, SelectionInput, Selector


def select_above(probs: Tensor, thresholds: Tensor | float) -> Selection:
    """Trust the samples whose largest probability (B, C) reaches the threshold, of all clusters or of its own (C,).

    >>> select_above(torch.tensor([[0.8, 0.2], [0.4, 0.6]]), 0.7).mask
    tensor([ True, False])
    """
    confidence, labels = probs.max(dim=1)
    mask = confidence >= (thresholds[labels] if isinstance(thresholds, Tensor) else thresholds)
    return Selection(labels, mask, count_members(labels, probs.shape[1], mask))


def curriculum_thresholds(learned: Tensor, clusters: int, threshold: float) -> Tensor:
    """Return (C,) thresholds τ · M(β(c)) of FlexMatch (Zhang et al. 2021): low for clusters that are little learnt.

    σ(c) images were last confident of cluster c; β(c) = σ(c) / max(max σ, images without a label), the form
    with the warm-up, and M(x) = x / (2 - x). Before any image was confident everything is trusted, and little is
    required until as many images are confident of one cluster as of none: with calibrated probabilities this
    may never happen. ``learned`` (N,) is from `remember`, and ``threshold`` is τ.
    """
    counts = count_members(learned + 1, clusters + 1)  # (1 + C,), those without a label first
    status = counts[1:] / counts.max()
    return threshold * status / (2 - status)


def remember(learned: Tensor, rows: Tensor, probs: Tensor, threshold: float) -> Tensor:
    """Return (N,) the last label that each image had with a confidence of τ or more, -1 before: FlexMatch's memory.

    The memory ``learned`` (N,) itself is not changed; ``rows`` (B,) are the numbers of the images in the data set.
    """
    sure = select_above(probs, threshold)
    return learned.scatter(0, rows, torch.where(sure.mask, sure.labels, learned[rows]))


def moving_average(past: Tensor, present: Tensor, momentum: float) -> Tensor:
    """Return momentum · past + (1 - momentum) · present."""
    return momentum * past + (1 - momentum) * present


def adaptive_thresholds(level: Tensor, shares: Tensor) -> Tensor:
    """Return (C,) thresholds τ(c) = p(c) / max p · τ of FreeMatch (Wang et al. 2023).

    τ (``level``) and p (C,) (``shares``) are moving averages of the batches' mean confidence and mean probabilities.
    """
    return shares / shares.max() * level


class Fixed(Selector):
    """`select_above` one threshold for all clusters and all times, as FixMatch and SCAN's self-labelling do."""

    def __call__(self, batch: SelectionInput) -> Selection:
        return select_above(batch.probs, self.threshold)


@dataclass(eq=False)
class FlexMatch(Selector):
    """`select_above` thresholds that follow how many images each cluster has won.

    As in the paper's algorithm the thresholds of a batch come from the batches before it.
    """

    def __post_init__(self) -> None:
        self.state["learned"] = torch.full((self.image_count,), -1, dtype=torch.int64, device=self.device)

    def __call__(self, batch: SelectionInput) -> Selection:
        learned = self.state["learned"]
        selection = select_above(batch.probs, curriculum_thresholds(learned, self.clusters, self.threshold))
        self.state["learned"] = remember(learned, batch.rows, batch.probs, self.threshold)
        return selection


@dataclass(eq=False)
class FreeMatch(Selector):
    """`select_above` thresholds that follow the mean confidence and the size of each cluster.

    As in the paper, and unlike FlexMatch, the thresholds of a batch already include the batch itself.
    """

    def __post_init__(self) -> None:
        self.state["level"] = torch.full((), 1 / self.clusters, device=self.device)
        self.state["shares"] = torch.full((self.clusters,), 1 / self.clusters, device=self.device)

    def __call__(self, batch: SelectionInput) -> Selection:
        confidence = batch.probs.max(dim=1).values.mean()
        self.state["level"] = moving_average(self.state["level"], confidence, self.momentum)
        self.state["shares"] = moving_average(self.state["shares"], batch.probs.mean(dim=0), self.momentum)
        return select_above(batch.probs, adaptive_thresholds(self.state["level"], self.state["shares"]))
