"""A GPU that this machine does not have: CPU tensors that say they are on it, with every operation checked.

Inside `PretendDevice` a tensor that is made on or moved to the device is one of a subclass. Each operation notes where
it mixes devices, makes the host wait for the device, or computes in float64 there, by the line of the package it
was called from. Values are those of the CPU, so whole commands run.
"""

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only

PACKAGE = "/cdc_plugin/"
# Operations whose result the host reads, or whose result's shape depends on values.
WAITING = {
    Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
    torch.bincount, Tensor.bincount, torch.equal, Tensor.equal, torch.allclose, torch.nonzero, Tensor.nonzero,
    torch.unique, Tensor.unique, torch.masked_select, Tensor.masked_select, torch.isin,
}  # fmt: skip
INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
# Of what the package uses, operations that Apple's devices have only in later versions than the oldest torch it takes.
MISSING_ON_MPS: dict[Callable, Callable[..., bool]] = {
    F.interpolate: lambda *_, antialias=False, **__: antialias,
    F.grid_sample: lambda *_, padding_mode="zeros", **__: padding_mode == "border",
    torch.special.entr: lambda *_, **__: True,
    Tensor.index_add_: lambda sums, *_, **__: sums.dtype == torch.int64,
    Tensor.scatter_add_: lambda sums, *_, **__: sums.dtype == torch.int64,
}
# Operations that carry values between devices by their meaning.
CARRYING = {Tensor.copy_}


class OnDevice(Tensor):
    """A tensor that says it is on the device."""


class PretendDevice(TorchFunctionMode):
    """Run what is inside as on a machine with a device of this name, and count what it would suffer from."""

    def __init__(self, name: str = "cuda:0") -> None:
        super().__init__()
        self.device = torch.device(name)
        self.mixed: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.doubles: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self._changed = contextlib.ExitStack()

    def __enter__(self) -> "PretendDevice":
        # Modules take the moved tensors as their parameters, in place of writing into the old ones.
        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        self._changed.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        state = torch.zeros(16, dtype=torch.uint8)
        calls = {"get_rng_state": lambda *_: state, "set_rng_state": lambda *_: None, "manual_seed": lambda _: None}
        calls |= {"synchronize": self._synchronize, "is_bf16_supported": lambda *_, **__: False}
        calls |= {"reset_peak_memory_stats": lambda *_: None, "max_memory_reserved": lambda *_: 3 * 2**20}
        for name, call in calls.items():
            self._changed.enter_context(mock.patch.object(torch.cuda, name, call))
        # Without a GPU torch switches both off; the CPU's do the same, float16 slowly.
        autocast, scaler = torch.autocast, torch.amp.GradScaler
        half = mock.patch.object(
            torch, "autocast", lambda *_, enabled=True, **__: autocast("cpu", torch.bfloat16, enabled)
        )
        scaled = mock.patch.object(torch.amp, "GradScaler", lambda _, **how: scaler("cpu", **how))
        self._changed.enter_context(half)
        self._changed.enter_context(scaled)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._changed.close()
        return super().__exit__(*error)

    def _synchronize(self, *_: Any) -> None:
        self.waits[f"synchronize at {_caller()}"] += 1

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if func is torch._has_compatible_shallow_copy_type:
            return False
        if name in ("__get__", "__set__", "__delete__"):
            return self._access(func, args, kwargs)
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._move(func, args, kwargs)
        if func is Tensor.pin_memory:
            if isinstance(args[0], OnDevice):
                self.mixed[f"pin_memory of a device tensor at {_caller()}"] += 1
            return args[0]
        if func is Tensor.__deepcopy__ and isinstance(args[0], OnDevice):
            return args[1].setdefault(id(args[0]), _copy(args[0]))
        if func is Tensor.__reduce_ex__ and isinstance(args[0], OnDevice):
            self.waits[f"saved at {_caller()}"] += 1
            args = (_plainly(Tensor.as_subclass, (args[0].detach(), Tensor), {}), *args[1:])
            return _plainly(func, args, kwargs)
        tensors = self._tensors_of(func, args, kwargs)
        on_device = [isinstance(tensor, OnDevice) for tensor in tensors]
        asked = kwargs.get("device")
        if asked is not None and (func in _device_constructors() or tensors):
            kwargs["device"] = "cpu"
            there = self._is_device(asked)
            if there and func in (torch.tensor, torch.as_tensor) and not any(on_device):
                self.waits[f"copy by torch.tensor at {_caller()}"] += 1
        else:
            there = any(on_device)
        if any(on_device):
            self._check(func, name, args, kwargs, tensors, on_device)
        if there and kwargs.get("generator") is not None:
            self.mixed[f"CPU generator in {name} at {_caller()}"] += 1
        result = _plainly(func, args, kwargs)
        if there:
            self.operations[name] += 1
            return self._take(result, name)
        return result

    def _access(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        tensor = args[0]
        if isinstance(tensor, OnDevice):
            if func == Tensor.device.__get__:
                return self.device
            if func in (Tensor.is_cuda.__get__, Tensor.is_mps.__get__, Tensor.is_cpu.__get__):
                return func == getattr(Tensor, f"is_{self.device.type}").__get__
        result = _plainly(func, args, kwargs)
        return _as(OnDevice, result) if isinstance(tensor, OnDevice) and isinstance(result, Tensor) else result

    def _move(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        tensor, waiting = args[0], not kwargs.pop("non_blocking", False)
        there = here = isinstance(tensor, OnDevice)
        target = {Tensor.cpu: "cpu", Tensor.cuda: "cuda"}.get(func, kwargs.pop("device", None))
        for word in args[1:] if func is Tensor.to else ():
            if isinstance(word, Tensor):
                there, kwargs["dtype"] = isinstance(word, OnDevice), word.dtype
            elif isinstance(word, torch.dtype):
                kwargs["dtype"] = word
            elif isinstance(word, bool):
                waiting = not word
            elif word is not None:
                target = word
        other = kwargs.pop("other", None)
        if other is not None:
            there, kwargs["dtype"] = isinstance(other, OnDevice), other.dtype
        if target is not None:
            there = self._is_device(target)
        if there and not here and not waiting and self.device.type == "mps":  # may read what was given back
            self.missing[f"copy beside other work at {_caller()}"] += 1
        if here != there and (waiting or here):
            self.waits[f"copy {'to' if there else 'from'} the device at {_caller()}"] += 1
        moved = _plainly(Tensor.to, (tensor,), kwargs) if kwargs else tensor
        if here != there and moved is tensor:
            moved = _plainly(Tensor.clone, (tensor,), {"memory_format": torch.preserve_format})
        if there:
            return self._take(moved, "to")
        return _as(Tensor, moved) if here else moved

    def _check(
        self, func: Callable, name: str, args: tuple, kwargs: dict, tensors: list[Tensor], on_device: list[bool]
    ) -> None:
        strangers = [tensor for tensor, there in zip(tensors, on_device, strict=True) if not there]
        if func in INDEXING:
            for index in _indices(args[1]):
                if index.dtype == torch.bool or not isinstance(index, OnDevice) or index.ndim == 0:
                    self.waits[f"index at {_caller()}"] += 1
            if not isinstance(args[0], OnDevice):
                self.mixed[f"device index of a CPU tensor at {_caller()}"] += 1
        elif func is Tensor.copy_ and strangers:
            self.waits[f"copy_ at {_caller()}"] += 1
        elif func not in CARRYING and any(stranger.ndim for stranger in strangers):
            self.mixed[f"{name} at {_caller()}"] += 1
        if func in (Tensor.numpy, Tensor.__array__):
            self.mixed[f"numpy of a device tensor at {_caller()}"] += 1
        if self.device.type == "mps" and MISSING_ON_MPS.get(func, lambda *_, **__: False)(*args, **kwargs):
            self.missing[f"{name} at {_caller()}"] += 1
        if func in WAITING:
            self.waits[f"{name} at {_caller()}"] += 1

    def _tensors_of(self, func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
        if func in INDEXING:
            values = [value for value in args[2:] if isinstance(value, Tensor)]
            return [args[0], *values]
        return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]

    def _is_device(self, wanted: Any) -> bool:
        return torch.device(wanted).type == self.device.type

    def _take(self, result: Any, name: str) -> Any:
        def mark(tensor: Tensor) -> Tensor:
            if tensor.dtype == torch.float64:
                self.doubles[f"{name} at {_caller()}"] += 1
            return _as(OnDevice, tensor)

        return tree_map_only(Tensor, mark, result)


def _plainly(func: Callable, args: tuple, kwargs: dict) -> Any:
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def _as(kind: type[Tensor], tensor: Tensor) -> Tensor:
    if type(tensor) is kind:
        return tensor
    with torch._C.DisableTorchFunction():
        if kind is Tensor and isinstance(tensor, nn.Parameter):
            return tensor
        return tensor.as_subclass(kind)


def _copy(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        copy = tensor.detach().clone().as_subclass(OnDevice).requires_grad_(tensor.requires_grad)
    if getattr(tensor, "_is_param", False):
        copy._is_param = True  # type: ignore[attr-defined]
    return copy


def _indices(index: Any) -> list[Tensor]:
    return [part for part in (index if isinstance(index, tuple | list) else (index,)) if isinstance(part, Tensor)]


def _caller() -> str:
    for frame in reversed(traceback.extract_stack()):
        if PACKAGE in frame.filename and "/tests/" not in frame.filename:
            return f"{frame.filename.split(PACKAGE)[-1]}:{frame.lineno}"
    return "the test"
