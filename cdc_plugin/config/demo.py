"""The embedded demo: real handwritten digits and a small backbone pretrained on them without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BACKBONE = Path(__file__).parents[1] / "demo_backbone"


def demo_settings() -> dict[str, Any]:
    return {"backbone": str(BACKBONE), "data": "digits", "clusters": 10}
