"""Find the one checkpoint that a user's path means, and read the small files that describe it.

A run folder holds many checkpoints. The latest is meant: the one called last, else the one with the highest number
(epoch, then step), if the names differ in their numbers alone. Sub-folders are searched where the folder has none.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from cdc_plugin.errors import CheckpointError

CHECKPOINT_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".tar", ".bin")
SIDECARS = ("config.json", "args.json", "model.json", "args.yaml", "hparams.yaml")
# What a training run writes once, above the folder of its checkpoints.
RUN_SIDECARS = ("args.json", "args.yaml", "hparams.yaml")
SIDECAR_LIMITS = {".json": 1_000_000, ".yaml": 100_000}  # bytes; reading YAML is slow
# A run that has both keeps more facts in its checkpoints than in what it exports.
RUN_FOLDERS = ("checkpoints", "exported_models")
LEVELS = 3  # lightning_logs/version_0/checkpoints


def locate(path: Path) -> Path:
    """Return the checkpoint file that a path means, which may be the folder of a run."""
    if path.is_dir():
        return _latest_in(path)
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}{_nearby(path)}")
    if not path.is_file():
        raise CheckpointError(f"expected a checkpoint file, but {path} is not a file; check the path")
    if path.stat().st_size == 0:
        raise CheckpointError(f"the checkpoint {path} is empty (0 bytes); copy or download it again")
    return path


def read_sidecars(file: Path) -> dict[str, Any]:
    """Return the settings beside a checkpoint, or those of its run one folder up, by file name."""
    found: dict[str, Any] = {}
    names = (*SIDECARS, f"{file.stem}.json")
    places = [file.parent / name for name in names] + [file.parent.parent / name for name in RUN_SIDECARS]
    for beside in places:
        if beside.name in found or not beside.is_file() or beside.stat().st_size > SIDECAR_LIMITS[beside.suffix]:
            continue
        try:
            found[beside.name] = _parse_sidecar(beside)
        except (ValueError, RecursionError, OSError):
            continue  # another tool's file; a format that needs it reports it as missing
    return found


def _latest_in(folder: Path) -> Path:
    inside = _checkpoints_in(folder)
    if not inside and (folder / "model.json").is_file():
        raise CheckpointError(f"{folder} has model.json but no model.safetensors; is the run unfinished?")
    if not inside:
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        raise CheckpointError(f"expected a checkpoint in the folder {folder}, found {names}; give the checkpoint file")
    chosen = _choose(inside)
    if chosen is None:
        names = ", ".join(str(p.relative_to(folder)) for p in inside[:5])
        raise CheckpointError(f"the folder {folder} holds {len(inside)} checkpoints ({names}); name one of them")
    return locate(chosen)


def _checkpoints_in(folder: Path, levels: int = LEVELS) -> list[Path]:
    entries = sorted(folder.iterdir())
    inside = [p for p in entries if p.is_file() and p.suffix in CHECKPOINT_SUFFIXES]
    if inside or not levels:
        return inside
    folders = [p for p in entries if p.is_dir() and not p.name.startswith(".")][:100]
    for name in RUN_FOLDERS:
        if folder / name in folders and (found := _checkpoints_in(folder / name, 0)):
            return found
    return [p for below in folders for p in _checkpoints_in(below, levels - 1)]


def _choose(checkpoints: list[Path]) -> Path | None:
    """Return the latest checkpoint of one run; None if they are of several runs, or of unlike names."""
    if len({p.parent for p in checkpoints}) > 1:
        return None
    whole = [p for p in checkpoints if p.name == "model.safetensors"]
    last = [p for p in checkpoints if re.fullmatch(r"(.*[-_=])?last(-v\d+)?", _stem(p))]
    for group in (whole, last, checkpoints):
        # Lightning counts: last, last-v1, last-v2.
        plain = {re.sub(r"\d+", "#", re.sub(r"-v\d+$", "", _stem(p)) if group is last else _stem(p)) for p in group}
        if len(plain) == 1 and len({p.suffix for p in group}) == 1:
            return max(group, key=lambda p: [int(number) for number in re.findall(r"\d+", _stem(p))])
        if group:
            return None
    return None


def _stem(path: Path) -> str:
    return re.sub(r"(\.(pth|pt))?\.\w+$", "", path.name)


def _parse_sidecar(file: Path) -> Any:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".json":
        return json.loads(text)
    import yaml

    class DataLoader(yaml.SafeLoader):
        """Read a tagged Python object as the plain mapping, list or text that was written of it."""

    def untagged(loader: Any, _tag: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node)

    DataLoader.add_multi_constructor("tag:yaml.org,2002:python/", untagged)
    DataLoader.add_multi_constructor("!", untagged)
    try:
        return yaml.load(text, DataLoader)
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(str(error)) from error


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent}); check the path"
    names = sorted(p.name for p in path.parent.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3) or [n for n in names if n.endswith(CHECKPOINT_SUFFIXES)][:3]
    return f"; the folder has {', '.join(near)}" if near else f"; {path.parent} has no checkpoint, check the path"
