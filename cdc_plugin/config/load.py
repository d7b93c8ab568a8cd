"""Load settings: defaults < what the pretraining run implies < recipe < flags < key=value."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cdc_plugin.config.recipes import recipe_folder, recipe_names
from cdc_plugin.config.schema import INPUT_FACTS, AugmentConfig, RefineConfig, check
from cdc_plugin.errors import UserError


def load_config(
    recipe: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    beneath: Mapping[str, Any] | None = None,
) -> RefineConfig:
    """Defaults, overlaid by a recipe (shipped name or YAML file), by flags and by ``key=value`` words.

    Args:
        beneath: what the pretraining run implies, between the defaults and the recipe.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    schema = OmegaConf.structured(RefineConfig)
    layers: list[tuple[str, Any]] = []
    if beneath:
        layers.append(("settings of the pretraining run", OmegaConf.create(dict(beneath))))
    if recipe is not None:
        path = _recipe_path(recipe)
        try:
            layers.append((f"recipe {path}", OmegaConf.load(path)))
        except OSError as error:
            raise UserError(f"cannot read recipe {path}: {error.strerror}") from error
        except Exception as error:  # YAML errors of several libraries
            reason = " ".join(str(error).split())
            raise UserError(f"recipe {path} is not valid YAML: {reason[:300]}") from error
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    nested = OmegaConf.create()
    for key, value in given.items():
        OmegaConf.update(nested, key, str(value) if isinstance(value, Path) else value)
    layers.append(("options", nested))
    words = list(overrides)
    for word in words:
        if "=" not in word:
            raise UserError(f"expected key=value, found {word!r}; for example epochs=30 or augment.flip=false")
    layers.append(("key=value", OmegaConf.from_dotlist(words)))

    for name, layer in layers:
        if not OmegaConf.is_dict(layer):
            raise UserError(f"{name}: expected keys and values, as in 'clusters: 10'")
        _refuse_unknown_keys(layer, RefineConfig, name)
        try:
            schema = OmegaConf.merge(schema, layer)
        except OmegaConfBaseException as error:
            first_line = str(error).splitlines()[0]
            raise UserError(f"{name}: {first_line} (key {getattr(error, 'full_key', '') or '?'})") from error
    config = OmegaConf.to_object(schema)
    assert isinstance(config, RefineConfig)
    if recipe is not None and not config.from_recipe:
        said = {key for name, layer in layers if not name.startswith(("recipe", "settings")) for key in layer}
        config.from_recipe = [key for key in INPUT_FACTS if getattr(config, key) is not None and key not in said]
    check(config)
    return config


def to_yaml(config: RefineConfig) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _recipe_path(recipe: str | Path) -> Path:
    if str(recipe) in recipe_names():
        return recipe_folder() / f"{recipe}.yaml"
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    near = difflib.get_close_matches(str(recipe), recipe_names(), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"no recipe {str(recipe)!r}: {hint}--list-recipes names them, or give a YAML file")


def _refuse_unknown_keys(layer: Mapping[Any, Any], schema: type, name: str, prefix: str = "") -> None:
    known = [item.name for item in dataclasses.fields(schema)]
    for key, value in layer.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise UserError(f"{name}: unknown key '{prefix}{key}'; {hint}")
        if key == "augment":
            if not isinstance(value, Mapping):
                raise UserError(f"{name}: augment holds settings of its own, as in augment.flip=false; found {value!r}")
            _refuse_unknown_keys(value, AugmentConfig, name, "augment.")
