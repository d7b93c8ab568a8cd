"""Checkpoints written at test time in the layouts of the frameworks, each with an independent network to compare.

Names and shapes are facts of the frameworks; their networks are written anew in plain torch, or come from the
libraries themselves (timm, torchvision, lightly).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
CIFAR10 = ([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010])
CIFAR20 = ([0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761])


@dataclass(frozen=True)
class Case:
    """A checkpoint and what must be read from it."""

    path: Path
    format: str
    network: nn.Module  # computes the features of normalised images
    heads: tuple[nn.Module, ...] = ()  # compute logits of features
    statistics: tuple[Sequence[float], Sequence[float]] = IMAGENET
    size: int = 32
    side: int = 32  # of the images to compare with; ``size`` is what the loader must say
    inferred: set[str] | None = None  # facts that the file leaves open, if the test is to compare them
    average: nn.Module | None = None  # the moving average beside ``network``, if the file has both
    wanted: dict[str, Any] = field(default_factory=dict)
