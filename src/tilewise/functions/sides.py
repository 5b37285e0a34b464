"""A score where all keys of a block lie on one side of the rows: none after a row's own position, or all after it.

There |q - k| is a difference and q >= k is known, so that the expression has fewer operations; and if what it adds to s
grows evenly from key to key, it is a line, which a kernel follows with one multiply-add per key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tilewise.functions.expression import COMPARISONS, Node, in_order
from tilewise.functions.facts import Facts, Range

SIDES = ("kBefore", "kAfter")  # kernels/common/scores.cuh: Side
# What x - y tells of a comparison: sure if the first holds for its range (low, high), false if the second does
_DECIDED: dict[str, tuple[Callable[[float, float], bool], Callable[[float, float], bool]]] = {
    "lt": (lambda low, high: high < 0, lambda low, high: low >= 0),
    "le": (lambda low, high: high <= 0, lambda low, high: low > 0),
    "gt": (lambda low, high: low > 0, lambda low, high: high <= 0),
    "ge": (lambda low, high: low >= 0, lambda low, high: high < 0),
    "eq": (lambda low, high: low == high == 0, lambda low, high: low > 0 or high < 0),
    "ne": (lambda low, high: low > 0 or high < 0, lambda low, high: low == high == 0),
}


class Sided(NamedTuple):
    """An expression of the same value on its side, with the facts of its nodes."""

    root: Node
    facts: Facts


class Line(NamedTuple):
    """s · factor + base, of which base grows by step per key. factor None: 1; base has k, the others do not."""

    factor: Node | None
    step: Node
    base: Node


class _Linear(NamedTuple):
    """rows · q + keys · k + rest, with low <= rest <= high."""

    rows: float
    keys: float
    low: float
    high: float

    def plus(self, other: _Linear, sign: int = 1) -> _Linear:
        low, high = (other.low, other.high) if sign > 0 else (-other.high, -other.low)
        return _Linear(self.rows + sign * other.rows, self.keys + sign * other.keys, self.low + low, self.high + high)


def on_side(score: Node, side: str, facts: Facts) -> Sided:
    """The score on a side, one of SIDES; the same node if nothing is known of it there."""
    rewriting = _Rewriting(side, facts.copy())
    return Sided(rewriting.of(score), rewriting.facts)


class _Rewriting:
    """Each node takes the facts of the one it stands for, which it equals on this side."""

    def __init__(self, side: str, facts: Facts) -> None:
        self.facts = facts
        self._distance = (0.0, math.inf) if side == "kBefore" else (-math.inf, -1.0)  # q - k
        self._made: dict[Node, Node] = {}

    def of(self, root: Node) -> Node:
        for node in in_order(root):
            self._made[node] = self._rewritten(node, tuple(self._made[a] for a in node.args))
        return self._made[root]

    def _rewritten(self, node: Node, args: tuple[Node, ...]) -> Node:
        found = self._simpler(node, args)
        if found is None:
            found = node if args == node.args else _node(node, node.op, *args)
        self.facts.inherit(found, node)
        return found

    def _simpler(self, node: Node, args: tuple[Node, ...]) -> Node | None:
        if node.op == "abs" and (bounds := self._bounds(self._linear(args[0]))):
            if bounds[0] >= 0:  # a node of its own, which has the facts of the absolute value
                return _node(args[0], args[0].op, *args[0].args)
            return _opposite(args[0]) if bounds[1] <= 0 else None
        if node.op in COMPARISONS and (bounds := self._difference(*args)):
            for answer, decided in zip((True, False), _DECIDED[node.op], strict=True):
                if decided(*bounds):
                    return _literal(node, answer)
        if node.op in ("min", "max") and (bounds := self._difference(*args)):
            if bounds[0] >= 0:
                return args[node.op == "min"]
            return args[node.op == "max"] if bounds[1] <= 0 else None
        if node.op == "where" and args[0].op == "literal":
            return args[1] if args[0].value else args[2]
        return _logical(node, args) if node.kind == "bool" else None

    def _difference(self, x: Node, y: Node) -> Range | None:
        first, second = self._linear(x), self._linear(y)
        return None if first is None or second is None else self._bounds(first.plus(second, -1))

    def _bounds(self, x: _Linear | None) -> Range | None:
        """What a linear value of q - k can be."""
        if x is None or x.rows + x.keys:
            return None
        ends = sorted(x.rows * end if x.rows else 0.0 for end in self._distance)
        return ends[0] + x.low, ends[1] + x.high

    def _linear(self, node: Node) -> _Linear | None:
        """A whole number, exact all along: an int that does not wrap, or a small float."""
        if node.kind == "bool" or (self.facts.wraps(node) if node.kind == "int" else not self.facts.small(node)):
            return None
        if node.op in ("q", "k"):
            return _Linear(node.op == "q", node.op == "k", 0.0, 0.0)
        if node.op == "literal" and float(node.value).is_integer():
            return _Linear(0.0, 0.0, float(node.value), float(node.value))
        if node.op == "float":
            return self._linear(node.args[0])
        if node.op not in ("add", "sub", "neg"):
            return None
        parts = [self._linear(arg) for arg in node.args]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        if node.op == "neg":
            return _Linear(0.0, 0.0, 0.0, 0.0).plus(known[0], -1)
        return known[0].plus(known[1], 1 if node.op == "add" else -1)


def _node(like: Node, op: str, *args: Node, kind: str = "") -> Node:
    uses = frozenset().union(*(a.uses for a in args))
    return Node(op, kind or like.kind, args, like.value, like.role, like.place, uses)


def _literal(like: Node, value: bool | float) -> Node:
    kind = "bool" if isinstance(value, bool) else "float"
    return Node("literal", kind, (), value, "", like.place, frozenset())


def _opposite(x: Node) -> Node:
    return _node(x, "sub", x.args[1], x.args[0]) if x.op == "sub" else _node(x, "neg", x)


def _logical(node: Node, args: tuple[Node, ...]) -> Node | None:
    """& | ^ ~ of bools of which one is known."""
    known = [a for a in args if a.op == "literal"]
    if not known or node.op not in ("and", "or", "xor", "not"):
        return None
    value = bool(known[0].value)
    if node.op == "not":
        return _literal(node, not value)
    other = args[0] if args[1] is known[0] else args[1]
    if node.op == "xor":
        return _node(node, "not", other) if value else other
    return other if value == (node.op == "and") else known[0]


# ---- lines ----------------------------------------------------------------------------------------------------------


class _NoLine(Exception):
    pass


def line_of(score: Node, facts: Facts) -> Line | None:
    """The score as a line along the keys; None if it is none, or if it is the same for all keys."""
    try:
        factor, base = _split(score)
        step = None if base is None else _step(base, facts)
    except _NoLine:
        return None
    if base is None or step is None or (factor is not None and "k" in factor.uses):
        return None
    return Line(None if factor is None or (factor.op == "literal" and factor.value == 1) else factor, step, base)


def _split(node: Node) -> tuple[Node | None, Node | None]:
    """(factor, rest) of node = s · factor + rest; None for 0."""
    if "s" not in node.uses:
        return None, node
    if node.op == "s":
        return _literal(node, 1.0), None
    if node.op in ("add", "sub", "neg"):
        parts = [_split(arg) for arg in node.args]
        if node.op == "neg":
            return _negated(node, parts[0][0]), _negated(node, parts[0][1])
        return _sum(node, parts[0][0], parts[1][0]), _sum(node, parts[0][1], parts[1][1])
    if node.op == "mul":
        x, y = node.args if "s" in node.args[0].uses else node.args[::-1]
    elif node.op == "div":
        x, y = node.args
    else:
        raise _NoLine
    if "s" in y.uses:
        raise _NoLine
    factor, rest = _split(x)
    return _times(node, factor, y), _times(node, rest, y)


def _step(node: Node, facts: Facts) -> Node | None:
    """By how much a node grows per key, a float without k; None for 0."""
    if "k" not in node.uses:
        return None
    if node.kind == "int" and facts.wraps(node):
        raise _NoLine
    if node.op == "k":
        return _literal(node, 1.0)
    if node.op == "float":
        return _step(node.args[0], facts)
    if node.op in ("add", "sub", "neg"):
        parts = [_step(arg, facts) for arg in node.args]
        return _negated(node, parts[0]) if node.op == "neg" else _sum(node, parts[0], parts[1])
    if node.op == "mul":
        x, y = node.args if "k" in node.args[0].uses else node.args[::-1]
    elif node.op == "div":
        x, y = node.args
    else:
        raise _NoLine
    if "k" in y.uses:
        raise _NoLine
    return _times(node, _step(x, facts), y)


def _negated(like: Node, x: Node | None) -> Node | None:
    if x is not None and x.op == "literal":
        return _literal(like, -float(x.value))
    return None if x is None else _node(like, "neg", x, kind="float")


def _sum(like: Node, x: Node | None, y: Node | None) -> Node | None:
    """x + y or x - y, as `like` has it."""
    if y is None:
        return x
    if x is None:
        return y if like.op == "add" else _negated(like, y)
    return _node(like, like.op, x, y, kind="float")


def _times(like: Node, x: Node | None, y: Node) -> Node | None:
    """x · y or x / y, as `like` has it; y may be an int."""
    if x is None:
        return None
    y = y if y.kind == "float" else _node(y, "float", y, kind="float")
    return _node(like, like.op, x, y, kind="float")
