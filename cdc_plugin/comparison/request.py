"""What a user asks of a comparison: a recipe of tables, overlaid by options, as a grid of cells."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path

from cdc_plugin.comparison.methods import Method, find_method
from cdc_plugin.config.recipes import recipe_folder
from cdc_plugin.errors import UserError


@dataclass(frozen=True)
class TableRecipe:
    """Which methods with how many seeds, and on which sets of the paper where it is the whole table that is wanted.

    Args:
        settings: ``key=value`` for all methods.
        columns: what the printed table shows; empty for everything.
        sets: names of ``cdc`` recipes, for the full table.
        outside: images from elsewhere, for the full table.
    """

    methods: tuple[str, ...]
    seeds: int = 3
    title: str = ""
    settings: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    outside: tuple[str, ...] = field(default=())


def table_folder() -> Path:
    return recipe_folder().parent / "tables"


def table_names() -> list[str]:
    return sorted(f"tables/{path.stem}" for path in table_folder().glob("*.yaml"))


def table_summary(name: str) -> str:
    """The comment that opens a recipe, as one line."""
    lines = (table_folder().parent / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("#")), "")


def read_table_recipe(name: str, full: bool) -> TableRecipe:
    """A recipe by name (``tables/main`` or ``main``) or path; ``full`` overlays its part for the whole table."""
    from omegaconf import OmegaConf

    path = _recipe_path(name)
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # YAML errors of several libraries
        raise UserError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(found, dict) or "methods" not in found:
        raise UserError(f"recipe {path}: expected keys and values, 'methods' among them; is it one of cdc-refine's?")
    whole = found.pop("full", {})
    if full:
        found |= whole
    known = sorted(TableRecipe.__dataclass_fields__)
    for key in map(str, found):
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}, full"
            raise UserError(f"recipe {path}: unknown key '{key}'; {hint}")
    lists = {str(key): tuple(map(str, value)) for key, value in found.items() if isinstance(value, list)}
    single = {str(key): value for key, value in found.items() if not isinstance(value, list)}
    for key, value in single.items():
        if not isinstance(value, int if key == "seeds" else str) or key not in ("seeds", "title"):
            raise UserError(f"recipe {path}: {key} takes {'a whole number' if key == 'seeds' else 'a list'}")
    return TableRecipe(**{**single, **lists})


def parse_seeds(text: str) -> tuple[int, ...]:
    """``5`` means the seeds 0 to 4, ``0,3,7`` these."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds takes how many (5) or which (0,3,7), found {text!r}") from None
    if "," not in text:
        numbers = list(range(numbers[0]))
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise UserError(f"--seeds takes how many (5) or which (0,3,7), found {text!r}")
    return tuple(numbers)


def parse_methods(words: list[str]) -> list[Method]:
    """Names, separated by commas or blanks."""
    names = [name for word in words for name in word.split(",") if name.strip()]
    if not names:
        raise UserError("--methods is empty; cdc-compare --list-methods names them")
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
    raise UserError(f"no recipe {name!r}: {hint}cdc-compare --list-recipes names them, or give a YAML file")
