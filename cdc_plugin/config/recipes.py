"""The shipped recipes, and the settings of the embedded demo: real handwritten digits and a backbone for them."""

import difflib
import io
import os
from pathlib import Path
from typing import Any

from cdc_plugin.errors import ConfigError

LARGEST_RECIPE = 200_000  # bytes
DEMO_BACKBONE = Path(__file__).parents[1] / "demo_backbone"


def recipe_folder(group: str = "cdc") -> Path:
    """Return the folder of the shipped recipes: inside the installed package, or beside it in a checkout."""
    installed = Path(__file__).parents[1] / "recipes"
    home = installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"
    return home / group  # a folder of this name is what Hydra calls a config group: ``+cdc=cifar10``


def recipe_names(group: str = "cdc") -> list[str]:
    """Return the names of the shipped recipes of a group.

    >>> recipe_names("pretrain")[-1]
    'paper-simsiam'
    """
    return sorted(path.stem for path in recipe_folder(group).glob("*.yaml"))


def recipe_summary(name: str, group: str = "cdc") -> str:
    """Return the comment that opens a recipe, as one line."""
    lines = (recipe_folder(group) / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("#")), "")


def find_recipe(recipe: str | Path, group: str = "cdc") -> Path:
    """Return the path of a shipped recipe, which may be written with its group, or of a YAML file."""
    name, names = str(recipe).removeprefix(f"{group}/"), recipe_names(group)
    if name in names:
        return recipe_folder(group) / f"{name}.yaml"
    path = Path(os.path.expanduser(recipe))
    if path.is_file():
        return path
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"no recipe {str(recipe)!r}: {hint}give a YAML file, or one of {', '.join(names)}")


def read_recipe(path: Path) -> dict[Any, Any]:
    """Return the keys and values of a YAML file; references to other settings are left as they are written."""
    import yaml
    from omegaconf import OmegaConf

    try:
        size = path.stat().st_size
        if size > LARGEST_RECIPE:
            raise ConfigError(f"recipe {path} has more than {LARGEST_RECIPE // 1000} kB; give a file of settings")
        text = path.read_text(encoding="utf-8") if size else ""  # /proc/kmsg has no size, and no end
        if text.count("[") + text.count("{") > 1000:  # which take YAML's reader minutes
            raise ConfigError(f"recipe {path} is nested beyond reason; give a file of settings")
        # Each use of an anchor is a copy, and copies of copies fill any memory.
        if any(isinstance(token, yaml.AnchorToken | yaml.AliasToken) for token in yaml.scan(text, yaml.SafeLoader)):
            raise ConfigError(
                f"recipe {path} has YAML anchors (& and *), which are not supported; write the values out"
            )
        content = OmegaConf.load(io.StringIO(text))
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from error
    except ConfigError:
        raise
    except Exception as error:  # YAML errors of several libraries
        raise ConfigError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())[:300]}") from error
    if not OmegaConf.is_dict(content):
        raise ConfigError(f"recipe {path}: expected keys and values, as in 'epochs: 30'")
    return OmegaConf.to_container(content)  # type: ignore[return-value]


def demo_settings() -> dict[str, Any]:
    """Return the embedded digits and the small backbone that was pretrained on them without labels."""
    return {"backbone": str(DEMO_BACKBONE), "data": "digits", "clusters": 10}
