"""A pickle machine that builds plain values, tensors and inert records, and cannot do anything else.

Python's own unpickler imports and calls what a pickle names. torch's ``weights_only`` one refuses 17 of 53 genuine
files (protocol 4, subclasses of dict), and a hostile file of 1 kB makes it run for years (the hash of nested tuples),
crash (the same, a million deep) or take any amount of memory (``bytearray(n)``). It would not save time either: of
2.6 s for 19 files, 1.8 s are the checks of the container, which have to be made anyway; ``torch.load`` takes 1.6 s
more. Here ``pickletools`` decodes the instructions, and they are carried out on names: no class or function is ever
on the stack, so none can be called.
"""

import pickletools
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdc_plugin.checkpoints.safe_pickle.names import ForeignName, InertRecord, full_name, is_allowed, torch_constant
from cdc_plugin.checkpoints.safe_pickle.values import BUILDERS, NumpyKind, check_key, check_size, fill_array

# A network of a thousand tensors with its optimiser takes about 100 000 instructions.
INSTRUCTIONS = 2_000_000
COPIES = 1_000_000  # items of containers that may be copied in all; of text and bytes, 200 count as one
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_TUPLE_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    **{"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_SET": set},
}
_FROM_MARK: dict[str, Callable[[list[Any]], Any]] = {
    **{"LIST": list, "TUPLE": tuple, "FROZENSET": lambda items: frozenset(map(check_key, items))},
}


class Refused(UnpicklingError):  # noqa: N818  (read as "refused: NAME")
    """The pickle names something that no checkpoint needs."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not allowed")
        self.name = name


class PickleMachine:
    """The state of one pickle that is carried out."""

    def __init__(self, stream: Any, find_storage: Callable[[tuple[Any, ...]], Any] | None = None) -> None:
        self.stream = stream  # anything with ``read`` and ``readline``; left behind the pickle's end
        self.find_storage = find_storage  # resolves a persistent id, the tuple torch writes for a tensor's numbers
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # what lies under each open mark
        self.memo: dict[int, Any] = {}
        self.copied = 0

    def load(self) -> Any:
        """Return the value that the pickle describes, or raise ``Refused`` if it names what is not allowed."""
        actions = {name[4:].upper(): getattr(self, name) for name in dir(self) if name.startswith("_do_")}
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self.stream)):
            if count > INSTRUCTIONS:
                raise UnpicklingError("its pickle has too many instructions")
            name = opcode.name
            if name == "STOP":
                break
            if name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name in _LITERALS:
                self.stack.append(argument)
            elif name in _TUPLE_SIZES:
                items = [self.stack.pop() for _ in range(_TUPLE_SIZES[name])]
                self.stack.append(tuple(reversed(items)))
            elif name in _FROM_MARK:
                items = self._since_mark()
                self.stack.append(_FROM_MARK[name](items))
            elif name not in ("PROTO", "FRAME"):
                if name not in actions:
                    raise UnpicklingError(f"its pickle uses {name}")
                actions[name](argument)
        value = self.stack.pop()
        check_size(value)
        return value

    # Names, and what is made of them

    def _name(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnpicklingError("a class name is not text")
        if not is_allowed(module, name):
            raise Refused(full_name(module, name))
        full = full_name(module, name)
        constant = torch_constant(full)
        return constant if isinstance(constant, torch.dtype) else ForeignName(full)

    def _make(self, callee: Any, arguments: Any) -> Any:
        if not isinstance(callee, ForeignName) or not isinstance(arguments, tuple):
            raise UnpicklingError("something that is no class is called")
        name = callee.name
        if name in ("builtins.getattr", "operator.getitem", "_operator.getitem"):
            # How methods, enum members and type hints are saved; of anything but a stand-in it would be an attack.
            if len(arguments) != 2 or not isinstance(arguments[0], ForeignName | InertRecord):
                raise Refused(name)
            return InertRecord(name, arguments)
        if name == "copyreg.__newobj__":
            self._count_copies(arguments)
            return self._make(arguments[0], arguments[1:])
        if name == "copyreg._reconstructor":  # of protocols 0 and 1; the items come as a whole
            kind, _, items = arguments
            single = () if items is None or isinstance(items, dict | list) else (items,)
            made = self._make(kind, items if isinstance(items, tuple) else single)
            if isinstance(made, InertRecord):
                made.entries = items if isinstance(items, dict) else {}
                made.members = items if isinstance(items, list) else []
            return made
        if name == "torch._tensor._rebuild_from_type_v2":
            return self._make(arguments[0], arguments[2])
        if name == "builtins.type" and arguments != (None,):  # with three arguments it would define a class
            raise Refused(name)
        builder = BUILDERS.get(name)
        if builder is None:
            return InertRecord(name, arguments)
        self._count_copies(*arguments)
        return builder(*arguments)

    def _count_copies(self, *values: Any) -> None:
        """Refuse a pickle that copies what it holds again and again, which needs few instructions and any memory."""
        self.copied += sum(len(value) for value in values if isinstance(value, list | tuple | dict | set))
        self.copied += sum(len(value) // 200 for value in values if isinstance(value, str | bytes | bytearray))
        if self.copied > COPIES:
            raise UnpicklingError("its pickle copies its content beyond reason")

    def _do_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(self._name(module, name))

    def _do_stack_global(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self._name(module, name))

    def _do_inst(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        callee = self._name(module, name)
        self.stack.append(self._make(callee, tuple(self._since_mark())))

    def _do_obj(self, _: None) -> None:
        callee, *arguments = self._since_mark()
        self.stack.append(self._make(callee, tuple(arguments)))

    def _do_reduce(self, _: None) -> None:
        arguments, callee = self.stack.pop(), self.stack.pop()
        self.stack.append(self._make(callee, arguments))

    _do_newobj = _do_reduce

    def _do_newobj_ex(self, _: None) -> None:
        keywords, arguments, callee = self.stack.pop(), self.stack.pop(), self.stack.pop()
        made = self._make(callee, arguments)
        if isinstance(made, InertRecord):
            self._count_copies(keywords)
            made.restore(keywords)
        self.stack.append(made)

    def _do_build(self, _: None) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        self._count_copies(*(state if isinstance(state, tuple) else (state,)))
        if isinstance(target, InertRecord | NumpyKind):
            target.restore(state)
        elif isinstance(target, np.ndarray):
            fill_array(target, state)
        elif not isinstance(target, dict | list | Tensor):  # of those, no attribute is of use
            raise UnpicklingError("attributes are given to a plain value")

    def _do_ext1(self, _: int) -> None:
        raise Refused("a class of the extension registry")

    _do_ext2 = _do_ext4 = _do_ext1

    def _do_binpersid(self, _: None) -> None:
        identity = self.stack.pop()
        if self.find_storage is None or not isinstance(identity, tuple):
            raise UnpicklingError("a persistent id is out of place")
        self.stack.append(self.find_storage(identity))

    # Containers

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def _do_mark(self, _: None) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _do_dict(self, _: None) -> None:
        items = self._since_mark()
        self.stack.append({})
        self._set(items)

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        target = target.members if isinstance(target, InertRecord) else target
        if not isinstance(target, list):
            raise UnpicklingError("items are added to what is no list")
        target.extend(items)

    def _do_append(self, _: None) -> None:
        self._extend([self.stack.pop()])

    def _do_appends(self, _: None) -> None:
        self._extend(self._since_mark())

    def _do_additems(self, _: None) -> None:
        items, target = self._since_mark(), self.stack[-1]
        if isinstance(target, InertRecord):
            target.members.extend(items)
        elif isinstance(target, set):
            target.update(map(check_key, items))
        else:
            raise UnpicklingError("items are added to what is no set")

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        target = target.entries if isinstance(target, InertRecord) else target
        if not isinstance(target, dict) or len(items) % 2:
            raise UnpicklingError("named items are added to what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if check_key(key) in target:
                raise UnpicklingError(f"{str(key)[:60]!r} occurs twice")
            target[key] = value

    def _do_setitem(self, _: None) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _do_setitems(self, _: None) -> None:
        self._set(self._since_mark())

    # Stack and memo

    def _do_pop(self, _: None) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._since_mark()

    def _do_pop_mark(self, _: None) -> None:
        self._since_mark()

    def _do_dup(self, _: None) -> None:
        self.stack.append(self.stack[-1])

    def _do_put(self, index: int) -> None:
        self.memo[int(index)] = self.stack[-1]

    _do_binput = _do_long_binput = _do_put

    def _do_memoize(self, _: None) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _do_get(self, index: int) -> None:
        self.stack.append(self.memo[int(index)])

    _do_binget = _do_long_binget = _do_get
