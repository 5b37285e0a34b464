"""`of`: a user's mask and score as a `Function`, traced when their code or what they capture is new.

What a function does is told by its code and by the values it can reach: closure, defaults, globals by name. Functions
among them count by their own, modules and built-in functions by identity, numbers by value, tensors by dtype and number of
dimensions, since a lookup is written down without what it finds. A function that looks into a tensor otherwise is
traced again for another tensor, one that reaches anything else (an object, a dict) at every call.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tilewise.functions.expression import INDICES, INPUTS, Node
from tilewise.functions.function import Expressions, Function, Recent, version
from tilewise.functions.graph import Graph
from tilewise.functions.places import NOWHERE, Place, Untraceable, raised_at
from tilewise.functions.proxy import Proxy, Watch, node_of

UserCode = Callable[..., Any]
# Their attributes do not change.
_FIXED_MODULES = ("torch", "math", "operator", "functools", "itertools", "numpy", "builtins")
_SIMPLE = (bool, int, str, bytes, type(None), complex, torch.dtype, torch.device, torch.Size, type(Ellipsis), range)
_IDENTICAL = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, type)


class _Unknown(Exception):
    """Something that is not told by its value."""


@dataclass(frozen=True, eq=False)
class Trace:
    """What one pair of functions became. tensors: by slot, a place among those reached or one that the functions made.

    watched: what was looked into otherwise than by lookups, with the versions; None if nothing was.
    """

    expressions: Expressions
    tensors: tuple[int | torch.Tensor, ...]
    looked: bool

    def bound(self, reached: list[torch.Tensor]) -> Function:
        return Function(self.expressions, tuple(reached[x] if isinstance(x, int) else x for x in self.tensors))


_traces: Recent[Trace] = Recent(256)


def of(mask: UserCode | None, score: UserCode | None) -> Function:
    """mask(b, h, q, k) -> bool and score(s, b, h, q, k) -> s, either None, as one value."""
    reached = Reached()
    try:
        reached.add(mask)
        reached.add(score)
    except _Unknown:
        return _traced(mask, score, []).bound([])
    key: Hashable = tuple(reached.parts)
    trace = _traces.get(key)
    if trace is not None and trace.looked:
        key = key, tuple((id(x), version(x)) for x in reached.tensors)
        trace = _traces.get(key)
    if trace is None:
        trace = _traced(mask, score, reached.tensors)
        _keep(key, trace, reached)
    return trace.bound(reached.tensors)


def _keep(key: Hashable, trace: Trace, reached: Reached) -> None:
    plain: Hashable = tuple(reached.parts)
    _traces.keep(plain, trace)
    if trace.looked:
        full = plain, tuple((id(x), version(x)) for x in reached.tensors)
        _traces.keep(full, trace)
        for x in reached.tensors:  # its id may then become another's
            weakref.finalize(x, _traces.forget, full).atexit = False


class Reached:
    """What tells what a function does. parts: hashable. tensors: those it reaches."""

    def __init__(self) -> None:
        self.parts: list[Hashable] = []
        self.tensors: list[torch.Tensor] = []
        self._functions: list[types.FunctionType] = []

    def add(self, x: Any) -> None:
        kind = type(x)
        if kind in _SIMPLE:
            self.parts += (kind, x)
        elif kind is float:
            self.parts += (kind, x or str(x))  # 0.0 is not -0.0
        elif kind is types.FunctionType:
            self._add_function(x)
        elif isinstance(x, torch.Tensor):
            self._add_tensor(x)
        elif isinstance(x, types.ModuleType) or isinstance(x, _IDENTICAL):
            self.parts.append(x)
        elif kind in (tuple, list):
            self.parts += (kind, len(x))
            for item in x:
                self.add(item)
        elif kind is functools.partial:
            self.parts.append(kind)
            self.add((x.func, x.args, *(item for pair in x.keywords.items() for item in pair)))
        elif isinstance(x, np.generic):
            self.parts += (kind, x.item())
        else:
            raise _Unknown

    def _add_tensor(self, x: torch.Tensor) -> None:
        if x.dim() == 0 and x.device.type == "cpu":  # a number
            self.parts += (x.dtype, x.item())
            return
        slot = next((n for n, known in enumerate(self.tensors) if known is x), len(self.tensors))
        if slot == len(self.tensors):
            self.tensors.append(x)
        self.parts += (slot, x.dtype, x.dim())

    def _add_function(self, x: types.FunctionType) -> None:
        known = next((n for n, f in enumerate(self._functions) if f is x), None)
        self.parts.append(x.__code__ if known is None else known)
        if known is not None:
            return
        self._functions.append(x)
        if x.__defaults__:
            self.add(x.__defaults__)
        if x.__kwdefaults__:
            self.add(tuple(item for pair in x.__kwdefaults__.items() for item in pair))
        for cell in x.__closure__ or ():
            self.add(cell.cell_contents)
        names, attributes = _global_names(x.__code__)
        for name in names:
            if name in x.__globals__:
                value = x.__globals__[name]
                self.add(value)
                if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _FIXED_MODULES:
                    for attribute in attributes:
                        if hasattr(value, attribute):
                            self.add(getattr(value, attribute))
            elif not hasattr(builtins, name):
                raise _Unknown


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The globals that a function reads, and the attributes of whatever it asks for; also those of functions within it."""
    names, attributes = {}, {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[instruction.argval] = None
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _global_names(constant)
            names |= dict.fromkeys(inner[0])
            attributes |= dict.fromkeys(inner[1])
    return tuple(names), tuple(attributes)


def _traced(mask: UserCode | None, score: UserCode | None, reached: list[torch.Tensor]) -> Trace:
    graph = Graph()
    results = [
        _run("mask", mask, graph, INDICES, "bool") if mask is not None else None,
        _run("score", score, graph, INPUTS, "float") if score is not None else None,
    ]
    expressions = Expressions.of(*results)
    places = {id(x): n for n, x in enumerate(reached)}
    tensors = tuple(places.get(id(x), x) for x in graph.tensors)
    return Trace(expressions, tensors, graph.looked)


def _run(name: str, function: UserCode, graph: Graph, inputs: tuple[str, ...], kind: str) -> Node:
    """Call the function once on proxies."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of ({', '.join(inputs)}), got {function!r}")
    place = _defined_at(function)
    try:
        inspect.signature(function).bind(*inputs)
    except TypeError as error:
        raise TypeError(f"{name} must take {len(inputs)} arguments ({', '.join(inputs)}), {place}: {error}") from None
    except ValueError:  # it has no signature
        pass
    try:
        with Watch(graph):
            result = function(*(Proxy(graph, graph.input(x)) for x in inputs))
    except Untraceable:
        raise
    except Exception as error:
        at = raised_at(error.__traceback__)
        raise Untraceable(
            f"a mask or score function, {at}: it cannot be traced, it raised {type(error).__name__}: {error}"
        ) from error
    return _checked(name, result, graph, kind, place)


def _checked(name: str, result: Any, graph: Graph, kind: str, place: Place) -> Node:
    try:
        node = node_of(graph, result)
    except Untraceable:
        wanted = "one bool" if kind == "bool" else "one float"
        raise Untraceable(
            f"{name}, {place}: it must return {wanted} for each query and key, got {type(result).__name__}"
        ) from None
    if kind == "bool" and node.kind != "bool":
        raise Untraceable(
            f"{name}, {place}: it must return a bool, got a value of {node.kind}; compare it, as with != 0"
        )
    if kind == "float" and node.kind == "bool":
        raise Untraceable(
            f"{name}, {place}: it must return a float, got a bool; write torch.where(condition, s, float('-inf')), or give it as mask"
        )
    return graph.to(node, kind)


def _defined_at(function: UserCode) -> Place:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    code = code or getattr(getattr(type(function), "__call__", None), "__code__", None)
    return Place(code.co_filename, code.co_firstlineno) if code is not None else NOWHERE
