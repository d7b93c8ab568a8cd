"""Builders and runners that several tests share."""

from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"  # a larger collection of checkpoints, where there is one beside the checkout


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_probs(batch: int, clusters: int, seed: int = 0, sharpness: float = 2.0) -> torch.Tensor:
    return (sharpness * torch.randn(batch, clusters, generator=seeded(seed))).softmax(dim=1)
