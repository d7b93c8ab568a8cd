"""Decide which classes a pickle may name, and hold the inert records that stand in for them.

No name is ever looked up: nothing is imported, nothing is called. A name on the lists below becomes a record that keeps
what the pickle says of the object; any other name is refused before anything of it is made.
"""

import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Of the standard library these alone. Everything else there (os, subprocess, runpy, ...) has no place beside weights.
STANDARD_NAMES = {
    *("argparse.Namespace", "functools.partial", "types.SimpleNamespace", "types.GenericAlias", "_codecs.encode"),
    *("copyreg._reconstructor", "copyreg.__newobj__", "operator.getitem", "_operator.getitem"),
    *(f"collections.{name}" for name in ("OrderedDict", "defaultdict", "Counter", "deque", "ChainMap")),
    *(f"collections.{name}" for name in ("UserDict", "UserList", "UserString")),
    *(f"datetime.{name}" for name in ("datetime", "date", "time", "timedelta", "timezone")),
    *(f"builtins.{name}" for name in ("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int")),
    *(f"builtins.{name}" for name in ("list", "object", "range", "set", "slice", "str", "tuple")),
    *(f"builtins.{name}" for name in ("Ellipsis", "NotImplemented", "getattr", "type")),  # the last two with a guard
    *("decimal.Decimal", "fractions.Fraction", "uuid.UUID", "logging.getLogger"),
}
STANDARD_PATTERN = re.compile(r"pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path|typing\.[A-Z]\w*")
# Removed from some version of Python, or as powerful as the standard library: none of their classes is data.
CODE_PACKAGES = {
    *("imp", "distutils", "asyncore", "asynchat", "smtpd", "pipes", "crypt", "cgi", "nt", "posix", "commands"),
    *("pip", "setuptools", "pkg_resources", "ensurepip", "cloudpickle", "dill", "joblib", "IPython", "pytest"),
    *("_pytest", "requests", "urllib3", "paramiko", "fabric", "sh", "pexpect", "psutil", "numba", "cffi"),
}
# Frameworks whose functions, too, are left in checkpoints (a learning-rate rule, an activation).
KNOWN_PACKAGES = {
    *("solo", "omegaconf", "lightly", "lightly_train", "timm", "torchvision", "torchmetrics"),
    *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "pl_bolts"),
    *("yacs", "easydict", "addict", "munch", "ml_collections", "mmcv", "mmengine", "box", "hydra"),
}
TORCH_DATA = re.compile(
    r"torch\.(cuda\.)?\w+Storage|torch\.storage\.(UntypedStorage|TypedStorage)"
    r"|torch\.(Size|Tensor|device|strided|preserve_format|contiguous_format|channels_last|channels_last_3d)"
    r"|torch\.torch_version\.TorchVersion|torch\.per_(tensor|channel)_\w+|torch\.serialization\._get_layout"
    r"|torch\._utils\._rebuild_\w+|torch\._tensor\._rebuild_from_type_v2"
    r"|torch\.(optim|nn|distributed|amp|cuda\.amp|utils\.data)\.([a-z_]\w*\.)*_*[A-Z]\w*"
    r"|torch\.jit\._pickle\.(restore_type_tag|build_\w+list)|torch\.nn\.(functional|init)\.\w+|torch\._C\._nn\.\w+"
)
NUMPY_DATA = re.compile(
    r"numpy\.(dtype|ndarray|generic|number|bool_?|u?int\w*|float\w*|complex\w*|str_|bytes_|longlong|datetime64)"
    r"|numpy\._?core\.(multiarray\.(scalar|_reconstruct)|numeric\._frombuffer)"
    r"|numpy\.dtypes\.[A-Z]\w*|numpy\.random\.(\w+\.)?([A-Z]\w*|__\w+_ctor|__pyx_unpickle_\w+)"
)
CLASS_NAME = re.compile(r"_*[A-Z]\w*")
FORK_NAMES = {"pretrain.methods.base.static_lr"}  # of CDC's fork of solo-learn


@dataclass(frozen=True)
class ForeignName:
    """A class or function that a pickle names; only its name is known."""

    name: str


class InertRecord:
    """Stand in for an object of a foreign class: keep what was saved and have no behaviour."""

    __slots__ = ("arguments", "entries", "fields", "members", "name")

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name, self.arguments = name, arguments
        self.fields: dict[str, Any] = {}  # its attributes
        self.entries: dict[Any, Any] = {}  # its items, if it is a kind of dict
        self.members: list[Any] = []  # its items, if it is a kind of list or set

    def __repr__(self) -> str:
        return f"<{self.name}, not loaded>"

    def restore(self, state: Any) -> None:
        """Keep the attributes that the pickle gives to the object."""
        if self.name == "functools.partial" and isinstance(state, tuple):
            state = dict(zip(("func", "args", "keywords"), state, strict=False))
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # second: of __slots__
        for part in parts:
            if isinstance(part, Mapping):
                self.fields |= {str(key): value for key, value in part.items()}
            elif part is not None:
                self.fields["state"] = state


def full_name(module: str, name: str) -> str:
    """Return the name as Python 3 spells it; Python 2 and old pickle protocols have other module names.

    >>> full_name("__builtin__", "long")
    'builtins.int'
    """
    module, name = NAME_MAPPING.get((module, name), (module, name))
    return f"{IMPORT_MAPPING.get(module, module)}.{name}"


def is_allowed(module: str, name: str) -> bool:
    """Return whether a record may stand in for what is named, by the name alone.

    >>> is_allowed("argparse", "Namespace"), is_allowed("os", "system")
    (True, False)
    """
    full = full_name(module, name)
    parts = full.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return False
    package, last = parts[0], parts[-1]
    if full in FORK_NAMES:
        return True
    if package in sys.stdlib_module_names or package in CODE_PACKAGES:
        return full in STANDARD_NAMES or STANDARD_PATTERN.fullmatch(full) is not None
    if package == "torch":
        return isinstance(torch_constant(full), torch.dtype) or TORCH_DATA.fullmatch(full) is not None
    if package == "numpy":
        return NUMPY_DATA.fullmatch(full) is not None
    if package in KNOWN_PACKAGES:
        # ``timm.layers.os.system`` is none of timm's functions.
        return CLASS_NAME.fullmatch(last) is not None or not set(parts[1:]) & sys.stdlib_module_names
    return all(CLASS_NAME.fullmatch(part) for part in name.split("."))  # ``Config`` or, nested, ``Outer.Inner``


def torch_constant(full: str) -> Any:
    """Return what ``torch.NAME`` is, without triggering torch's imports on demand."""
    package, _, name = full.partition(".")
    return vars(torch).get(name) if package == "torch" else None
