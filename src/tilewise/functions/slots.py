"""Numbers that a function captures, left open: its trace then holds for other numbers too.

A function is called once more with a `Slot` in each of its own closure cells that holds an int or a float. A slot can
do nothing but meet values of the function, or be computed with as Python computes with numbers; whatever else is done
with it (`if`, an index, `range`, a comparison, int(), a call of C code …) ends the attempt, and such a function is
traced for every value. What only code could do unseen, as to ask for a slot's type, rules the function out beforehand.
"""

from __future__ import annotations

import builtins
import dis
import math
import operator
import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Union

import torch

from tilewise.functions.expression import INT_MAX, INT_MIN, Number

# How a number comes from the slots: the number of a slot, or an operation and what it is applied to
Recipe = Union[int, "tuple[Callable[..., Any], tuple[Recipe | Constant, ...]]"]

_BUILTINS = {"abs", "divmod", "max", "min", "pow"}  # that do with a number what its operators do, or fail
_MODULES = (torch, math)  # whose functions take a slot only together with a value of the function, or fail
_OPERATIONS = ("IS_OP", "SETUP_FINALLY", "SETUP_WITH", "MATCH_CLASS", "MATCH_MAPPING", "MATCH_SEQUENCE")
# Values that stand in the text or change what is written down (graph.py)
_SPECIAL = frozenset((-1, 0, 1, 2, 0.5, math.inf, -math.inf))


class Constant(NamedTuple):
    """A number of the code's own."""

    value: Number


class Steered(Exception):
    """What the function does depends on a number's value."""


class Special(Steered):
    """It is one of the few values that are written down otherwise."""


class Value:
    """What a slot may meet: proxy.py."""

    __slots__ = ()


class Slot:
    """A number of which the trace shall not depend on the value it has now."""

    __slots__ = ("number", "recipe")
    __array_ufunc__ = None  # numpy's numbers leave operators to us
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: Number, recipe: Recipe) -> None:
        self.number, self.recipe = number, recipe

    def _refuse(self, *_: Any) -> Any:
        raise Steered

    __bool__ = __index__ = __int__ = __float__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = _refuse
    __iter__ = __len__ = __getitem__ = __contains__ = __str__ = __repr__ = __format__ = _refuse

    def __getattr__(self, _: str) -> Any:
        raise Steered

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented  # a value of the function answers, if there is one


def _applied(of: Callable[..., Any], *args: Any) -> Any:
    """Python's own operation on numbers, one of which is a slot. A value of the function answers itself."""
    if any(isinstance(x, Value) for x in args):
        return NotImplemented
    if not all(type(x) in (Slot, int, float) for x in args):
        raise Steered
    recipes = tuple(x.recipe if type(x) is Slot else Constant(x) for x in args)
    return Slot(of(*(x.number if type(x) is Slot else x for x in args)), (of, recipes))


def _compared(_: Slot, other: Any) -> Any:
    if isinstance(other, Value):
        return NotImplemented
    raise Steered


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    _operation = getattr(operator, _name)
    setattr(Slot, f"__{_name}__", lambda x, y, of=_operation: _applied(of, x, y))
    setattr(Slot, f"__r{_name}__", lambda x, y, of=_operation: _applied(of, y, x))
for _operation in (operator.neg, operator.abs):
    setattr(Slot, f"__{_operation.__name__}__", lambda x, of=_operation: _applied(of, x))
for _name in ("pos", "invert"):
    setattr(Slot, f"__{_name}__", Slot._refuse)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Slot, f"__{_name}__", _compared)


def value_of(recipe: Recipe | Constant, numbers: Sequence[Number]) -> Any:
    """What a recipe makes of other numbers."""
    if isinstance(recipe, int):
        return numbers[recipe]
    if isinstance(recipe, Constant):
        return recipe.value
    of, args = recipe
    return of(*(value_of(arg, numbers) for arg in args))


def alike(value: Any, before: Number) -> bool:
    """Is the same written down for this value of a number as for the one before?"""
    if type(value) is not type(before) or value in _SPECIAL or before in _SPECIAL or value != value:
        return False
    if type(value) is int and not INT_MIN <= value <= INT_MAX:
        return False
    return (value > 0) == (before > 0)


def opened(*functions: Any) -> list[Any]:
    """The functions with slots in their closures, counted in the order of reached.py; what is none stays as it is."""
    found, slots = [], 0
    for function in functions:
        if type(function) is types.FunctionType:
            cells = []
            for cell in function.__closure__ or ():
                number = cell.cell_contents
                if type(number) in (int, float):
                    cell, slots = types.CellType(Slot(number, slots)), slots + 1
                cells.append(cell)
            function = _with_closure(function, tuple(cells))
        found.append(function)
    return found


def _with_closure(function: types.FunctionType, cells: tuple[types.CellType, ...]) -> types.FunctionType:
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def can_open(functions: Sequence[types.FunctionType], reached: Sequence[Any]) -> bool:
    """May slots be tried? functions: all whose code may run. reached: modules, types and functions in C besides."""
    return all(_is_torch(x) for x in reached) and all(_is_plain(function.__code__) for function in functions)


def _is_torch(x: Any) -> bool:
    if isinstance(x, types.ModuleType):
        return x in _MODULES
    return isinstance(x, types.BuiltinFunctionType) and str(x.__module__).partition(".")[0] in ("torch", "math")


@lru_cache(maxsize=1024)
def _is_plain(code: types.CodeType) -> bool:
    """Does the code name no builtin, and do nothing, that could tell a slot from a number or hide a failure?"""
    if getattr(code, "co_exceptiontable", b""):
        return False
    for instruction in dis.get_instructions(code):
        if instruction.opname in _OPERATIONS:
            return False
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and str(instruction.argval).startswith("__"):
            return False
        named = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and hasattr(builtins, str(instruction.argval))
        if named and instruction.argval not in _BUILTINS:
            return False
    return all(_is_plain(x) for x in code.co_consts if isinstance(x, types.CodeType))
