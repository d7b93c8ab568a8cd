"""Compute the losses of both heads (Eqs. 1-3 and 5), and of calibrations that CDC is compared with (Sec. 4.2)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.core.registry import Registry
from cdc_plugin.errors import ConfigError


def pseudo_label_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return L_clu (Eq. 5): cross-entropy over the trusted samples; 0, with a zero gradient, where none is trusted.

    Logits (b, C) are those of the clustering head for the strong views; ``mask`` (b,) says which labels are trusted.

    >>> logits = torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log()
    >>> loss = pseudo_label_loss(logits, labels=torch.tensor([0, 0]), mask=torch.tensor([True, False]))
    >>> print(f"{loss.exp():.1f}")
    2.0
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def soft_target_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return L_cal (Eq. 1): mean cross-entropy between (b, C) soft targets and the calibration head."""
    return F.cross_entropy(logits, targets)


def negative_entropy(logits: Tensor) -> Tensor:
    """Return L_en (Eq. 2): negative entropy of the mean prediction; smallest, -log C, when clusters are even.

    Eq. 2 divides by C and the released code does not. Without the factor its weight w_en = 1 means the same
    for 10 and for 200 clusters, so this is computed here; ``entropy_weight=1/C`` gives the other.
    """
    # log of the mean probability by logsumexp: finite where a cluster's probability underflows to 0.
    log_mean = F.log_softmax(logits, dim=1).logsumexp(dim=0) - math.log(len(logits))
    return (log_mean.exp() * log_mean).sum()


def prior_divergence(logits: Tensor, shares: Tensor) -> Tensor:
    """Return KL(mean prediction || shares (C,)); 0 where the mean prediction has these shares.

    For equal shares it is `negative_entropy` + log C, with the same gradient.

    >>> logits = torch.tensor([[0.9, 0.1], [0.7, 0.3]]).log()
    >>> bool(prior_divergence(logits, torch.tensor([0.8, 0.2])).abs() < 1e-6)
    True
    """
    log_mean = F.log_softmax(logits, dim=1).logsumexp(dim=0) - math.log(len(logits))
    return (log_mean.exp() * (log_mean - shares.log())).sum()


def calibration_loss(
    logits: Tensor,
    targets: Tensor,
    entropy_weight: float,
    fit: Callable[[Tensor, Tensor], Tensor] = soft_target_loss,
    shares: Tensor | None = None,
) -> Tensor:
    """Return L = L_cal + w_en · L_en (Eq. 3); ``fit`` replaces L_cal where another calibration is compared.

    With the ``shares`` (C,) of clusters that are not equal, `prior_divergence` takes the place of L_en.
    """
    spread = negative_entropy(logits) if shares is None else prior_divergence(logits, shares)
    return fit(logits, targets) + entropy_weight * spread


@dataclass(frozen=True)
class Calibration:
    """One way to train a calibration head, with all else as in CDC (the comparison of Sec. 4.2)."""

    loss: Callable[[Tensor, Tensor, float], Tensor]  # from (b, C) logits, (b, C) targets and a strength
    strength: float  # of the penalty, unless another one is asked for
    regional: bool  # targets are the means of mini-clusters, as in CDC; else the hard pseudo-label of every sample
    strongest: float = math.inf  # valid strength; the smallest is 0, which is no penalty


def check_calibration(name: str, strength: float | None = None) -> Calibration:
    """Return the calibration of this name; refuse unknown names and strengths out of range.

    >>> check_calibration("focal").strength
    3.0
    """
    if name == "temperature":
        raise ConfigError(
            "calibration 'temperature' is fitted after training on labelled images, which a label-free run does not "
            f"have; take one of {', '.join(calibrations.names())}, or cdc-compare --methods temperature for reference"
        )
    calibration = calibrations.get(name)
    if strength is not None and not 0 <= strength <= calibration.strongest:
        upper = "" if math.isinf(calibration.strongest) else f" and at most {calibration.strongest:g}"
        raise ConfigError(
            f"the strength of calibration {name!r} is 0 or more{upper}, found {strength:g}; "
            f"leave it out for {calibration.strength:g}"
        )
    return calibration


def plain_loss(logits: Tensor, targets: Tensor, strength: float) -> Tensor:
    """Return L_cal (Eq. 1) at any ``strength``: CDC's penalty lies in the targets, and hard targets have none."""
    return soft_target_loss(logits, targets)


def label_smoothing_loss(logits: Tensor, targets: Tensor, strength: float) -> Tensor:
    """Return the cross-entropy with (1 - e) · target + e / C (LS; Müller et al. 2019), e the ``strength``."""
    smooth = (1 - strength) * targets + strength / targets.shape[1]
    return F.cross_entropy(logits, smooth)


def focal_loss(logits: Tensor, targets: Tensor, strength: float) -> Tensor:
    """Return the mean of -(1 - p_y)^gamma · log p_y (FL; Mukhoti et al. 2020), gamma the ``strength``."""
    log_probs = F.log_softmax(logits, dim=1)
    # Kept off 0, where the power has an infinite slope if gamma is below 1; the gradient there is 0.
    missing = (-torch.expm1(log_probs)).clamp(min=torch.finfo(logits.dtype).eps)
    return -(targets * missing**strength * log_probs).sum(dim=1).mean()


def l1_loss(logits: Tensor, targets: Tensor, strength: float) -> Tensor:
    """Return the cross-entropy + ``strength`` · mean L1 norm of the logits of a sample (L1; Joo and Chung 2020).

    Their regulariser is a norm of the network as a function, taken over the samples. A weight of 0.01 on the sum
    over all C logits is what Zhu et al. (2022) compare failure rejection with.
    """
    return F.cross_entropy(logits, targets) + strength * logits.abs().sum(dim=1).mean()


calibrations: Registry[Calibration] = Registry(
    "calibration",
    {
        "mini-clusters": Calibration(plain_loss, strength=0.0, regional=True),
        "label-smoothing": Calibration(label_smoothing_loss, strength=0.1, regional=False, strongest=1.0),
        "focal": Calibration(focal_loss, strength=3.0, regional=False),
        "l1": Calibration(l1_loss, strength=0.01, regional=False),
        "none": Calibration(plain_loss, strength=0.0, regional=False),
    },
)
