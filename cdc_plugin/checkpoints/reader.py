"""Opening checkpoint files without running anything inside them, and finding the weights they hold."""

from __future__ import annotations

import difflib
import json
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.errors import UserError

CHECKPOINT_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".tar", ".bin")
SIDECARS = ("config.json", "args.json", "model.json", "args.yaml")
# Where training scripts keep the weights, most telling first.
WRAPPERS = ("state_dict", "model_state_dict", "model", "teacher", "student", "net", "network", "module")
DATA_PARALLEL_PREFIXES = ("module.", "_orig_mod.")
MODULE_PACKAGES = ("torch.nn.modules.", "torchvision.models", "timm.")
# torch.load reports a damaged file in many ways.
LOAD_ERRORS = (
    *(pickle.UnpicklingError, RuntimeError, EOFError, OSError),
    *(ValueError, LookupError, AttributeError, TypeError, AssertionError),
)


class InertRecord:
    """Takes the place of a class named in a checkpoint: it keeps the fields and has no behaviour."""

    __slots__ = ("fields",)

    def __init__(self, *_arguments: object) -> None:
        self.fields: dict[str, Any] = {}

    def __new__(cls, *_arguments: object) -> InertRecord:
        record = super().__new__(cls)
        record.fields = {}
        return record

    def __setstate__(self, state: object) -> None:
        if isinstance(state, Mapping):
            self.fields = {str(key): value for key, value in state.items()}


# Classes that training scripts leave beside the weights. A format adds its own with ``read_as_inert``.
_inert_names: set[str] = {
    "argparse.Namespace",
    "numpy.dtype",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "_codecs.encode",
}


@dataclass(frozen=True)
class Checkpoint:
    """A file that was read: its content, the small files beside it by name, and its weights."""

    path: Path
    payload: Any
    sidecar: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def below(self, prefix: str) -> Checkpoint:
        """The same file with the weights below a prefix alone, as if they had been saved by themselves."""
        return replace(self, state=strip_prefix(self.state, prefix))


def read_as_inert(*names: str) -> None:
    """Let checkpoints name these classes (``package.Class``); an ``InertRecord`` stands in for them."""
    _inert_names.update(names)


def read_checkpoint(path: str | Path, trust: bool = False) -> Checkpoint:
    """Read a checkpoint file, or the one in a folder, and make sure that it holds finite weights.

    Args:
        trust: open pickled modules, which runs the code they name; never without the user's word.
    """
    file = locate(Path(path))
    if file.suffix == ".safetensors":
        payload: Any = _read_safetensors(file)
    else:
        payload = _read_torch(file)
    state = find_state_dict(payload, file.name)
    check_finite(state, file.name)
    return Checkpoint(file, payload, _read_sidecars(file), state)


def locate(path: Path) -> Path:
    """The checkpoint file meant by a path, which may be the folder that holds it."""
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in CHECKPOINT_SUFFIXES)
        preferred = [p for p in inside if p.name == "model.safetensors"] or inside
        if not preferred and (path / "model.json").is_file():
            raise UserError(f"{path} has model.json but no model.safetensors; is the run unfinished?")
        if not preferred:
            names = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
            raise UserError(f"expected a checkpoint in the folder {path}, found {names}; give the checkpoint file")
        if len(preferred) > 1:
            names = ", ".join(p.name for p in preferred[:5])
            raise UserError(f"the folder {path} holds {len(preferred)} checkpoints ({names}); name one of them")
        return preferred[0]
    if not path.exists():
        raise UserError(f"there is no checkpoint {path}{_nearby(path)}")
    if path.stat().st_size == 0:
        raise UserError(f"the checkpoint {path} is empty (0 bytes); copy or download it again")
    return path


def find_state_dict(payload: Any, source: str = "the checkpoint") -> dict[str, Tensor]:
    """The named weights inside a payload, wrappers' names and data-parallel prefixes taken away."""
    found = _search(payload, depth=0)
    if found is None:
        keys = ", ".join(map(str, list(payload)[:6])) if isinstance(payload, Mapping) else type(payload).__name__
        raise UserError(
            f"expected named tensors in {source}, found none (it holds: {keys or 'nothing'}); "
            "save the network with torch.save(network.state_dict(), FILE)"
        )
    while True:
        prefix = next((p for p in DATA_PARALLEL_PREFIXES if all(k.startswith(p) for k in found)), None)
        if prefix is None:
            return found
        found = strip_prefix(found, prefix)


def strip_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries below a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def check_finite(state: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights with NaN or infinite values."""
    broken = [k for k, v in state.items() if v.is_floating_point() and not torch.isfinite(v).all()]
    if broken:
        raise UserError(
            f"{source} has NaN or infinite values in {len(broken)} of {len(state)} tensors, as {broken[0]}; "
            "its training diverged, take an earlier checkpoint"
        )


def payload_fields(value: Any) -> dict[str, Any]:
    """A mapping or an inert record as a plain dictionary; empty for anything else."""
    if isinstance(value, InertRecord):
        return value.fields
    return dict(value) if isinstance(value, Mapping) else {}


def _search(payload: Any, depth: int) -> dict[str, Tensor] | None:
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


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file, device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{file} is not a whole safetensors file ({error}); copy or download it again") from error


def _read_torch(file: Path) -> Any:
    archive = zipfile.is_zipfile(file)
    _refuse_what_is_no_checkpoint(file, archive)
    allowed = [(InertRecord, name) for name in sorted(_inert_names)]
    try:
        with torch.serialization.safe_globals(allowed):  # type: ignore[arg-type]
            return torch.load(file, map_location="cpu", weights_only=True, mmap=archive or None)
    except LOAD_ERRORS as error:
        foreign = sorted(set(_globals_named_in(file, archive)) - _inert_names)
        refused = [name for name in foreign if f" {name} " in f"{error} "] or [
            name for name in foreign if not name.startswith(("torch.", "collections.", "torch_utils"))
        ]
        modules = [name for name in foreign if name.startswith(MODULE_PACKAGES)]
        if modules:
            raise UserError(
                f"{file} holds a whole pickled network ({modules[0]}), opening it would run code: refused; "
                "save torch.save(network.state_dict(), FILE) instead"
            ) from None
        if refused:
            raise UserError(
                f"{file} asks to run foreign classes ({', '.join(refused[:5])}): refused; "
                "save its weights alone with torch.save(network.state_dict(), FILE)"
            ) from None
        raise UserError(f"{file} is damaged or cut short; copy or download it again") from error


def _refuse_what_is_no_checkpoint(file: Path, archive: bool) -> None:
    with file.open("rb") as stream:
        head = stream.read(512)
    if archive:
        with zipfile.ZipFile(file) as opened:
            names = opened.namelist()
        if any(name.endswith("/constants.pkl") for name in names):
            raise UserError(f"{file} is a TorchScript archive, that is code: refused; save a state_dict")
        if not any(name.endswith("data.pkl") for name in names):
            raise UserError(f"{file} is a zip archive, not a checkpoint; unpack it and give the file inside")
    elif head.startswith(b"PK"):
        raise UserError(f"{file} is cut short ({file.stat().st_size} bytes); copy or download it again")
    elif head.startswith(b"version https://git-lfs"):
        raise UserError(f"{file} is a Git LFS pointer, not the checkpoint; type: git lfs pull")
    elif not head.startswith(b"\x80"):
        kind = "text" if re.fullmatch(rb"[\x09\x0a\x0d\x20-\x7e\x80-\xff]*", head) else "something else"
        raise UserError(f"expected a torch or safetensors checkpoint, but {file} is {kind}; check the path")


def _globals_named_in(file: Path, archive: bool) -> Iterator[str]:
    """Names of the classes a pickle refers to, read from its opcodes without executing them."""
    if archive:
        with zipfile.ZipFile(file) as opened:
            member = next(name for name in opened.namelist() if name.endswith("data.pkl"))
            content = opened.read(member)
    else:
        content = file.read_bytes()
    start = 0
    try:
        while start < len(content):  # a legacy file is several pickles, then the raw numbers
            recent: list[str] = []
            for opcode, argument, position in pickletools.genops(content[start:]):
                if opcode.name == "GLOBAL":
                    yield str(argument).replace(" ", ".")
                elif opcode.name == "STACK_GLOBAL" and len(recent) >= 2:
                    yield ".".join(recent[-2:])
                elif isinstance(argument, str):
                    recent.append(argument)
                if opcode.name == "STOP":
                    start += (position or 0) + 1
                    break
    except (ValueError, IndexError, UnicodeDecodeError):
        return


def _read_sidecars(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in SIDECARS:
        beside = file.parent / name
        if not beside.is_file() or beside.stat().st_size > 1_000_000:
            continue
        try:
            found[name] = _parse_sidecar(beside)
        except ValueError:
            continue  # somebody else's file; a format that needs it says that it is missing
    return found


def _parse_sidecar(file: Path) -> Any:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent}); check the path"
    names = sorted(p.name for p in path.parent.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3) or [n for n in names if n.endswith(CHECKPOINT_SUFFIXES)][:3]
    return f"; the folder has {', '.join(near)}" if near else f"; {path.parent} has no checkpoint, check the path"
