"""Tables of objects by name: a recipe or a command line names an entry and never a path to code."""

import difflib
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from cdc_plugin.errors import ConfigError

T = TypeVar("T")


@dataclass
class Registry(Generic[T]):
    """Entries by name; other packages add theirs through the entry point group ``cdc_plugin.<kind>``.

    >>> numbers = Registry("number", {"two": 2, "one": 1})
    >>> numbers.get("two"), numbers.names(), "three" in numbers
    (2, ['one', 'two'], False)
    """

    kind: str
    entries: dict[str, T] = field(default_factory=dict)
    plugins_loaded: bool = False

    def get(self, name: str) -> T:
        """Return the entry of this name, or refuse and suggest the nearest one."""
        if name not in self:
            near = difflib.get_close_matches(name, self.entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(self.names())})")
        return self.entries[name]

    def names(self) -> list[str]:
        """Return all names in alphabetical order."""
        self._load_plugins()
        return sorted(self.entries)

    def __contains__(self, name: object) -> bool:
        self._load_plugins()
        return name in self.entries

    def _load_plugins(self) -> None:
        if self.plugins_loaded:
            return
        self.plugins_loaded = True
        for point in entry_points(group=f"cdc_plugin.{self.kind.replace(' ', '_')}"):
            if point.name not in self.entries:
                self.entries[point.name] = point.load()
