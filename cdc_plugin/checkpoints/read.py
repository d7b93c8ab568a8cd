"""Find the checkpoint that a path means, open it without running anything inside it, and find the weights it holds.

A run folder holds many checkpoints. The latest is meant: the one called last, else the one with the highest number
(epoch, then step), if the names differ in their numbers alone. Sub-folders are searched for the only run in them.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import logging
import math
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.checkpoints.safe_pickle.containers import read_archive, read_legacy
from cdc_plugin.checkpoints.safe_pickle.machine import Refused
from cdc_plugin.checkpoints.safe_pickle.names import InertRecord
from cdc_plugin.checkpoints.weights import strip_prefix
from cdc_plugin.data.atomic import has_content
from cdc_plugin.data.sources.shards import COMPRESSED_MAGIC
from cdc_plugin.errors import CheckpointError, UserError, join_words, option

log = logging.getLogger("cdc_plugin")
CHECKPOINT_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".tar", ".bin")
HUB_SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json", "open_clip_config.json")
SIDECARS = (*HUB_SETTINGS, "args.json", "model.json", "args.yaml", "hparams.yaml")
# What a training run writes once, above the folder of its checkpoints.
MOST_TENSORS = 50_000  # the largest networks have some thousand
LONGEST_NAME = 500  # letters of a weight's name
MOST_VALUES = 100_000  # of settings beside a checkpoint
RUN_SIDECARS = ("args.json", "args.yaml", "hparams.yaml")
DEEPEST_YAML = 100
SIDECAR_LIMITS = {".json": 1_000_000, ".yaml": 100_000}  # bytes; reading YAML is slow
# How the hub's libraries name the parts of weights that are too large for one file.
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)")
# A run that has both keeps more facts in its checkpoints than in what it exports.
RUN_FOLDERS = ("checkpoints", "exported_models")
DEEPEST_MODULE = 20
LEVELS, MOST_FOLDERS = 4, 2000  # that are searched: cells/SET/METHOD/SEED of a comparison
NAMED = 5  # runs that an error lists
# Where training scripts keep the weights, most specific first; moving averages ("model_ema") are the formats' matter.
WRAPPERS = (
    *("state_dict", "model_state_dict", "model", "teacher", "student", "net", "network", "module"),
    *("eval_model", "train_model", "phi1"),  # FixMatch's average and network; TURTLE's first task head
    *("classy_state_dict", "base_model", "trunk"),  # VISSL's, one inside the other
    "target_encoder",  # I-JEPA's, the one that is evaluated
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
    payload = _read_parts(file, trust) if PART.fullmatch(file.name) else _read_file(file, trust)
    if isinstance(payload, Mapping) and {"refiner", "digest"} <= payload.keys():
        raise CheckpointError(
            f"{file} is the state of an unfinished run, not its model; finish it first: "
            f"cdc-refine --resume --out {join_words([file.parent])}; its model is then {file.parent}"
        )
    state = find_state_dict(payload, file.name)
    _refuse_many(len(state), file)
    check_finite(state, file.name)
    return Checkpoint(file, payload, read_sidecars(file, _warn_once), state)


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
    if any(len(key) > LONGEST_NAME for key in found):
        raise CheckpointError(f"{source} has a weight whose name is longer than {LONGEST_NAME} letters: it is damaged")
    while prefix := next((p for p in DATA_PARALLEL_PREFIXES if all(k.startswith(p) for k in found)), ""):
        found = strip_prefix(found, prefix)
    return found


def locate(path: Path) -> Path:
    """Return the checkpoint file that a path means, which may be the folder of a run."""
    if path.is_dir():
        return _latest_in(_enter_run(path))
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}{_find_published(path) or _describe_folder(path)}")
    if not path.is_file():
        raise CheckpointError(f"expected a checkpoint file, but {path} is not a file; check the path")
    if path.stat().st_size == 0:
        raise CheckpointError(f"the checkpoint {path} is empty (0 bytes); copy or download it again")
    return path


def find_run(path: str | Path) -> str | Path:
    """Return the only run in a folder, and say so; anything else is returned as it is."""
    folder = Path(os.path.expanduser(path))
    run = _enter_run(folder) if folder.is_dir() else folder
    if run == folder:
        return path
    log.warning("%s: taking %s, the only run in it", path, run)
    return run


def _enter_run(path: Path) -> Path:
    """Return the folder of the only run in a folder, which may be itself; refuse a folder that holds several."""
    left = [MOST_FOLDERS]
    runs = list({run.resolve(): run for run in _find_runs(path, left)}.values())
    if not left[0]:
        raise CheckpointError(f"{path} holds too many folders to search for a run; give the folder of the run")
    if len(runs) < 2:
        return runs[0] if runs else path
    runs.sort(key=lambda run: max(p.stat().st_mtime for p in _checkpoints_of(run)), reverse=True)
    unfinished = [run for run in runs if (run / "config.yaml").is_file() and not _is_result(run)]  # of this package
    texts = [f"{run}{' (unfinished)' if run in unfinished else ''}" for run in runs]
    more = f" and {len(runs) - NAMED} more" if len(runs) > NAMED else ""
    raise CheckpointError(
        f"{path} holds {len(runs)} runs; give one of them, newest first: {', '.join(texts[:NAMED])}{more}"
    )


def read_sidecars(file: Path, report: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Return the settings beside a checkpoint, or those of its run one folder up, by file name."""
    found: dict[str, Any] = {}
    names = (*SIDECARS, f"{file.stem}.json")
    places = [file.parent / name for name in names] + [file.parent.parent / name for name in RUN_SIDECARS]
    for beside in places:
        if beside.name in found or not has_content(beside) or beside.stat().st_size > SIDECAR_LIMITS[beside.suffix]:
            continue
        try:
            found[beside.name] = _parse_sidecar(beside)
        except (ValueError, RecursionError, OSError) as error:  # it may be another tool's
            report(f"{beside} cannot be read ({_brief(error)}), so nothing is taken from it")
    return found


def read_run_args(path: str | Path) -> tuple[Any, Path]:
    """Return the ``args.json`` of the run that a checkpoint or folder belongs to, None without one, and its folder."""
    start = Path(os.path.expanduser(path))
    try:
        # In the folder or beside the file; else beside the checkpoint that is found below the folder.
        beside = (file for file in (start / "checkpoint", start) if (file.parent / "args.json").is_file())
        file = next(beside, None) or locate(start)
        return read_sidecars(file).get("args.json"), file.parent.resolve()
    except (OSError, UserError):  # reading the weights will report it
        return None, start


def check_finite(state: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights with NaN, infinite or absurd values, and variances below zero."""
    spans = {}
    for key, value in state.items():
        if value.is_floating_point() and value.numel():
            try:
                low, high = torch.aminmax(value.float() if value.itemsize == 1 else value.detach())
            except NotImplementedError as error:  # packed numbers of four bits, for example
                kind = str(value.dtype).removeprefix("torch.")
                raise CheckpointError(f"{source} holds {key} as {kind}; expected float32 or float16") from error
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


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _find_published(path: Path) -> str:
    """Return how to type what looks like the name of published weights and not like a file."""
    name = path.as_posix()
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not path.parent.is_dir() and not path.suffix[1:].isalpha():
        return f"; for a repository of the hub type {option('backbone', f'hf-hub:{name}')}"
    import timm

    known = "/" not in name and timm.is_model(name.split(".")[0])
    return f"; for weights that timm publishes type {option('backbone', f'timm:{name}')}" if known else ""


def _describe_folder(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent}); check the path"
    names = sorted(os.listdir(path.parent))[:MOST_FOLDERS]
    near = difflib.get_close_matches(path.name, names, n=3) or [n for n in names if n.endswith(CHECKPOINT_SUFFIXES)][:3]
    return f"; the folder has {', '.join(near)}" if near else f"; {path.parent} has no checkpoint, check the path"


def _latest_in(folder: Path) -> Path:
    inside = _checkpoints_of(folder)
    if not inside:
        if (folder / "model.json").is_file():
            raise CheckpointError(f"{folder} has model.json but no model.safetensors; is the run unfinished?")
        names = ", ".join(sorted(os.listdir(folder))[:5]) or "nothing"
        raise CheckpointError(f"expected a checkpoint in the folder {folder}, found {names}; give the checkpoint file")
    chosen = _choose(inside)
    if chosen is None:
        names = ", ".join(str(p.relative_to(folder)) for p in inside[:5])
        raise CheckpointError(f"the folder {folder} holds {len(inside)} checkpoints ({names}); name one of them")
    return locate(chosen)


def _checkpoints_of(run: Path) -> list[Path]:
    """Return the checkpoints of one run: those in its folder, else in the sub-folder that its tool keeps them in."""
    inside: list[Path] = []
    for place in (run, *(run / name for name in RUN_FOLDERS)):
        if not inside and place.is_dir():
            names = [name for name in os.listdir(place) if os.path.splitext(name)[1] in CHECKPOINT_SUFFIXES]
            inside = [p for p in map(place.joinpath, sorted(names)) if p.is_file()]
    return inside


def _find_runs(folder: Path, left: list[int], levels: int = LEVELS) -> list[Path]:
    """Return the folders that hold checkpoints, this one or those below, while folders to search are ``left``."""
    left[0] = max(0, left[0] - 1)
    if not left[0] or _is_result(folder):
        return [folder] if left[0] else []
    own = [folder] if _checkpoints_of(folder) else []
    names = RUN_FOLDERS if own else ()
    with os.scandir(folder) as entries:  # which knows folders without looking at each of very many files
        folders = [e.name for e in entries if (os.path.isdir(e) if e.is_symlink() else e.is_dir())]
    below = sorted(name for name in folders if not name.startswith(".") and name not in names)
    found = [run for name in (below if levels else ()) for run in _find_runs(folder / name, left, levels - 1)]
    # Another tool keeps all sorts of files below its run; results of this package are runs of their own.
    return [*own, *filter(_is_result, found)] if own else found


def _is_result(folder: Path) -> bool:
    return (folder / "model.json").is_file() and (folder / "model.safetensors").is_file()


def _choose(checkpoints: list[Path]) -> Path | None:
    """Return the latest checkpoint of one run; None if they are of several runs, or of unlike names."""
    stems = {p: re.sub(r"(\.(pth|pt))?\.\w+$", "", p.name) for p in checkpoints}
    whole = [p for p in checkpoints if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", p.name)]
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
    # YAML's reader looks at every open bracket again and again.
    depths = itertools.accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(mark, 0) for mark in text)
    if max(depths, default=0) > DEEPEST_YAML:
        raise ValueError("its brackets are nested beyond reason")
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
        loader = DataLoader(text)
        node = loader.get_single_node()
        if _count_values(node, {}) > MOST_VALUES:  # each use of an anchor is a copy, and so is what << merges
            raise ValueError("its anchors repeat each other beyond reason")
        return None if node is None else loader.construct_document(node)
    except Exception as error:  # of a wrong tag: whatever the constructor of that type raises
        raise ValueError(_brief(error)) from error


def _count_values(node: Any, known: dict[int, float]) -> float:
    """Return how many values a YAML node stands for, those below an anchor wherever it is used."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is counted: a node that holds itself has no end
        inside = node.value if node is not None and not isinstance(node.value, str) else ()
        known[id(node)] = 1 + sum(
            _count_values(each, known) for item in inside for each in (item if isinstance(item, tuple) else (item,))
        )
    return known[id(node)]


def _search(payload: Any, depth: int) -> dict[str, Tensor] | None:
    if isinstance(payload, nn.Module):  # only a file that the user trusts yields one
        payload = payload.state_dict()
    if isinstance(payload, InertRecord):
        payload = payload.entries
    if not isinstance(payload, Mapping) or depth > 4:
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


def _read_parts(file: Path, trust: bool) -> dict[str, Tensor]:
    """Return the weights of all parts, of which one is given: each weight lies in one of them."""
    found: re.Match[str] = PART.fullmatch(file.name)  # type: ignore[assignment]
    stem, _, count, suffix = found.groups()
    left = {f"{stem}-{number:05}-of-{count}{suffix}" for number in range(1, int(count) + 1)}
    left -= {part.name for part in file.parent.iterdir()}
    if left:
        raise CheckpointError(
            f"{file} is one of {int(count)} parts, and {len(left)} are not beside it, as {min(left)}; copy them there"
        )
    state: dict[str, Tensor] = {}
    for number in range(1, int(count) + 1):
        part = file.with_name(f"{stem}-{number:05}-of-{count}{suffix}")
        state |= find_state_dict(_read_file(part, trust), part.name)
    return state


def _read_file(file: Path, trust: bool) -> Any:
    with file.open("rb") as stream:
        head = stream.read(512)
    return _read_safetensors(file) if _is_safetensors(file, head) else _read_torch(file, head, trust)


def _is_safetensors(file: Path, head: bytes) -> bool:
    """Return whether a file is safetensors, by its content (length and begin of a JSON header), else by its name."""
    header = head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file.stat().st_size
    return header or (file.suffix == ".safetensors" and not head.startswith(b"PK"))


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        with safe_open(file, framework="pt") as opened:
            _refuse_many(len(opened.keys()), file)
        return load_file(file, device="cpu")
    except (SafetensorError, OSError, ValueError, LookupError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} is not a whole safetensors file ({_brief(error)}); copy or download it again"
        ) from error


def _refuse_many(count: int, file: Path) -> None:
    if count > MOST_TENSORS:
        raise CheckpointError(f"{file} holds {count:,} tensors; expected the at most {MOST_TENSORS:,} of a network")


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
    elif head[257:262] == b"ustar" or head.startswith(COMPRESSED_MAGIC):  # never unpacked: its content may have no end
        kind = "a tar archive" if head[257:262] == b"ustar" else "compressed"
        raise CheckpointError(f"{file} is {kind}, not a checkpoint; unpack it and give the file inside")
    try:
        payload = read_archive(file) if archive else read_legacy(file)
        scripted = isinstance(payload, InertRecord) and payload.name.startswith("__torch__.")
        return {"state_dict": read_script(payload)} if scripted else payload
    except Refused:
        raise
    except Exception as error:  # damage shows itself in many ways, and all of them end here
        if not archive and not head.startswith(b"\x80"):
            kind = "text" if re.fullmatch(rb"[\x09\x0a\x0d\x20-\x7e\x80-\xff]*", head) else "something else"
            raise CheckpointError(
                f"expected a torch or safetensors checkpoint, but {file} is {kind}; check the path"
            ) from None
        raise CheckpointError(f"{file} is damaged or cut short ({_brief(error)}); copy or download it again") from error


def read_script(module: InertRecord, prefix: str = "", seen: set[int] | None = None) -> dict[str, Tensor]:
    """Return the named weights of a TorchScript archive; its code is not run, and not even read."""
    seen = set() if seen is None else seen
    seen.add(id(module))
    state: dict[str, Tensor] = {}
    for name, value in module.fields.items():
        if isinstance(value, Tensor) and name != "attn_mask":  # which is no weight, but minus infinity
            state[f"{prefix}{name}"] = value
        elif isinstance(value, InertRecord) and id(value) not in seen and prefix.count(".") < DEEPEST_MODULE:
            state |= read_script(value, f"{prefix}{name}.", seen)
    return state


def _refuse_other_archives(file: Path) -> None:
    try:
        with zipfile.ZipFile(file) as opened:
            names = opened.namelist()
    except Exception as error:  # a damaged directory shows itself in many ways
        size = file.stat().st_size
        raise CheckpointError(f"{file} is damaged or cut short ({size} bytes); copy or download it again") from error
    if not any(name.endswith("data.pkl") for name in names):
        raise CheckpointError(f"{file} is a zip archive, not a checkpoint; unpack it and give the file inside")


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
