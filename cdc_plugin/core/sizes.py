"""Estimate how the images are shared among the clusters, where these are not to be of equal size."""

from torch import Tensor

LIKELY = 1.645  # standard errors to either side that hold nine of ten
FLOOR = 0.1  # of an equal share, below which no cluster is thought to fall


def follow_shares(past: Tensor | None, probs: Tensor, momentum: float) -> Tensor:
    """Return the shares (C,) of the clusters: a moving average of the mean predictions (B, C), with a floor.

    >>> follow_shares(Tensor([0.5, 0.5]), Tensor([[0.9, 0.1], [0.7, 0.3]]), momentum=0.5)
    tensor([0.6500, 0.3500])
    """
    present = probs.mean(dim=0)
    shares = present if past is None else momentum * past + (1 - momentum) * present
    shares = shares.clamp_min(FLOOR / len(shares))
    return shares / shares.sum()


def estimate_shares(probs: Tensor, doubt: float) -> tuple[Tensor, Tensor]:
    """Return the shares (C,) of the clusters that calibrated probabilities (N, C) amount to, and standard errors.

    Each image is in doubt by itself, and all of them together: ``doubt`` is the standard error of the level of the
    confidence, as a logit. Were the logit of one cluster off by it everywhere, the share would be by that times the
    mean of p (1 - p).

    >>> share, error = estimate_shares(Tensor([[1.0, 0.0], [0.5, 0.5]]), doubt=0.0)
    >>> share.tolist(), error.tolist()
    ([0.75, 0.25], [0.25, 0.25])
    """
    spread = probs * (1 - probs)
    error = (spread.sum(dim=0) / len(probs) ** 2 + (doubt * spread.mean(dim=0)).square()).sqrt()
    return probs.mean(dim=0), error
