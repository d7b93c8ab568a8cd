"""Plug-in points: a name in a recipe or on the command line stands for a registered object, never for code."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from cdc_plugin.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects by name; other packages add theirs through the entry point group ``cdc_plugin.<kind>``."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._looked_for_plugins = False

    def register(self, name: str) -> Callable[[T], T]:
        def keep(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return keep

    def get(self, name: str) -> T:
        self._load_plugins()
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(self.names())})")
        return self._entries[name]

    def names(self) -> list[str]:
        self._load_plugins()
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        self._load_plugins()
        return name in self._entries

    def _load_plugins(self) -> None:
        if self._looked_for_plugins:
            return
        self._looked_for_plugins = True
        for point in entry_points(group=f"cdc_plugin.{self.kind.replace(' ', '_')}"):
            if point.name not in self._entries:
                self._entries[point.name] = point.load()
