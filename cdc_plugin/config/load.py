"""Load settings, defaults < pretraining run < recipe < flags < key=value, and report all that is wrong at once."""

import dataclasses
import difflib
import logging
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cdc_plugin.config.recipes import find_recipe, read_recipe
from cdc_plugin.config.schema import INPUT_FACTS, RECIPE_SETTINGS, RefineConfig, list_settings
from cdc_plugin.errors import ConfigError, shorten

log = logging.getLogger("cdc_plugin")
Config = TypeVar("Config")
DEFAULTS, FLAGS, WORDS = "settings of the pretraining run", "flags", "key=value"  # a recipe is named by its path
TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list[float]": "a list of numbers",
    "list[int]": "a list of whole numbers",
    "list[str]": "a list of names",
}
AUTO = re.compile(r"auto(?::(\d{1,7})-(\d{1,7}))?")  # a value of `clusters`
FOUND_BETWEEN = (2, 50)  # clusters, where no range is stated
REFERENCE = re.compile(r"\$\{[A-Za-z_][\w.]*\}")  # to another setting, never to the environment or a function
MOST_ITEMS, MOST_PROBLEMS = 100, 50  # of a list; that are told at once
LIMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le}


def load_config(
    recipe: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
    schema: type[Config] = RefineConfig,  # type: ignore[assignment]
) -> Config:
    """Return the defaults, overlaid by a recipe (shipped name or YAML file), by flags and by ``key=value`` words.

    ``defaults`` overlay those of the schema only, such as what the pretraining run says of its data.

    >>> load_config("cifar10", {"clusters": 20}, ["augment.flip=false"]).clusters
    20
    """
    layers: dict[str, Any] = {DEFAULTS: dict(defaults or {})}
    if recipe is not None:
        path = find_recipe(recipe, schema.RECIPES)  # type: ignore[attr-defined]
        content = read_recipe(path)
        allowed = RECIPE_SETTINGS if schema is RefineConfig else [*content.keys() - {"out", "device"}]
        layers[f"recipe {path}"] = keep_allowed(content, allowed, f"recipe {path}")
    layers[FLAGS] = {key: value for key, value in (flags or {}).items() if value is not None}
    layers[WORDS], problems = _read_words(overrides)
    if schema is RefineConfig:
        layers = {name: read_auto(layer) for name, layer in layers.items()}
    config = _merge(schema, layers, problems)
    if isinstance(config, RefineConfig) and recipe is not None and not config.from_recipe:
        stated = {*layers[FLAGS], *layers[WORDS]}
        config.from_recipe = [name for name in INPUT_FACTS if getattr(config, name) is not None and name not in stated]
    return config


def read_auto(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a layer of settings with the range in which the clusters are looked for, where it says ``auto``.

    >>> read_auto({"clusters": "auto:5-20"}), read_auto({"clusters": 10})
    ({'clusters': None, 'clusters_between': [5, 20]}, {'clusters': 10, 'clusters_between': None})
    """
    stated = layer.get("clusters")
    if stated is None or "clusters_between" in layer:
        return layer
    found = AUTO.fullmatch(stated) if isinstance(stated, str) else None
    if found is None:
        return {**layer, "clusters_between": None}  # a number takes the place of an earlier layer's range
    low, high = map(int, found.groups(default="0")) if found[1] else FOUND_BETWEEN
    if low >= high:
        raise ConfigError(f"clusters={stated}: expected a smaller number first, as in auto:5-50")
    return {**layer, "clusters": None, "clusters_between": [low, high]}


def keep_allowed(content: Mapping[Any, Any], allowed: Sequence[str], source: str) -> dict[Any, Any]:
    """Return what a file may set; name what it asks for and only the command line or the caller may."""
    defaults = RefineConfig()
    kept = {key: value for key, value in content.items() if key in allowed or not hasattr(defaults, str(key))}
    for key in content.keys() - kept.keys():
        # A run writes all of its settings; its folder and its device are of no use to another.
        if key not in ("out", "device") and content[key] not in (None, [], getattr(defaults, key)):
            log.warning("%s: %s is not taken from a file; add it to the command if you want it", source, key)
    return kept


def _read_words(words: Iterable[str]) -> tuple[Any, list[str]]:
    """Return the settings that ``key=value`` words state, and what is wrong with the words."""
    from omegaconf import OmegaConf

    read, problems = [], []
    for word in words:
        if "=" not in word:
            problems.append(f"expected key=value, found {shorten(word)}; for example epochs=30")
            continue
        try:
            read.append(OmegaConf.from_dotlist([word]))
        except Exception:  # of a wrong tag: whatever the constructor of that type raises
            problems.append(
                f"the value of {shorten(word)} cannot be read; expected one as in epochs=30 or mean=[0.5,0.5,0.5]"
            )
    return OmegaConf.to_container(OmegaConf.merge(*read)) if read else {}, problems


def to_yaml(config: Any) -> str:
    """Return settings as the text of a recipe."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _merge(schema: type[Config], layers: Mapping[str, Any], problems: list[str]) -> Config:
    """Overlay the layers in their order; one error lists every value that cannot be used."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException, ValidationError

    fields = list_settings(schema)  # type: ignore[arg-type]
    merged = OmegaConf.structured(schema)
    origin: dict[str, str] = {}
    for name, layer in layers.items():
        prefix = "" if name in (FLAGS, WORDS) else f"{name}: "
        for key, value in _walk_values(layer, fields):
            if len(problems) == MOST_PROBLEMS:  # each is compared with all names
                break
            if key not in fields:
                problems.append(prefix + _explain_unknown(key, list(fields)))
                continue
            if value == "???":
                problems.append(f"{prefix}{key} needs a value ({fields[key].metadata['help']})")
                continue
            if any("${" in text and not REFERENCE.fullmatch(text) for text in _texts(value)):
                problems.append(
                    f"{prefix}{key} can only refer to another setting, as ${{seed}}; found {shorten(value)}"
                )
                continue
            value = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
            try:
                if isinstance(value, list) and (len(value) > MOST_ITEMS or not all(map(_is_scalar, value))):
                    raise ValidationError  # OmegaConf takes lists in lists as they come, and long ones slowly
                OmegaConf.update(merged, key, value)
                origin[key] = prefix
            except OmegaConfBaseException:
                wanted = TYPES[str(fields[key].type).removesuffix(" | None")]
                problems.append(
                    f"{prefix}{key} takes {wanted}, found {shorten(value)} ({fields[key].metadata['help']})"
                )
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # such as an interpolation that leads nowhere
        raise ConfigError(str(error).splitlines()[0]) from error
    assert isinstance(config, schema)
    problems += [origin.get(key, "") + problem for key, problem in _check_values(config, fields)]
    if len(problems) > 1:
        raise ConfigError(f"{len(problems)} settings cannot be used:" + "".join(f"\n  {line}" for line in problems))
    if problems:
        raise ConfigError(problems[0])
    return config


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, list | tuple | Mapping)


def _texts(value: Any) -> list[str]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _walk_values(layer: Any, fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a layer by their full names; a mapping is entered where the schema has one."""
    for name, value in layer.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and any(field.startswith(f"{key}.") for field in fields):
            yield from _walk_values(value, fields, f"{key}.")
        else:
            yield key, value


def _check_values(config: Any, fields: Mapping[str, dataclasses.Field[Any]]) -> Iterator[tuple[str, str]]:
    """Yield the values that are out of range or not among the choices."""
    for key, item in fields.items():
        value = operator.attrgetter(key)(config)
        if value is None:
            continue
        rule = item.metadata
        values = value if isinstance(value, list) else [value]
        limits = {name: rule[name] for name in LIMITS if rule[name] is not None}
        if "" in values and not getattr(config, "features", None):  # beside features it says that there is none
            yield key, f"{key} is empty ({rule['help']})"
        elif rule["choices"] and value not in rule["choices"]:
            near = difflib.get_close_matches(value, rule["choices"], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield key, f"{key} is one of {', '.join(rule['choices'])}; found {value!r}{hint}"
        elif rule["length"] and len(values) != rule["length"]:
            yield key, f"{key} takes {rule['length']} numbers, found {len(values)} ({rule['help']})"
        elif not all(LIMITS[name](number, limit) for name, limit in limits.items() for number in values):  # NaN, too
            wanted = " and ".join(f"{name.replace('_', ' ')} {limit:g}" for name, limit in limits.items())
            yield key, f"{key} must be {wanted}, found {shorten(value)} ({rule['help']})"
        elif not all(math.isfinite(number) for number in values if isinstance(number, float)):
            yield key, f"{key} takes finite numbers, found {shorten(value)} ({rule['help']})"


def _explain_unknown(key: str, known: list[str]) -> str:
    """Name the settings that share a word with a mistyped one, else the one spelt most like it."""
    inner = next((name for name in known if name.startswith(f"{key}.")), None)
    if inner is not None:
        return f"{key} holds settings of its own, as in {inner}=..."
    near = [name for name in known if key in name.replace(".", "_").split("_")]
    near = near or difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {shorten(key)}; {hint}"
