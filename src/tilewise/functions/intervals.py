"""Interval arithmetic over an expression: what its values can be where b, h, q and k are in given ranges.

An interval is (low, high) in float64, numbers or arrays that broadcast; a bool is 0 or 1. It may be wider than what the
values do, never narrower: an int that may leave 32 bits can be any int, since it wraps, and a float that may be NaN is
unbounded, (-inf, inf), which nothing but itself comes from. kernels/common/intervals.cuh has the same rules in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tilewise.functions.expression import COMPARISONS, DTYPES, INDICES, INT_MAX, INT_MIN, ROUNDINGS, Node, Number

Array = Any  # np.float64, or an array of them
Interval = tuple[Array, Array]
Reader = Callable[[int, Sequence[Interval]], Interval]

ANY_INT: Interval = (np.float64(INT_MIN), np.float64(INT_MAX))
ANY_FLOAT: Interval = (np.float64(-np.inf), np.float64(np.inf))
ANY_BOOL: Interval = (np.float64(0), np.float64(1))
# What exp and its like may be off by on any backend, of themselves and of 1
SLACK = 2.0**-20


def ranges(nodes: Iterable[Node], inputs: Mapping[str, Interval], read: Reader) -> dict[Node, Interval]:
    """Of nodes in order. inputs: of b, h, q and k. read: of a tensor, by its number, at indices in intervals."""
    found: dict[Node, Interval] = {}
    with np.errstate(all="ignore"):
        for node in nodes:
            args = [found[a] for a in node.args]
            if node.op in INDICES:
                found[node] = inputs[node.op]
            elif node.op == "lookup":
                found[node] = read(int(node.value), args)
            else:
                found[node] = of_node(node, args, node.value)
    return found


def of_node(node: Node, args: list[Interval], number: Number) -> Interval:
    """Of one node that is no index and no lookup. number: of a literal or a number, its value."""
    if node.op == "s":
        return ANY_FLOAT
    if node.op in ("literal", "number"):
        value = np.float64(np.float32(number) if node.kind == "float" else number)
        return ANY_FLOAT if np.isnan(value) else (value, value)
    return _applied(node, args)


def any_of(dtype: torch.dtype) -> Interval:
    """What an entry of a tensor can be, whatever it holds."""
    if DTYPES[dtype] != "int":
        return ANY_FLOAT if dtype.is_floating_point else ANY_BOOL
    low, high = max(torch.iinfo(dtype).min, INT_MIN), min(torch.iinfo(dtype).max, INT_MAX)
    return np.float64(low), np.float64(high)


def _applied(node: Node, args: list[Interval]) -> Interval:
    if node.op in COMPARISONS:
        return _compared(node.op, *args)
    if node.op == "where":
        return _chosen(*args)
    if node.op in ("and", "or", "xor", "not") and node.kind == "bool":
        return _LOGICAL[node.op](*args)
    if node.op in ("bool", "int", "float"):
        return _CONVERSIONS[node.op](*args)
    if node.kind == "int":
        if node.op == "mul" and node.args[0] is node.args[1]:
            return _int(_square(*args))
        return _int(_INTEGER[node.op](*args)) if node.op in _INTEGER else ANY_INT
    if node.op == "mul" and node.args[0] is node.args[1]:
        return _float(_square(*args), *args)
    return _float(_FLOAT[node.op](*args), *args) if node.op in _FLOAT else ANY_FLOAT


def _unbounded(x: Interval) -> Array:
    return (x[0] == -np.inf) & (x[1] == np.inf)


def _either(condition: Array, x: Interval, y: Interval) -> Interval:
    return np.where(condition, x[0], y[0]), np.where(condition, x[1], y[1])


def _int(x: Interval) -> Interval:
    """An int32, or what is left of one that wrapped."""
    return _either((x[0] >= INT_MIN) & (x[1] <= INT_MAX), x, ANY_INT)


def _float(x: Interval, *args: Interval) -> Interval:
    """Rounded to float32, which keeps order; unbounded if it may be NaN or comes from what may be."""
    low, high = (np.float64(np.float32(bound)) for bound in x)
    unknown = np.isnan(low) | np.isnan(high)
    for arg in args:
        unknown = unknown | _unbounded(arg)
    return _either(unknown, ANY_FLOAT, (low, high))


def _hull(*corners: Array) -> Interval:
    """The least and the largest; NaN if one of them is NaN."""
    low = high = corners[0]
    for corner in corners[1:]:
        low, high = np.minimum(low, corner), np.maximum(high, corner)
    return low, high


# ---- ints and floats alike ------------------------------------------------------------------------------------------


def _add(x: Interval, y: Interval) -> Interval:
    return x[0] + y[0], x[1] + y[1]


def _sub(x: Interval, y: Interval) -> Interval:
    return x[0] - y[1], x[1] - y[0]


def _mul(x: Interval, y: Interval) -> Interval:
    return _hull(x[0] * y[0], x[0] * y[1], x[1] * y[0], x[1] * y[1])


def _square(x: Interval, _: Interval) -> Interval:
    low, high = _abs(x)
    return low * low, high * high


def _min(x: Interval, y: Interval) -> Interval:
    return np.minimum(x[0], y[0]), np.minimum(x[1], y[1])


def _max(x: Interval, y: Interval) -> Interval:
    return np.maximum(x[0], y[0]), np.maximum(x[1], y[1])


def _neg(x: Interval) -> Interval:
    return -x[1], -x[0]


def _abs(x: Interval) -> Interval:
    return np.maximum(0.0, np.maximum(x[0], -x[1])), np.maximum(-x[0], x[1])


_BOTH: dict[str, Callable[..., Interval]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "min": _min,
    "max": _max,
    "neg": _neg,
    "abs": _abs,
}

# ---- ints -----------------------------------------------------------------------------------------------------------


def _sign_known(y: Interval) -> Array:
    return (y[0] > 0) | (y[1] < 0)


def _floordiv(x: Interval, y: Interval) -> Interval:
    corners = _hull(*(np.floor(a / b) for a in x for b in y))
    return _either(_sign_known(y), corners, ANY_INT)


def _mod(x: Interval, y: Interval) -> Interval:
    quotient = np.floor(x[0] / y[0])
    same = (y[0] == y[1]) & (y[0] != 0) & (quotient == np.floor(x[1] / y[0]))
    moved = x[0] - quotient * y[0], x[1] - quotient * y[0]
    # Below the divisor; at most the dividend, if that is not negative; the dividend itself, if it is below the divisor
    above = np.where(x[0] >= 0, np.minimum(x[1], y[1] - 1), y[1] - 1)
    positive, negative = (0.0 * above, above), (y[0] + 1, 0.0 * y[0])
    inside = _either((x[0] >= 0) & (x[1] < y[0]), x, positive)
    return _either(same, moved, _either(y[0] > 0, inside, _either(y[1] < 0, negative, ANY_INT)))


def _bits_below(x: Array) -> Array:
    """The largest number with as many bits as x ≥ 0."""
    return np.exp2(np.ceil(np.log2(x + 1))) - 1


def _and(x: Interval, y: Interval) -> Interval:
    # One that is not negative bounds the result, whatever the other one is.
    high = np.where(x[0] < 0, y[1], np.where(y[0] < 0, x[1], np.minimum(x[1], y[1])))
    return _either((x[0] >= 0) | (y[0] >= 0), (0.0 * high, high), ANY_INT)


def _or(x: Interval, y: Interval) -> Interval:
    known = (x[0] >= 0) & (y[0] >= 0)
    return _either(known, (np.maximum(x[0], y[0]), _bits_below(np.maximum(x[1], y[1]))), ANY_INT)


def _xor(x: Interval, y: Interval) -> Interval:
    known = (x[0] >= 0) & (y[0] >= 0)
    return _either(known, (0.0 * x[0], _bits_below(np.maximum(x[1], y[1]))), ANY_INT)


def _invert(x: Interval) -> Interval:
    return -x[1] - 1, -x[0] - 1


def _lshift(x: Interval, y: Interval) -> Interval:
    return _either((y[0] >= 0) & (y[1] < 32), _hull(*(a * np.exp2(b) for a in x for b in y)), ANY_INT)


def _rshift(x: Interval, y: Interval) -> Interval:
    return _either((y[0] >= 0) & (y[1] < 32), _hull(*(np.floor(a / np.exp2(b)) for a in x for b in y)), ANY_INT)


_INTEGER: dict[str, Callable[..., Interval]] = {
    **_BOTH,
    "floordiv": _floordiv,
    "mod": _mod,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": _invert,
    "lshift": _lshift,
    "rshift": _rshift,
}

# ---- floats ---------------------------------------------------------------------------------------------------------


def _div(x: Interval, y: Interval) -> Interval:
    return _either(_sign_known(y), _hull(*(a / b for a in x for b in y)), ANY_FLOAT)


def _same(function: Callable[[Array], Array]) -> Callable[[Interval], Interval]:
    """A function that never falls, and that every backend rounds alike."""
    return lambda x: (function(x[0]), function(x[1]))


def _rising(function: Callable[[Array], Array]) -> Callable[[Interval], Interval]:
    """A function that never falls, and that every backend rounds as it likes."""

    def apply(x: Interval) -> Interval:
        low, high = function(x[0]), function(x[1])
        return low - SLACK * (np.abs(low) + 1), high + SLACK * (np.abs(high) + 1)

    return apply


def _wave(x: Interval) -> Interval:
    return -1.0 - SLACK + 0.0 * x[0], 1.0 + SLACK + 0.0 * x[1]


def _rsqrt(x: Interval) -> Interval:
    low, high = 1 / np.sqrt(x[1]), 1 / np.sqrt(x[0])
    return _either(x[0] > 0, (low * (1 - SLACK), high * (1 + SLACK)), ANY_FLOAT)


_FLOAT: dict[str, Callable[..., Interval]] = {
    **_BOTH,
    "div": _div,
    "sqrt": _same(np.sqrt),
    "rsqrt": _rsqrt,
    **{name: _rising(getattr(np, name)) for name in ("exp", "exp2", "log", "log2", "tanh")},
    "sigmoid": _rising(lambda x: 1 / (1 + np.exp(-x))),
    **dict.fromkeys(("sin", "cos"), _wave),
    **{name: _same(f) for name, f in zip(ROUNDINGS, (np.floor, np.ceil, np.trunc, np.rint), strict=True)},
}

# ---- truth ----------------------------------------------------------------------------------------------------------


def _truth(sure: Array, possible: Array) -> Interval:
    return np.where(sure, 1.0, 0.0), np.where(possible, 1.0, 0.0)


def _compared(op: str, x: Interval, y: Interval) -> Interval:
    if op in ("gt", "ge"):
        x, y = y, x
    if op in ("lt", "gt"):
        found = _truth(x[1] < y[0], x[0] < y[1])
    elif op in ("le", "ge"):
        found = _truth(x[1] <= y[0], x[0] <= y[1])
    else:
        same, possible = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0]), (x[0] <= y[1]) & (y[0] <= x[1])
        found = _truth(same, possible) if op == "eq" else _truth(~possible, ~same)
    return _either(_unbounded(x) | _unbounded(y), ANY_BOOL, found)


def _exclusive(x: Interval, y: Interval) -> Interval:
    known = (x[0] == x[1]) & (y[0] == y[1])
    return _either(known, _truth(x[0] != y[0], x[0] != y[0]), ANY_BOOL)


def _chosen(condition: Interval, x: Interval, y: Interval) -> Interval:
    either = np.minimum(x[0], y[0]), np.maximum(x[1], y[1])
    return _either(condition[0] > 0, x, _either(condition[1] == 0, y, either))


def _is_true(x: Interval) -> Interval:
    known = _truth((x[0] > 0) | (x[1] < 0), (x[0] != 0) | (x[1] != 0))
    return _either(_unbounded(x), ANY_BOOL, known)


_LOGICAL: dict[str, Callable[..., Interval]] = {
    "and": _min,
    "or": _max,
    "xor": _exclusive,
    "not": lambda x: (1 - x[1], 1 - x[0]),
}
_CONVERSIONS: dict[str, Callable[..., Interval]] = {
    "bool": _is_true,
    "int": lambda x: _int((np.trunc(x[0]), np.trunc(x[1]))),
    "float": lambda x: _float(x, x),
}
