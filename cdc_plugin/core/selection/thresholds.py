"""Selections by a confidence to be reached: fixed, by curriculum (FlexMatch), self-adaptive (FreeMatch).

CDC is compared with the last two in its appendix ("Dynamic Thresholding in SSL"): only its selection is replaced,
so FreeMatch's fairness loss is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdc_plugin.core.selection.confident import Selection, SelectionInput, Selector


def select_above(probs: Tensor, thresholds: Tensor | float) -> Selection:
    """Trust the samples whose largest probability reaches the threshold; none may be trusted, or all.

    Args:
        probs: (B, C).
        thresholds: one for all, or (C,) one for each cluster.
    """
    confidence, labels = probs.max(dim=1)
    asked = torch.as_tensor(thresholds, dtype=probs.dtype, device=probs.device).expand(probs.shape[1])
    mask = confidence >= asked[labels]
    return Selection(labels, mask, torch.bincount(labels[mask], minlength=probs.shape[1]))


def curriculum_thresholds(learned: Tensor, clusters: int, threshold: float) -> Tensor:
    """(C,) thresholds τ · M(β(c)) of FlexMatch (Zhang et al. 2021): low for clusters that are little learnt.

    σ(c) images were last confident of cluster c; β(c) = σ(c) / max(max σ, images without a label), which is the
    form with the warm-up, and M(x) = x / (2 - x). Before any image was confident everything is trusted, and
    little is asked for until as many images are confident of one cluster as of none: with calibrated
    probabilities that can be never.

    Args:
        learned: (N,) from `remember`.
        threshold: τ.
    """
    counts = torch.bincount(learned + 1, minlength=clusters + 1)  # (1 + C,), those without a label first
    status = counts[1:] / counts.max()
    return threshold * status / (2 - status)


def remember(learned: Tensor, rows: Tensor, probs: Tensor, threshold: float) -> Tensor:
    """(N,) the last label that each image had with a confidence of τ or more, -1 before: FlexMatch's memory.

    Args:
        learned: (N,) the memory up to now, which is left as it is.
        rows: (B,) numbers of the images in the whole set.
        probs: (B, C).
        threshold: τ.
    """
    sure = select_above(probs, threshold)
    return learned.index_put((rows[sure.mask],), sure.labels[sure.mask])


def moving_average(past: Tensor, present: Tensor, momentum: float) -> Tensor:
    return momentum * past + (1 - momentum) * present


def adaptive_thresholds(level: Tensor, shares: Tensor) -> Tensor:
    """(C,) thresholds τ(c) = p(c) / max p · τ of FreeMatch (Wang et al. 2023).

    Args:
        level: () τ, moving average of the batches' mean confidence, from 1 / C on.
        shares: (C,) p, moving average of the batches' mean probabilities, from 1 / C on.
    """
    return shares / shares.max() * level


class Fixed(Selector):
    """`select_above` one threshold for all clusters and all times, as FixMatch and SCAN's self-labelling do."""

    def __call__(self, seen: SelectionInput) -> Selection:
        return select_above(seen.probs, self.threshold)


class FlexMatch(Selector):
    """`select_above` thresholds that follow how many images each cluster has won.

    As in the paper's algorithm the thresholds of a batch come from the batches before it.
    """

    def __init__(self, images: int, clusters: int, threshold: float, momentum: float, device: torch.device) -> None:
        super().__init__(images, clusters, threshold, momentum, device)
        self.state["learned"] = torch.full((images,), -1, dtype=torch.int64, device=device)

    def __call__(self, seen: SelectionInput) -> Selection:
        learned = self.state["learned"]
        selection = select_above(seen.probs, curriculum_thresholds(learned, self.clusters, self.threshold))
        self.state["learned"] = remember(learned, seen.rows, seen.probs, self.threshold)
        return selection


class FreeMatch(Selector):
    """`select_above` thresholds that follow the mean confidence and the size of each cluster.

    As in the paper, and unlike FlexMatch, the thresholds of a batch already count the batch itself.
    """

    def __init__(self, images: int, clusters: int, threshold: float, momentum: float, device: torch.device) -> None:
        super().__init__(images, clusters, threshold, momentum, device)
        self.state["level"] = torch.full((), 1 / clusters, device=device)
        self.state["shares"] = torch.full((clusters,), 1 / clusters, device=device)

    def __call__(self, seen: SelectionInput) -> Selection:
        confidence = seen.probs.max(dim=1).values.mean()
        self.state["level"] = moving_average(self.state["level"], confidence, self.momentum)
        self.state["shares"] = moving_average(self.state["shares"], seen.probs.mean(dim=0), self.momentum)
        return select_above(seen.probs, adaptive_thresholds(self.state["level"], self.state["shares"]))
