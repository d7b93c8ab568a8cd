"""Read what a user asks of a comparison: recipes of tables, methods and seeds."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from cdc_plugin.comparison.methods import Method, find_method
from cdc_plugin.config.recipes import recipe_folder
from cdc_plugin.errors import ConfigError


@dataclass(frozen=True)
class TableRecipe:
    """Methods and seeds of a table, and the sets of the paper for the full one.

    Args:
        settings: ``key=value`` for all methods.
        columns: those of the printed table; empty for all.
        sets: names of ``cdc`` recipes, for the full table.
        outside: images of none of the clusters, for the full table.
    """

    methods: tuple[str, ...]
    seeds: int = 3
    title: str = ""
    settings: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()


def table_folder() -> Path:
    """Return the folder of the shipped recipes."""
    return recipe_folder().parent / "tables"


def table_names() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(f"tables/{path.stem}" for path in table_folder().glob("*.yaml"))


def table_summary(name: str) -> str:
    """Return the first comment of a recipe."""
    lines = (table_folder().parent / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("#")), "")


def read_table_recipe(name: str, full: bool) -> TableRecipe:
    """Read a recipe by name (``tables/main`` or ``main``) or path; ``full`` overlays its part for the full table."""
    from omegaconf import OmegaConf

    path = _recipe_path(name)
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # YAML errors of several libraries
        raise ConfigError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(content, dict) or "methods" not in content:
        raise ConfigError(f"recipe {path}: expected keys and values, 'methods' among them; is it one of cdc-refine's?")
    full_part = content.pop("full", {})
    if full:
        content |= full_part
    known = sorted(TableRecipe.__dataclass_fields__)
    for key in map(str, content):
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}, full"
            raise ConfigError(f"recipe {path}: unknown key '{key}'; {hint}")
    lists = {str(key): tuple(map(str, value)) for key, value in content.items() if isinstance(value, list)}
    single = {str(key): value for key, value in content.items() if not isinstance(value, list)}
    for key, value in single.items():
        if not isinstance(value, int if key == "seeds" else str) or key not in ("seeds", "title"):
            raise ConfigError(f"recipe {path}: {key} takes {'a whole number' if key == 'seeds' else 'a list'}")
    return TableRecipe(**{**single, **lists})


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds 0 to 4 for ``5``, those listed for ``0,3,7``.

    >>> parse_seeds("3"), parse_seeds("0,7")
    ((0, 1, 2), (0, 7))
    """
    words = text.split(",")
    if all(word.strip().isdecimal() for word in words):
        numbers = [int(word) for word in words] if len(words) > 1 else list(range(int(text)))
        if numbers and len(set(numbers)) == len(numbers):
            return tuple(numbers)
    raise ConfigError(f"seeds: expected how many (5) or which (0,3,7), found {text!r}")


def parse_methods(words: list[str]) -> list[Method]:
    """Return the methods of names that are separated by commas or blanks."""
    names = [name for word in words for name in word.split(",") if name.strip()]
    if not names:
        raise ConfigError("no method is named; cdc-compare --list-methods shows all")
    return [find_method(name) for name in names]


def _recipe_path(name: str) -> Path:
    shipped = table_folder() / f"{name.removeprefix('tables/')}.yaml"
    if shipped.is_file():
        return shipped
    path = Path(name).expanduser()
    if path.is_file():
        return path
    near = difflib.get_close_matches(name, table_names(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"no recipe {name!r}: {hint}cdc-compare --list-recipes shows all, or pass a YAML file")
