"""The shipped recipes, and the settings of the embedded demo: real handwritten digits and a backbone for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DEMO_BACKBONE = Path(__file__).parents[1] / "demo_backbone"


def recipe_folder() -> Path:
    """Where the shipped recipes lie: inside the installed package, or beside it in a checkout."""
    installed = Path(__file__).parents[1] / "recipes"
    home = installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"
    return home / "cdc"  # a folder of this name is what Hydra calls a config group: ``+cdc=cifar10``


def recipe_names() -> list[str]:
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def recipe_summary(name: str) -> str:
    """The comment that opens a recipe, as one line."""
    lines = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("#")), "")


def demo_settings() -> dict[str, Any]:
    """Return the embedded digits and the small backbone that was pretrained on them without labels."""
    return {"backbone": str(DEMO_BACKBONE), "data": "digits", "clusters": 10}
