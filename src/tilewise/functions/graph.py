"""Writes operations down as nodes, with torch's rules: which kinds go together, and what comes out."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import torch

from tilewise.functions.expression import (
    COMPARISONS,
    DTYPES,
    FUNCTIONS,
    INPUTS,
    INT_MAX,
    INT_MIN,
    KINDS,
    Node,
    Number,
)
from tilewise.functions.places import here, refuse
from tilewise.functions.slots import Recipe, Slot, Special, Steered

# Numbers that stand in the text; all others are parameters.
LITERALS = {"int": (-1, 0, 1, 2), "float": (-1.0, 0.0, 0.5, 1.0, 2.0, math.inf, -math.inf)}


class Graph:
    """The nodes so far: the same operation on the same nodes is one node.

    tensors: what is looked up, by number. looked: a tensor was used otherwise than by a lookup, so that what was
    written down may depend on what it holds, or on its shape. recipes: of the numbers that come from slots.
    """

    def __init__(self) -> None:
        self._nodes: dict[Any, Node] = {}
        self.tensors: list[torch.Tensor] = []
        self.looked = False
        self.recipes: dict[Node, Recipe] = {}

    def node(self, op: str, kind: str, *args: Node, value: Number = 0, role: str = "") -> Node:
        # Each place a number stands in is a parameter of its own: two that happen to be equal must not share a text.
        key = object() if op == "number" else (op, kind, args, value)
        found = self._nodes.get(key)
        if found is None:
            uses = frozenset((op,) if op in INPUTS else ()).union(*(a.uses for a in args))
            found = self._nodes[key] = Node(op, kind, args, value, role, here(), uses)
        return found

    def input(self, name: str) -> Node:
        return self.node(name, "float" if name == "s" else "int")

    def constant(self, x: Number, role: str = "") -> Node:
        """A Python number: a bool, an int of 32 bits or a float."""
        if isinstance(x, bool):
            return self.node("literal", "bool", value=x)
        kind = "int" if isinstance(x, int) else "float"
        if kind == "int" and not INT_MIN <= x <= INT_MAX:
            raise refuse(f"integers of a function are 32 bits, got {x}; as a float it could be used")
        literal = x in LITERALS[kind] and not (x == 0 and math.copysign(1.0, x) < 0)
        return self.node("literal" if literal else "number", kind, value=x, role="" if literal else role)

    def lookup(self, tensor: torch.Tensor, index: tuple[Node, ...]) -> Node:
        """An entry of a captured tensor; one index per dimension."""
        if any(i.kind != "int" for i in index):
            raise refuse("tensors are indexed with integers: convert with .int()")
        slot = next((n for n, t in enumerate(self.tensors) if t is tensor), len(self.tensors))
        if slot == len(self.tensors):
            if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
                names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
                raise refuse(f"captured tensors are dense and one of {names}, got {tensor.layout}, {tensor.dtype}")
            self.tensors.append(tensor)
        return self.node("lookup", DTYPES[tensor.dtype], *index, value=slot)

    def _open(self, number: Node, recipe: Recipe) -> Node:
        """A number that comes from a slot."""
        if number.op != "number":
            raise Special
        self.recipes[number] = recipe
        return number

    def of(self, x: Any) -> Node:
        """A number, or a tensor of no dimensions, which on a CPU is a number too."""
        if type(x) is Slot:
            return self._open(self.constant(x.number), x.recipe)
        if isinstance(x, torch.Tensor):
            with torch._C.DisableTorchFunction():  # it is no look into the tensor
                return self._of_tensor(x)
        if isinstance(x, (bool, np.bool_)):
            return self.constant(bool(x))
        if isinstance(x, numbers.Integral):
            return self.constant(int(x))
        if isinstance(x, numbers.Real):
            return self.constant(float(x))
        raise refuse(f"{x!r}, a {type(x).__name__}, is no number")

    def _of_tensor(self, x: torch.Tensor) -> Node:
        if x.dim():
            raise refuse(f"a tensor of shape {tuple(x.shape)} is used whole: index it down to one number")
        return self.of(x.item()) if x.device.type == "cpu" else self.lookup(x, ())

    def to(self, x: Node, kind: str) -> Node:
        """x converted; a float to an int drops what is behind the point."""
        if x.kind == kind:
            return x
        if x.op in ("literal", "number"):
            return self._like(x, self.constant({"bool": bool, "int": int, "float": float}[kind](x.value)), kind)
        return self.node(kind, kind, x)

    def _like(self, x: Node, made: Node, kind: str = "") -> Node:
        """A number made from x, converted or as it is, comes from where x does."""
        if x in self.recipes:
            if kind and kind != "float":
                raise Steered
            return self._open(made, (float, (self.recipes[x],)) if kind else self.recipes[x])
        return made

    def unary(self, op: str, x: Node) -> Node:
        if op in FUNCTIONS:
            return self.node(op, "float", self.to(x, "float"))
        if (op == "not" and x.kind == "float") or (op != "not" and x.kind == "bool"):
            raise refuse(f"{op} of a {x.kind}; ~ is of bools and ints, - and abs are of ints and floats")
        return self.node(op, x.kind, x)

    def binary(self, op: str, x: Node, y: Node) -> Node:
        kind = max(x.kind, y.kind, key=KINDS.index)
        if op in ("and", "or", "xor", "lshift", "rshift"):
            return self._bits(op, kind, x, y)
        if op in ("floordiv", "mod"):
            return self._rounded_division(op, kind, x, y)
        if op == "pow":
            return self._power(kind, x, y)
        if op == "div":
            x, y = self.to(x, "float"), self.to(y, "float")
            return self.node("div", "float", x, self._with_role(y, "factor"))
        if kind == "bool" and op not in COMPARISONS:  # of bools, torch's + and * give bools
            if op == "sub":
                raise refuse("- of two bools; write a & ~b, or a ^ b")
            return self.node("or" if op in ("add", "max") else "and", "bool", x, y)
        return self.node(op, "bool" if op in COMPARISONS else kind, self.to(x, kind), self.to(y, kind))

    def _with_role(self, x: Node, role: str) -> Node:
        return self._like(x, self.constant(x.value, role)) if x.op == "number" else x

    def _bits(self, op: str, kind: str, x: Node, y: Node) -> Node:
        if kind == "float":
            raise refuse("& | ^ << >> are of bools and ints")
        if op in ("lshift", "rshift"):
            kind = "int"
        return self.node(op, kind, self.to(x, kind), self.to(y, kind))

    def _rounded_division(self, op: str, kind: str, x: Node, y: Node) -> Node:
        kind = "int" if kind == "bool" else kind
        x, y = self.to(x, kind), self.to(y, kind)
        if y.op == "literal" and y.value == 0:
            raise refuse("// or % by 0")
        if kind == "int" and y.op == "number" and y.value > 0:
            y = self._with_role(y, "divisor")
        return self.node(op, kind, x, y)

    def _power(self, kind: str, x: Node, y: Node) -> Node:
        kind = "int" if kind == "bool" else kind
        if y in self.recipes:
            raise Steered
        exponent = y.value if y.op in ("literal", "number") else None
        if kind == "int" and exponent is not None and exponent < 0:
            raise refuse("an integer to a negative power; write x.float() ** …")
        x = self.to(x, kind)
        if exponent == 1:
            return x
        if exponent == 2:
            return self.node("mul", kind, x, x)
        if exponent == 3:
            return self.node("mul", kind, self.node("mul", kind, x, x), x)
        if exponent == 0.5:
            return self.unary("sqrt", x)
        if exponent == -1:
            return self.node("div", "float", self.constant(1.0), x)
        if exponent == -0.5:
            return self.unary("rsqrt", x)
        if kind == "float" and x.op == "literal" and x.value == 2:
            return self.unary("exp2", y)
        return self.node("pow", kind, x, self.to(y, kind))

    def where(self, condition: Node, x: Node, y: Node) -> Node:
        if condition.kind != "bool":
            raise refuse(f"torch.where of a condition that is a {condition.kind}; compare it, as with != 0")
        kind = max(x.kind, y.kind, key=KINDS.index)
        return self.node("where", kind, condition, self.to(x, kind), self.to(y, kind))
