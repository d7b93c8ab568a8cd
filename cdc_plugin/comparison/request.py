"""Read what a user asks of a comparison: recipes of tables, methods and seeds."""

import difflib
import re
from dataclasses import dataclass, field

from cdc_plugin.comparison.methods import Method, find_method
from cdc_plugin.config.recipes import find_recipe, read_recipe
from cdc_plugin.errors import ConfigError, shorten

SEED, MOST_SEEDS = re.compile("[0-9]{1,18}"), 1000


@dataclass(frozen=True)
class TableRecipe:
    """Methods and seeds of a table, and the sets of the paper for the full one."""

    methods: tuple[str, ...]
    seeds: int = 3
    title: str = ""
    settings: tuple[str, ...] = ()  # ``key=value`` for all methods
    columns: tuple[str, ...] = ()  # of the printed table; empty for all
    sets: tuple[str, ...] = ()  # names of ``cdc`` recipes, for the full table
    outside: dict[str, list[str]] = field(default_factory=dict)  # of each set, images of none of its clusters


def read_table_recipe(name: str, full: bool) -> TableRecipe:
    """Read a recipe by name (``tables/main`` or ``main``) or path; ``full`` overlays its part for the full table."""
    path = find_recipe(name, "tables")
    content = read_recipe(path)
    if "methods" not in content:
        raise ConfigError(f"recipe {path} names no 'methods'; is it one of cdc-refine's?")
    full_part = content.pop("full", {})
    if not isinstance(full_part, dict):
        raise ConfigError(f"recipe {path}: full takes keys and values, found {shorten(full_part)}")
    if full:
        content |= full_part
    known = sorted(TableRecipe.__dataclass_fields__)
    kinds: dict[str, tuple[type, str]] = {
        "seeds": (int, "a whole number"),
        "title": (str, "text"),
        "outside": (dict, "a list for each set"),
    }
    for key, value in content.items():
        kind, words = kinds.get(key, (list, "a list"))
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}, full"
            raise ConfigError(f"recipe {path}: unknown key '{key}'; {hint}")
        right = isinstance(value, kind)
        if isinstance(value, dict):
            right = right and all(isinstance(part, list) for part in value.values())
        if not right:
            raise ConfigError(f"recipe {path}: {key} takes {words}")
        content[key] = tuple(str(item) for item in value) if kind is list else value
    return TableRecipe(**content)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds 0 to 4 for ``5``, those listed for ``0,3,7``.

    >>> parse_seeds("3"), parse_seeds("0,7")
    ((0, 1, 2), (0, 7))
    """
    words = text.split(",")
    if all(SEED.fullmatch(word.strip()) for word in words):
        numbers = [int(word) for word in words]
        numbers = numbers if len(words) > 1 else list(range(min(numbers[0], MOST_SEEDS + 1)))
        if 0 < len(set(numbers)) == len(numbers) <= MOST_SEEDS:
            return tuple(numbers)
    raise ConfigError(f"seeds: expected how many (5, at most {MOST_SEEDS}) or which (0,3,7), found {shorten(text)}")


def parse_methods(words: list[str]) -> list[Method]:
    """Return the methods of names that are separated by commas or blanks."""
    names = [name for word in words for name in word.split(",") if name.strip()]
    if not names:
        raise ConfigError("no method is named; cdc-compare --list-methods shows all")
    return [find_method(name) for name in names]
