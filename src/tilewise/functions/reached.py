"""What tells what a function does without running it: its code and the values it reaches."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import torch

from tilewise.functions.places import Place

# Modules whose attributes do not change
_FIXED = ("torch", "math", "operator", "functools", "itertools", "numpy")
_BY_VALUE = {bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(Ellipsis), range}
_BY_IDENTITY = (types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType, type)


class Unknown(Exception):
    """Something is reached that may change without notice."""


class Reached:
    """key: equal for functions that are traced alike. tensors: those reached, each once.

    numbers: the ints and floats in the closures of the functions themselves. form: the key without their values.
    functions: in Python, with those given; again: one of these is reached from another. named: modules, types and
    functions in C.
    """

    def __init__(self, *functions: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[int | float] = []
        self.functions: list[types.FunctionType] = []
        self.named: list[Any] = []
        self.again = False
        self._parts: list[Any] = []
        for function in functions:
            if type(function) is types.FunctionType:
                self._add_function(function, own=True)
            else:
                self._add(function)
        self.form: Hashable = tuple(self._parts)
        self.key: Hashable = (self.form, *(x or str(x) for x in self.numbers))  # 0.0 is not -0.0

    def _add(self, x: Any) -> None:
        kind = type(x)
        if kind in _BY_VALUE:
            self._parts += (kind, x)
        elif kind is float:
            self._parts += (kind, x or str(x))  # 0.0 is not -0.0
        elif kind is types.FunctionType:
            self._add_function(x)
        elif isinstance(x, torch.Tensor):
            self._add_tensor(x)
        elif isinstance(x, _BY_IDENTITY):
            self._parts.append(x)
            self.named.append(x)
        elif kind is tuple or kind is list:
            self._parts += (kind, len(x))
            for item in x:
                self._add(item)
        elif kind is functools.partial:
            self._add((kind, x.func, x.args, *(item for pair in x.keywords.items() for item in pair)))
        elif isinstance(x, np.generic):
            self._parts += (kind, x.item())
        else:
            raise Unknown

    def _add_tensor(self, x: torch.Tensor) -> None:
        if x.dim() == 0 and x.device.type == "cpu":  # a number
            self._parts += (x.dtype, x.item())
            return
        place = next((n for n, known in enumerate(self.tensors) if known is x), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(x)
        self._parts += (place, x.dtype, x.layout, x.dim())

    def _add_function(self, function: types.FunctionType, own: bool = False) -> None:
        place = next((n for n, known in enumerate(self.functions) if known is function), None)
        if place is not None:
            self._parts.append(place)
            self.again = True
            return
        self.functions.append(function)
        self._parts.append(function.__code__)
        if function.__defaults__:
            self._add(function.__defaults__)
        if function.__kwdefaults__:
            self._add(tuple(item for pair in function.__kwdefaults__.items() for item in pair))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                raise Unknown from None
            if own and type(content) in (int, float):
                self._parts.append(type(content))
                self.numbers.append(content)
            else:
                self._add(content)
        names = _names(function.__code__)
        for name in names.globals:
            if name in function.__globals__:
                self._add_global(function.__globals__[name], names)
            elif not hasattr(builtins, name):
                raise Unknown

    def _add_global(self, value: Any, names: Names) -> None:
        self._add(value)
        if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _FIXED:
            for attribute in names.attributes:
                if hasattr(value, attribute):
                    self._add(getattr(value, attribute))


class Names(NamedTuple):
    """What code names: globals that it reads, attributes of whatever it asks for."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> Names:
    found: dict[str, dict[str, None]] = {"LOAD_GLOBAL": {}, "LOAD_ATTR": {}, "LOAD_METHOD": {}}
    for part in _with_inner(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in found:
                found[instruction.opname][instruction.argval] = None
    return Names(tuple(found["LOAD_GLOBAL"]), (*found["LOAD_ATTR"], *found["LOAD_METHOD"]))


def _with_inner(code: types.CodeType) -> list[types.CodeType]:
    """The code and that of the functions within it."""
    inner = [part for x in code.co_consts if isinstance(x, types.CodeType) for part in _with_inner(x)]
    return [code, *inner]


def code_of(function: Callable[..., Any]) -> types.CodeType | None:
    """The code that a call runs; None if it is not Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


@functools.lru_cache(maxsize=1024)
def side_effect(code: types.CodeType) -> Place | None:
    """The line where a function assigns to a global, to an outer function's variable or to an attribute."""
    for part in _with_inner(code):
        line = part.co_firstlineno
        for instruction in dis.get_instructions(part):
            line = instruction.starts_line or line
            outer = instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars
            if outer or instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"):
                return Place(code.co_filename, line)
    return None
