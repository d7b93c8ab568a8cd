"""Build the values that a checkpoint's pickle is made of: tensors, numpy arrays and numbers, paths, bytes."""

import math
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdc_plugin.checkpoints.safe_pickle.names import ForeignName, InertRecord

# torch's names of the storage classes; quantised ones are of no use here.
STORAGE_TYPES = {
    **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16},
    **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
    **{"Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
    "Untyped": torch.uint8,
}
# A tensor may repeat a few numbers (stride 0), but not into gigabytes.
EXPANDED = 1_000_000
SIMPLE_KEYS = (str, int, bytes, type(None), Tensor, InertRecord, ForeignName, torch.dtype)
DEPTH, NODES = 200, 10_000_000
LONGEST_PATH = 4096  # letters, and parts
NUMPY_TYPES = r"b1|[iu][1248]|f(2|4|8)|c(8|16)|[US]\d{1,6}"


@dataclass(frozen=True)
class Storage:
    """The numbers of one or several tensors, one after the other."""

    numbers: Tensor


class NumpyKind:
    """numpy's dtype, of plain numbers and text only; ``text`` is numpy's abbreviation, "f8"."""

    def __init__(self, text: Any, *_: Any) -> None:
        self.text, self.order = text, "<"

    def restore(self, state: Any) -> None:
        """Take the byte order; the rest describes types that are not read."""
        if isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str) and state[1] in "<>|=":
            self.order = state[1]

    def resolve(self) -> np.dtype[Any] | None:
        """Return the type itself; None for objects, dates and records, which are not read."""
        if not isinstance(self.text, str) or not re.fullmatch(NUMPY_TYPES, self.text):
            return None
        return np.dtype(self.text).newbyteorder(">" if self.order == ">" else "<")


def storage_type(name: Any) -> torch.dtype:
    """Return the number type of a storage class, as ``torch.FloatStorage``."""
    text = name.name if isinstance(name, ForeignName) else ""
    found = re.fullmatch(r"torch\.(?:cuda\.|storage\.)?(\w+)Storage", text)
    if found is None or found[1] not in STORAGE_TYPES:
        raise UnpicklingError(f"{text or name} is no kind of numbers that can be read")
    return STORAGE_TYPES[found[1]]


def rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    """Return a tensor over a part of a storage, if that part exists."""
    if not isinstance(storage, Storage):
        raise UnpicklingError("a tensor has no numbers")
    sizes, strides = tuple(size), tuple(stride)
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (offset, *sizes, *strides))
    if not whole or len(sizes) != len(strides) or len(sizes) > 32:
        raise UnpicklingError(f"a tensor of shape {sizes[:8]} is impossible")
    count, stored = math.prod(sizes), storage.numbers.numel()
    last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) if count else 0
    if count and (last >= stored or count > max(stored, EXPANDED)):
        raise UnpicklingError(f"a tensor of shape {sizes[:8]} needs more numbers than the file has")
    return storage.numbers.as_strided(sizes, strides, offset if count else 0)


def rebuild_typed_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, kind: Any, *_: Any
) -> Tensor:
    """Return a tensor of a number type that has no storage class of its own."""
    if not isinstance(storage, Storage) or not isinstance(kind, torch.dtype):
        raise UnpicklingError("a tensor has no numbers")
    return rebuild_tensor(Storage(storage.numbers.view(kind)), offset, size, stride)


def fill_array(array: np.ndarray[Any, Any], state: Any) -> None:
    """Give an array that was begun empty its type, shape and numbers."""
    _, shape, kind, fortran, content = state
    dtype = kind.resolve() if isinstance(kind, NumpyKind) else None
    if dtype is None:
        return  # it stays empty: no weight is such an array
    content = content.encode("latin1") if isinstance(content, str) else content
    whole = isinstance(content, bytes) and all(type(n) is int and n >= 0 for n in shape)
    if not whole or math.prod(shape) * dtype.itemsize != len(content):
        raise UnpicklingError("a numpy array has not the bytes that its shape asks for")
    array.__setstate__((1, tuple(shape), dtype, bool(fortran), content))  # type: ignore[arg-type]


def check_key(value: Any) -> Any:
    """Return a key of a dictionary or item of a set, of a kind whose hashes nobody can make collide or nest."""
    parts, largest = (value, 2**32) if isinstance(value, tuple) else ((value,), 2**61 - 1)
    kinds = SIMPLE_KEYS if isinstance(value, tuple) else (*SIMPLE_KEYS, float)
    if not all(isinstance(part, kinds) and not (isinstance(part, int) and abs(part) >= largest) for part in parts):
        raise UnpicklingError(f"a value of type {type(value).__name__} is used as a key")
    return value


def check_size(root: Any) -> None:
    """Refuse values nested so deeply, or shared so often, that walking through them would not end."""
    known: dict[int, tuple[int, int]] = {}  # depth and number of nodes below a container
    begun: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        value, ended = waiting.pop()
        inside = _inside(value)
        if ended:
            below = [known.get(id(child), (0, 1)) for child in inside]
            depth, nodes = 1 + max(d for d, _ in below), 1 + sum(n for _, n in below)
            if depth > DEPTH or nodes > NODES:
                raise UnpicklingError("its content is nested beyond reason")
            known[id(value)] = (depth, nodes)
        elif inside and id(value) not in begun:
            begun.add(id(value))
            waiting.append((value, True))
            waiting.extend((child, False) for child in inside)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, InertRecord):
        return [value.arguments, value.fields, value.entries, value.members]
    return []


def _tensor_itself(data: Any, *_: Any) -> Tensor:
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data)
    if not isinstance(data, Tensor):
        raise UnpicklingError("a parameter is no tensor")
    return data


def _scalar(kind: Any, content: Any = b"") -> Any:
    """Return a numpy number as Python's own."""
    dtype = kind.resolve() if isinstance(kind, NumpyKind) else None
    if dtype is None:
        return InertRecord("numpy.generic", (kind, content))
    content = content.encode("latin1") if isinstance(content, str) else content
    if not isinstance(content, bytes) or len(content) != dtype.itemsize:
        raise UnpicklingError("a numpy number has not the bytes that its type asks for")
    return np.frombuffer(content, dtype)[0].item() if content else ""


def _begin_array(*_: Any) -> np.ndarray[Any, Any]:
    return np.empty(0, np.uint8)


def _buffered_array(content: Any, kind: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    array = _begin_array()
    fill_array(array, (1, shape, kind, order == "F", bytes(content) if isinstance(content, bytearray) else content))
    return array


def _path(kind: type[pathlib.PurePath], *parts: Any) -> str:
    texts = [str(part)[:LONGEST_PATH] for part in parts[:LONGEST_PATH]]
    return str(kind(*texts))[:LONGEST_PATH]


def _mapping(*arguments: Any) -> dict[Any, Any]:
    """Return a dictionary with its first content, a dictionary or, from Python 2, a list of pairs."""
    begun = arguments[-1] if arguments else None
    if isinstance(begun, dict):
        return dict(begun)
    if isinstance(begun, list) and all(isinstance(p, list | tuple) and isinstance(p[0], str | int) for p in begun):
        return {check_key(pair[0]): pair[1] for pair in begun}
    return {}


def _sequence(*arguments: Any) -> list[Any]:
    return list(arguments[0]) if arguments and isinstance(arguments[0], list | tuple) else []


def _set(*arguments: Any) -> set[Any]:
    return set(map(check_key, _sequence(*arguments)))


def _bytes(content: Any = b"", encoding: Any = "latin1") -> bytes:
    if isinstance(content, str) and encoding in ("latin1", "latin-1", "utf-8", "ascii"):
        return content.encode(encoding)
    if not isinstance(content, bytes | bytearray):
        raise UnpicklingError("bytes are expected")
    return bytes(content)


def _text(value: Any = "", *_: Any) -> str:
    return str(value)[:1000] if isinstance(value, str | int) else ""


def _counted(*arguments: Any) -> tuple[Any, ...]:
    return tuple(_sequence(*arguments))


def _complex(*parts: Any) -> Any:
    return complex(*(float(part) for part in parts)) if len(parts) == 2 else InertRecord("builtins.complex", parts)


PATHLIB = ("", "_local.")  # newer releases of Python name a submodule
PATHS: dict[str, type[pathlib.PurePath]] = {
    **dict.fromkeys(("Path", "PosixPath", "PurePath", "PurePosixPath"), pathlib.PurePosixPath),
    **dict.fromkeys(("WindowsPath", "PureWindowsPath"), pathlib.PureWindowsPath),
}
BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": rebuild_typed_tensor,
    "torch._utils._rebuild_parameter": _tensor_itself,
    "torch._utils._rebuild_parameter_with_state": _tensor_itself,
    "torch._utils._rebuild_device_tensor_from_numpy": _tensor_itself,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _tensor_itself,
    "torch.nn.parameter.Parameter": _tensor_itself,
    "torch.Size": _counted,
    "torch.device": _text,
    "torch.torch_version.TorchVersion": _text,
    "torch.serialization._get_layout": _text,
    "numpy.dtype": NumpyKind,
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _begin_array for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _buffered_array for core in ("core", "_core")},
    **{f"collections.{name}": _mapping for name in ("OrderedDict", "defaultdict", "Counter")},
    "collections.deque": _sequence,
    **{"builtins.dict": _mapping, "builtins.list": _sequence, "builtins.tuple": _counted},
    **{"builtins.set": _set, "builtins.frozenset": _set, "builtins.complex": _complex},
    **{"builtins.bytes": _bytes, "builtins.bytearray": _bytes, "_codecs.encode": _bytes},
    **{f"pathlib.{part}{name}": partial(_path, kind) for part in PATHLIB for name, kind in PATHS.items()},
}
