"""What the printed text must know of an expression's ranges: a few facts per node, the same for most numbers.

The text depends on sizes, tensors' dtypes and the values of numbers by these facts alone, so that other values find
the text that is there. Finding them takes microseconds: ranges are of plain numbers here, with the rules of
intervals.py, which does the same over arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from tilewise.functions import intervals
from tilewise.functions.expression import INDICES, INT_MAX, INT_MIN, Node, Number

Range = tuple[float, float]
EXACT = 2**24  # integers up to here are floats
WRAPS, SMALL, POSITIVE, NAN, INSIDE = 1, 2, 4, 8, 16  # bits; INSIDE: of a lookup's first index, then of the next …
ANY_INT: Range = (INT_MIN, INT_MAX)


class Facts:
    """By node. Nodes that stand for others may be added, with their facts."""

    def __init__(self, nodes: Sequence[Node], flags: Sequence[int]) -> None:
        self._flags = dict(zip(nodes, flags, strict=True))

    def copy(self) -> Facts:
        return Facts(tuple(self._flags), tuple(self._flags.values()))

    def inherit(self, node: Node, other: Node) -> None:
        """`node` has the value of `other`."""
        self._flags.setdefault(node, self._flags[other])

    def wraps(self, node: Node) -> bool:
        """Can it be any int, as one that may leave 32 bits?"""
        return self._flags[node] & WRAPS > 0

    def small(self, node: Node) -> bool:
        """Is it below 2^24, so that an int of that value is exact as a float?"""
        return self._flags[node] & SMALL > 0

    def positive(self, node: Node) -> bool:
        """Is it never negative?"""
        return self._flags[node] & POSITIVE > 0

    def is_nan(self, number: Node) -> bool:
        return self._flags[number] & NAN > 0

    def inside(self, lookup: Node, dim: int) -> bool:
        """Does this index of a lookup stay inside its tensor?"""
        return self._flags[lookup] & INSIDE << dim > 0


def flags_of(
    nodes: Sequence[Node],
    values: Mapping[Node, Number],
    sizes: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
) -> tuple[int, ...]:
    """Facts of nodes in order. values: of the numbers. sizes: of b, h, q and k. shapes, dtypes: of the tensors."""
    ranges: dict[Node, Range] = {}
    found = []
    for node in nodes:
        low, high = ranges[node] = _range(node, [ranges[a] for a in node.args], values, sizes, dtypes)
        flag = WRAPS if (low, high) == ANY_INT else 0
        if -low < EXACT > high:
            flag |= SMALL
        if low >= 0:
            flag |= POSITIVE
        if node.op == "number" and values[node] != values[node]:
            flag |= NAN
        elif node.op == "lookup":
            for dim, (index, size) in enumerate(zip(node.args, shapes[int(node.value)], strict=True)):
                first, last = ranges[index]
                if first >= 0 and last < size:
                    flag |= INSIDE << dim
        found.append(flag)
    return tuple(found)


def _range(
    node: Node, args: list[Range], values: Mapping[Node, Number], sizes: Sequence[int], dtypes: Sequence[torch.dtype]
) -> Range:
    """As intervals.py has it, of numbers instead of arrays."""
    if node.op in _INDEX:
        return 0, max(sizes[_INDEX[node.op]], 1) - 1
    if node.kind != "float":
        if node.op in ("literal", "number"):
            value = values.get(node, node.value)
            return value, value
        rule = (_OF_BOOLS if node.kind == "bool" else _RULES).get(node.op)
        if rule is not None and all(arg.kind != "float" for arg in node.args):
            if node.op == "mul" and node.args[0] is node.args[1]:
                rule = _square
            low, high = rule(*args)
            return (low, high) if low >= INT_MIN and high <= INT_MAX else ANY_INT
    if node.op == "lookup":
        return _any_of(dtypes[int(node.value)])
    return _by_arrays(node, args, values)


def _any_of(dtype: torch.dtype) -> Range:
    low, high = _KNOWN.get(dtype) or intervals.any_of(dtype)
    _KNOWN[dtype] = float(low), float(high)
    return _KNOWN[dtype]


def _by_arrays(node: Node, args: list[Range], values: Mapping[Node, Number]) -> Range:
    given = [(np.float64(low), np.float64(high)) for low, high in args]
    with np.errstate(all="ignore"):
        low, high = intervals.of_node(node, given, values.get(node, node.value))
    return float(low), float(high)


def _product(x: Range, y: Range) -> Range:
    corners = (x[0] * y[0], x[0] * y[1], x[1] * y[0], x[1] * y[1])
    return min(corners), max(corners)


def _square(x: Range, _: Range) -> Range:
    least, most = max(0, x[0], -x[1]), max(-x[0], x[1])
    return least * least, most * most


_INDEX = {name: n for n, name in enumerate(INDICES)}
_KNOWN: dict[torch.dtype, Range] = {}
# Of ints. Those that divide or are bitwise are left to the arrays' rules.
_RULES: dict[str, Callable[..., Range]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": _product,
    "neg": lambda x: (-x[1], -x[0]),
    "abs": lambda x: (max(0, x[0], -x[1]), max(-x[0], x[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
}
_OF_BOOLS: dict[str, Callable[..., Range]] = {
    "lt": lambda x, y: (x[1] < y[0], x[0] < y[1]),
    "le": lambda x, y: (x[1] <= y[0], x[0] <= y[1]),
    "gt": lambda x, y: (x[0] > y[1], x[1] > y[0]),
    "ge": lambda x, y: (x[0] >= y[1], x[1] >= y[0]),
    "and": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "or": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "not": lambda x: (1 - x[1], 1 - x[0]),
}
