"""Resolving ``${data.dataset}`` in settings that were written down with their interpolations."""

from __future__ import annotations

import re
from typing import Any

Path = tuple[str, ...]
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
NOT_WRITTEN = "<not serializable>"  # what solo-learn writes for values that JSON cannot hold
LONGEST = 10_000  # references within references could make text grow without end


def resolve(settings: Any) -> Any:
    """The same settings with every reference replaced; None where it leads nowhere, or to a function.

    Absolute (``${a.b}``, ``${a[0].b}``) and relative (``${.b}``, ``${..b}``) references are followed, the
    functions of OmegaConf (``${oc.env:HOME}``) are not.
    """
    try:
        return _resolve(settings, (), settings, {})
    except RecursionError:
        return None


def _resolve(value: Any, path: Path, root: Any, known: dict[Path, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _resolve(item, (*path, str(key)), root, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, (*path, str(place)), root, known) for place, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    if value == NOT_WRITTEN:
        return None
    whole = REFERENCE.fullmatch(value)
    if whole:
        return _follow(whole[1], path, root, known)
    parts = {match[0]: _follow(match[1], path, root, known) for match in REFERENCE.finditer(value)}
    if any(not isinstance(part, str | int | float) for part in parts.values()):
        return None
    for reference, part in parts.items():
        value = value.replace(reference, str(part))
    return None if "${" in value or len(value) > LONGEST else value


def _follow(reference: str, path: Path, root: Any, known: dict[Path, Any]) -> Any:
    name = reference.strip()
    dots = len(name) - len(name.lstrip("."))
    if ":" in name or not name or dots > len(path):
        return None
    # One dot means the container that the reference stands in, each further one the container around it.
    start = path[: len(path) - dots] if dots else ()
    target = (*start, *re.findall(r"[^.\[\]]+", name))
    if target in known:
        return known[target]
    known[target] = None  # what a reference to itself, by whatever detour, comes to
    value = root
    for step in target:
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and len(step) < 9 and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    known[target] = _resolve(value, target, root, known)
    return known[target]
