"""Builders and runners that several tests share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"  # a larger collection of checkpoints, where there is one beside the checkout
