"""PLACEHOLDER by the lead until helper B overwrites this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def run_defaults(path: str | Path) -> dict[str, Any]:
    return {}
