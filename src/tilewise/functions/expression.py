"""The one form of a traced function: nodes that are shared, each a bool, an int or a float.

Integers are 32 bits and wrap, what is read from an int64 tensor too; // and % round down as Python does, by 0 they give
0 and the dividend; an index past a tensor's end means its last entry, one before its beginning the first.

A float is computed in one of two ways (`in_context`). What a comparison or a conversion to an integer sees is computed
operation by operation in float32, so that every backend decides alike. What only goes into the score may be reordered
and fused, and is computed in the score's own precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise.functions.places import Place

INDICES = ("b", "h", "q", "k")
INPUTS = ("s", *INDICES)
KINDS = ("bool", "int", "float")  # an operation of two takes the later kind for both
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ROUNDINGS = ("floor", "ceil", "trunc", "round")
FUNCTIONS = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt", "rsqrt", "sin", "cos", *ROUNDINGS)  # of a float
# A small difference of their operands may make a large one of their result.
DISCRETE = (*COMPARISONS, *ROUNDINGS, "int", "bool", "floordiv", "mod")
DTYPES = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), "float"),
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), "int"),
    torch.bool: "bool",
}
INT_MIN, INT_MAX = -(2**31), 2**31 - 1

Number = bool | int | float


@dataclass(frozen=True, eq=False)
class Node:
    """One value of the function.

    op: an input's name; "literal" and "number", which have a `value`, a number being a parameter of the kernel;
    "lookup" of tensor number `value` at the indices `args`; "bool", "int" and "float", which convert; else the
    operation's name. role: of a number, "divisor" if integers are divided by it, "factor" if floats are. uses: the
    inputs it depends on. place: the line that wrote it.
    """

    op: str
    kind: str
    args: tuple[Node, ...]
    value: Number
    role: str
    place: Place
    uses: frozenset[str]


def in_order(*roots: Node) -> list[Node]:
    """What the roots need and they themselves, each after its arguments."""
    return list(dict.fromkeys(node for root in roots for node, _ in in_context(root, False)))


def in_context(root: Node, smooth: bool) -> list[tuple[Node, bool]]:
    """What `root` needs, each after its arguments, with how: smooth if only the score's value comes from it."""
    found: dict[tuple[Node, bool], None] = {}
    waiting: list[tuple[Node, bool, Iterator[Node]]] = [(root, smooth, iter(root.args))]
    while waiting:
        node, way, rest = waiting[-1]
        for arg in rest:
            needed = arg, needs_smooth(node, way, arg)
            if needed not in found:
                waiting.append((*needed, iter(arg.args)))
                break
        else:
            waiting.pop()
            found[node, way] = None
    return list(found)


def needs_smooth(node: Node, smooth: bool, arg: Node) -> bool:
    """Is this argument computed smoothly if the node is?"""
    return smooth and arg.kind == "float" and node.op not in DISCRETE
