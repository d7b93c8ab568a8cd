"""How a calibration head is trained, by name: CDC's regional penalty (Eq. 1) and the uniform ones it is compared with.

The comparison of Sec. 4.2 (LS, FL, L1) keeps the whole of CDC and gives its calibration head another loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cdc_plugin.core.losses import soft_target_loss
from cdc_plugin.core.registry import Registry
from cdc_plugin.errors import UserError


@dataclass(frozen=True)
class Calibration:
    """One way to train a calibration head.

    Args:
        loss: (b, C) logits, (b, C) targets and a strength to the mean loss.
        strength: how strong the penalty is unless the user says.
        regional: targets are the means of mini-clusters, as in CDC; else the hard pseudo-label of every sample.
        strongest: largest strength with a meaning; the smallest is 0, which is no penalty.
    """

    loss: Callable[[Tensor, Tensor, float], Tensor]
    strength: float
    regional: bool
    strongest: float = math.inf


def check_calibration(name: str, strength: float | None = None) -> Calibration:
    """The calibration of that name, or a refusal that says what to type."""
    if name == "temperature":
        raise UserError(
            "calibration 'temperature' is fitted after training on labelled images, which a label-free run does not "
            f"have; take one of {', '.join(calibrations.names())}, or cdc-compare --methods temperature for reference"
        )
    calibration = calibrations.get(name)
    if strength is not None and not 0 <= strength <= calibration.strongest:
        upper = "" if math.isinf(calibration.strongest) else f" and at most {calibration.strongest:g}"
        raise UserError(
            f"the strength of calibration {name!r} is 0 or more{upper}, found {strength:g}; "
            f"leave it out for {calibration.strength:g}"
        )
    return calibration


def hard_targets(probs: Tensor) -> Tensor:
    """(B, C) probabilities to the one-hot rows (B, C) of the most probable clusters."""
    return F.one_hot(probs.argmax(dim=1), probs.shape[1]).to(probs.dtype)


def mini_cluster_loss(logits: Tensor, targets: Tensor, strength: float) -> Tensor:
    """L_cal (Eq. 1): the penalty lies in the targets, so ``strength`` changes nothing."""
    return soft_target_loss(logits, targets)


def plain_loss(logits: Tensor, targets: Tensor, strength: float) -> Tensor:
    """Cross-entropy with the pseudo-labels as they are: no penalty, whatever the ``strength``."""
    return F.cross_entropy(logits, targets)


def label_smoothing_loss(logits: Tensor, targets: Tensor, strength: float) -> Tensor:
    """Cross-entropy with (1 - e) · target + e / C (LS; Müller, Kornblith and Hinton 2019), e the ``strength``."""
    smooth = (1 - strength) * targets + strength / targets.shape[1]
    return F.cross_entropy(logits, smooth)


def focal_loss(logits: Tensor, targets: Tensor, strength: float) -> Tensor:
    """Mean of -(1 - p_y)^gamma · log p_y (FL; Mukhoti et al. 2020), gamma the ``strength``."""
    log_probs = F.log_softmax(logits, dim=1)
    # Kept off 0, where the power has an infinite slope if gamma is below 1; the gradient there is 0.
    missing = (-torch.expm1(log_probs)).clamp(min=torch.finfo(logits.dtype).eps)
    return -(targets * missing**strength * log_probs).sum(dim=1).mean()


def l1_loss(logits: Tensor, targets: Tensor, strength: float) -> Tensor:
    """Cross-entropy + weight · mean L1 norm of the logits of a sample (L1; Joo and Chung 2020).

    Their regulariser is a norm of the network as a function, taken over the samples; the weight is the
    ``strength``: 0.01 with the sum over all C logits is what Zhu et al. (2022) compare failure rejection with.
    """
    return F.cross_entropy(logits, targets) + strength * logits.abs().sum(dim=1).mean()


calibrations: Registry[Calibration] = Registry(
    "calibration",
    {
        "mini-clusters": Calibration(mini_cluster_loss, strength=0.0, regional=True),
        "label-smoothing": Calibration(label_smoothing_loss, strength=0.1, regional=False, strongest=1.0),
        "focal": Calibration(focal_loss, strength=3.0, regional=False),
        "l1": Calibration(l1_loss, strength=0.01, regional=False),
        "none": Calibration(plain_loss, strength=0.0, regional=False),
    },
)
