"""Find the checkpoint that a path means, open it without running anything inside it, and find the weights it holds.

A run folder holds many checkpoints. The latest is meant: the one called last, else the one with the highest number
(epoch, then step), if the names differ in their numbers alone. Sub-folders are searched where the folder has none.
"""

from __future__ import annotations

import difflib
import json
import re
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.safe_pickle.containers import names_in_tar, read_archive, read_legacy
from cdc_plugin.checkpoints.safe_pickle.machine import Refused
from cdc_plugin.checkpoints.safe_pickle.names import InertRecord
from cdc_plugin.checkpoints.weights import strip_prefix
from cdc_plugin.errors import CheckpointError, UserError, option

CHECKPOINT_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".tar", ".bin")
SIDECARS = ("config.json", "args.json", "model.json", "args.yaml", "hparams.yaml")
# What a training run writes once, above the folder of its checkpoints.
MOST_TENSORS = 50_000  # the largest networks have some thousand
RUN_SIDECARS = ("args.json", "args.yaml", "hparams.yaml")
SIDECAR_LIMITS = {".json": 1_000_000, ".yaml": 100_000}  # bytes; reading YAML is slow
# A run that has both keeps more facts in its checkpoints than in what it exports.
RUN_FOLDERS = ("checkpoints", "exported_models")
LEVELS = 3  # lightning_logs/version_0/checkpoints
# Where training scripts keep the weights, most specific first; moving averages ("model_ema") are the formats' matter.
WRAPPERS = (
    *("state_dict", "model_state_dict", "model", "teacher", "student", "net", "network", "module"),
    *("eval_model", "train_model", "phi1"),  # FixMatch's average and network; TURTLE's first task head
)
DATA_PARALLEL_PREFIXES = ("module.", "_orig_mod.")
# Code that belongs to networks; a user who trusts the file may open it.
NETWORK_PACKAGES = ("torch.", "torchvision.", "timm.")
# No weight of a network that works is larger; a flipped exponent makes such numbers.
LARGEST = 1e12


@dataclass(frozen=True)
class Checkpoint:
    """A file that was read: its content, the small files beside it by name, and its weights."""

    path: Path
    payload: Any
    sidecar: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def below(self, prefix: str) -> Checkpoint:
        """Return the same file with the weights below a prefix alone, as if they had been saved by themselves."""
        return replace(self, state=strip_prefix(self.state, prefix))


def read_checkpoint(path: str | Path, trust: bool = False) -> Checkpoint:
    """Read a checkpoint file, or the latest in a run's folder, and make sure that it holds plausible weights.

    ``trust`` opens pickled modules, which runs the code they name; only where the user asks for it.
    """
    file = locate(Path(path))
    with file.open("rb") as stream:
        head = stream.read(512)
    payload = _read_safetensors(file) if _is_safetensors(file, head) else _read_torch(file, head, trust)
    if isinstance(payload, Mapping) and {"refiner", "digest"} <= payload.keys():
        raise CheckpointError(
            f"{file} is the state of an unfinished run, not its model; cdc-refine --resume --out {file.parent} "
            f"finishes an unfinished run, which is then given as {file.parent}"
        )
    state = find_state_dict(payload, file.name)
    if len(state) > MOST_TENSORS:
        raise CheckpointError(
            f"{file} holds {len(state):,} tensors; expected the at most {MOST_TENSORS:,} of a network"
        )
    check_finite(state, file.name)
    return Checkpoint(file, payload, read_sidecars(file), state)


def find_state_dict(payload: Any, source: str = "the checkpoint") -> dict[str, Tensor]:
    """Return the named weights inside a payload, without wrappers' names and data-parallel prefixes.

    >>> list(find_state_dict({"epoch": 3, "state_dict": {"module.weight": torch.ones(2)}}))
    ['weight']
    """
    found = _search(payload, depth=0)
    if found is None:
        keys = ", ".join(str(key)[:40] for key in list(payload)[:6]) if isinstance(payload, Mapping) else ""
        kind = "nothing" if isinstance(payload, Mapping) else type(payload).__name__
        raise CheckpointError(
            f"expected named tensors in {source}, found none (it holds: {keys or kind}); "
            "save the network with torch.save(network.state_dict(), FILE)"
        )
    while prefix := next((p for p in DATA_PARALLEL_PREFIXES if all(k.startswith(p) for k in found)), ""):
        found = strip_prefix(found, prefix)
    return found


def locate(path: Path) -> Path:
    """Return the checkpoint file that a path means, which may be the folder of a run."""
    if path.is_dir():
        return _latest_in(path)
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}{_describe_folder(path)}")
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


def read_run_args(path: str | Path) -> tuple[Any, Path]:
    """Return the ``args.json`` of the run that a checkpoint or folder belongs to, None without one, and its folder."""
    start = Path(path).expanduser()
    try:
        # In the folder or beside the file; else beside the checkpoint that is found below the folder.
        beside = (file for file in (start / "checkpoint", start) if file.with_name("args.json").is_file())
        file = next(beside, None) or locate(start)
        return read_sidecars(file).get("args.json"), file.parent.resolve()
    except (OSError, UserError):  # reading the weights will report it
        return None, start


def check_finite(state: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights with NaN, infinite or absurd values, and variances below zero."""
    spans = {}
    for key, value in state.items():
        if value.is_floating_point() and value.numel():
            low, high = torch.aminmax(value.float() if value.itemsize == 1 else value.detach())
            spans[key] = (float(low), float(high))
    broken = [key for key, (low, high) in spans.items() if not -LARGEST <= low <= high <= LARGEST]
    diverged = [key for key in broken if not spans[key][1] - spans[key][0] < float("inf")]
    if diverged:
        raise CheckpointError(
            f"{source} has NaN or infinite values in {len(diverged)} of {len(state)} tensors, as {diverged[0]}; "
            "its training diverged, take an earlier checkpoint"
        )
    negative = [key for key, (low, _) in spans.items() if key.endswith("running_var") and low < 0]
    if broken or negative:
        raise CheckpointError(
            f"{source} has impossible values in {[*broken, *negative][0]} (beyond {LARGEST:g}, or a variance "
            "below zero): it is damaged; copy or download it again"
        )


def whole_number(value: Any) -> int | None:
    """Return an integer that was saved as itself or as a tensor; None for anything else.

    >>> whole_number(torch.tensor(3)), whole_number(3.5)
    (3, None)
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
        return int(value.item())
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def payload_fields(value: Any) -> dict[str, Any]:
    """Return a mapping, or what a record of arguments or settings holds, as a dictionary; else an empty one."""
    if not isinstance(value, InertRecord):
        return dict(value) if isinstance(value, Mapping) else {}
    # omegaconf and ml_collections keep the items in an attribute, pydantic the attributes in another.
    for holder in ("_content", "_fields", "__dict__"):
        if isinstance(value.fields.get(holder), Mapping):
            return {str(key): plain(entry) for key, entry in value.fields[holder].items()}
    if value.entries:
        return {str(key): entry for key, entry in value.entries.items()}
    if not value.fields and len(value.arguments) == 1 and isinstance(value.arguments[0], Mapping):
        return dict(value.arguments[0])
    return value.fields


def plain(value: Any, depth: int = 0) -> Any:
    """Return settings as plain dictionaries, lists and values; a record that is none of them stays."""
    if depth > 50:  # records may hold each other
        return value
    if isinstance(value, Mapping):
        return {key: plain(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, depth + 1) for entry in value]
    if isinstance(value, InertRecord):
        if "_val" in value.fields:  # a leaf of omegaconf
            return value.fields["_val"]
        if "_content" in value.fields:
            return plain(value.fields["_content"], depth + 1)
        if value.entries or value.members:
            return plain(value.entries or value.members, depth + 1)
    return value


def _describe_folder(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent}); check the path"
    names = sorted(p.name for p in path.parent.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3) or [n for n in names if n.endswith(CHECKPOINT_SUFFIXES)][:3]
    return f"; the folder has {', '.join(near)}" if near else f"; {path.parent} has no checkpoint, check the path"


def _latest_in(folder: Path) -> Path:
    inside = _checkpoints_in(folder)
    if not inside:
        if (folder / "model.json").is_file():
            raise CheckpointError(f"{folder} has model.json but no model.safetensors; is the run unfinished?")
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
    stems = {p: re.sub(r"(\.(pth|pt))?\.\w+$", "", p.name) for p in checkpoints}
    whole = [p for p in checkpoints if p.name == "model.safetensors"]
    last = [p for p in checkpoints if re.fullmatch(r"(.*[-_=])?last(-v\d+)?", stems[p])]
    group = whole or last or checkpoints
    # Lightning counts: last, last-v1, last-v2.
    names = [re.sub(r"-v\d+$", "", stems[p]) if group is last else stems[p] for p in group]
    kinds = {(re.sub(r"\d+", "#", name), p.suffix) for name, p in zip(names, group, strict=True)}
    if len(kinds) > 1 or len({p.parent for p in checkpoints}) > 1:
        return None
    return max(group, key=lambda p: [int(number) for number in re.findall(r"\d+", stems[p])])


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


def _search(payload: Any, depth: int) -> dict[str, Tensor] | None:
    if isinstance(payload, nn.Module):  # only a file that the user trusts yields one
        payload = payload.state_dict()
    if isinstance(payload, InertRecord):
        payload = payload.entries
    if not isinstance(payload, Mapping) or depth > 3:
        return None
    tensors = {k: v for k, v in payload.items() if isinstance(k, str) and isinstance(v, Tensor)}
    # A training payload may hold a stray tensor, a temperature say; weights are the bulk of their mapping.
    if tensors and 2 * len(tensors) >= len(payload):
        return tensors
    inner = [payload[name] for name in WRAPPERS if name in payload]
    if not inner:
        holders = [v for v in payload.values() if _search(v, depth + 1) is not None]
        inner = holders if len(holders) == 1 else []
    return next((state for state in (_search(value, depth + 1) for value in inner) if state), None)


def _is_safetensors(file: Path, head: bytes) -> bool:
    """Return whether a file is safetensors, by its content (length and begin of a JSON header), else by its name."""
    header = head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file.stat().st_size
    return header or (file.suffix == ".safetensors" and not head.startswith(b"PK"))


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file, device="cpu")
    except (SafetensorError, OSError, ValueError, LookupError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} is not a whole safetensors file ({_brief(error)}); copy or download it again"
        ) from error


def _read_torch(file: Path, head: bytes, trust: bool) -> Any:
    advice = "save its weights alone with torch.save(network.state_dict(), FILE)"
    trusting = f", or, if you trust its author, pass {option('trust_checkpoint')}"
    try:
        payload = _read_inert(file, head)
    except Refused as error:
        refusal = f"asks to run foreign code ({error.name[:100]}): refused; {advice}"
        if error.name.startswith(NETWORK_PACKAGES):
            refusal += trusting
    else:
        holders = [payload, *(payload[name] for name in WRAPPERS if isinstance(payload, dict) and name in payload)]
        # A record that stands in for a network has what torch keeps of every module.
        records = [value for value in holders if isinstance(value, InertRecord)]
        network = next((record for record in records if {"_modules", "_parameters"} <= record.fields.keys()), None)
        if network is None:
            return payload
        refusal = (
            f"holds a whole pickled network ({network.name}), opening it would run code: refused; {advice}{trusting}"
        )
    if not trust:
        raise CheckpointError(f"{file} {refusal}")
    try:
        return torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever that code raises
        raise CheckpointError(
            f"{file} could not be opened although it is trusted ({type(error).__name__}: {_brief(error)}); "
            "its classes must be installed as they were when it was saved"
        ) from error


def _read_inert(file: Path, head: bytes) -> Any:
    archive = head.startswith(b"PK")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file} is a Git LFS pointer, not the checkpoint; type: git lfs pull")
    if archive:
        _refuse_other_archives(file)
    elif tarfile.is_tarfile(file):
        names_in_tar(file)
        raise CheckpointError(f"{file} is a tar archive, not a checkpoint; unpack it and give the file inside")
    try:
        return read_archive(file) if archive else read_legacy(file)
    except Refused:
        raise
    except Exception as error:  # damage shows itself in many ways, and all of them end here
        if not archive and not head.startswith(b"\x80"):
            kind = "text" if re.fullmatch(rb"[\x09\x0a\x0d\x20-\x7e\x80-\xff]*", head) else "something else"
            raise CheckpointError(
                f"expected a torch or safetensors checkpoint, but {file} is {kind}; check the path"
            ) from None
        raise CheckpointError(f"{file} is damaged or cut short ({_brief(error)}); copy or download it again") from error


def _refuse_other_archives(file: Path) -> None:
    try:
        with zipfile.ZipFile(file) as opened:
            names = opened.namelist()
    except Exception as error:  # a damaged directory shows itself in many ways
        size = file.stat().st_size
        raise CheckpointError(f"{file} is damaged or cut short ({size} bytes); copy or download it again") from error
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        raise CheckpointError(f"{file} is a TorchScript archive, that is code: refused; save a state_dict")
    if not any(name.endswith("data.pkl") for name in names):
        raise CheckpointError(f"{file} is a zip archive, not a checkpoint; unpack it and give the file inside")


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
