"""The derivative of a score by s, as an expression of the same form: forward mode over the nodes."""

from __future__ import annotations

import math
from collections.abc import Callable

from tilewise.functions.expression import ROUNDINGS, Node, in_order
from tilewise.functions.function import Expressions, Function, Recent
from tilewise.functions.graph import Graph

_known: Recent[Function] = Recent(64)


def slope_of(function: Function) -> Function:
    """A function like this one whose score is the derivative of the score by s; it has no mask."""
    found = _known.get(function.key)
    if found is None:
        score = function.score
        assert score is not None
        found = Function(Expressions.of(None, derivative(score)), function.tensors)
        _known.keep(function.key, found)
    return found


def derivative(score: Node) -> Node:
    """d score / ds. Where it jumps it is that of one side; of what is rounded it is 0, as torch has it."""
    make = _Maker()
    for node in in_order(score):
        make.add(node)
    return make.slopes.get(score) or make.graph.constant(0.0)


class _Maker:
    """slopes: of the nodes whose derivative may be something else than 0."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.slopes: dict[Node, Node] = {}

    def add(self, node: Node) -> None:
        if node.op == "s":
            self.slopes[node] = self.graph.constant(1.0)
        elif node.kind == "float" and any(arg in self.slopes for arg in node.args):
            slope = self._slope(node)
            if slope is not None:
                self.slopes[node] = slope

    def _slope(self, node: Node) -> Node | None:
        if node.op in ROUNDINGS:
            return None
        if node.op in _OF_ONE:
            (x,) = node.args
            return self._times(self.slopes[x], _OF_ONE[node.op](self, x, node))
        rule: Callable[[Node], Node | None] = getattr(self, f"_{node.op}")
        return rule(node)

    # ---- sums and products that leave out what is 0 or 1 ------------------------------------------------------------
    def number(self, x: float) -> Node:
        return self.graph.constant(x)

    def binary(self, op: str, x: Node, y: Node) -> Node:
        return self.graph.binary(op, x, y)

    def _times(self, x: Node | None, y: Node) -> Node | None:
        if x is None or (y.op == "literal" and y.value == 1):
            return x
        return y if x.op == "literal" and x.value == 1 else self.binary("mul", x, y)

    def _plus(self, x: Node | None, y: Node | None) -> Node | None:
        return y if x is None else x if y is None else self.binary("add", x, y)

    def _minus(self, x: Node | None, y: Node | None) -> Node | None:
        if y is None:
            return x
        return self.graph.unary("neg", y) if x is None else self.binary("sub", x, y)

    def _or_zero(self, x: Node | None) -> Node:
        return self.number(0.0) if x is None else x

    # ---- operations -------------------------------------------------------------------------------------------------
    def _both(self, node: Node) -> tuple[Node | None, Node | None]:
        return self.slopes.get(node.args[0]), self.slopes.get(node.args[1])

    def _add(self, node: Node) -> Node | None:
        return self._plus(*self._both(node))

    def _sub(self, node: Node) -> Node | None:
        return self._minus(*self._both(node))

    def _mul(self, node: Node) -> Node | None:
        (x, y), (dx, dy) = node.args, self._both(node)
        return self._plus(self._times(dx, y), self._times(dy, x))

    def _div(self, node: Node) -> Node | None:
        (_, y), (dx, dy) = node.args, self._both(node)
        inner = self._minus(dx, self._times(dy, node))
        return None if inner is None else self.binary("div", inner, y)

    def _neg(self, node: Node) -> Node | None:
        return self._minus(None, self.slopes[node.args[0]])

    def _where(self, node: Node) -> Node | None:
        condition, x, y = node.args
        return self.graph.where(condition, self._or_zero(self.slopes.get(x)), self._or_zero(self.slopes.get(y)))

    def _choice(self, node: Node, op: str) -> Node:
        dx, dy = self._both(node)
        return self.graph.where(self.binary(op, *node.args), self._or_zero(dx), self._or_zero(dy))

    def _min(self, node: Node) -> Node | None:
        return self._choice(node, "le")

    def _max(self, node: Node) -> Node | None:
        return self._choice(node, "ge")

    def _mod(self, node: Node) -> Node | None:
        (x, y), (dx, dy) = node.args, self._both(node)
        return self._minus(dx, None if dy is None else self._times(dy, self.binary("floordiv", x, y)))

    def _floordiv(self, node: Node) -> Node | None:
        return None

    def _pow(self, node: Node) -> Node | None:
        (x, y), (dx, dy) = node.args, self._both(node)
        power = self.binary("pow", x, self.binary("sub", y, self.number(1.0)))
        first = self._times(dx, self.binary("mul", y, power))
        return self._plus(first, None if dy is None else self._times(dy, self.binary("mul", node, self._log(x))))

    def _log(self, x: Node) -> Node:
        return self.graph.unary("log", x)

    def _float(self, node: Node) -> Node | None:
        return self.slopes.get(node.args[0])


def _abs(make: _Maker, x: Node, node: Node) -> Node:
    zero = make.number(0.0)
    inner = make.graph.where(make.binary("lt", x, zero), make.number(-1.0), zero)
    return make.graph.where(make.binary("gt", x, zero), make.number(1.0), inner)


# Of a function of one float, given the float and the result
_OF_ONE: dict[str, Callable[[_Maker, Node, Node], Node]] = {
    "abs": _abs,
    "exp": lambda make, x, y: y,
    "exp2": lambda make, x, y: make.binary("mul", y, make.number(math.log(2))),
    "log": lambda make, x, y: make.binary("div", make.number(1.0), x),
    "log2": lambda make, x, y: make.binary("div", make.number(1 / math.log(2)), x),
    "tanh": lambda make, x, y: make.binary("sub", make.number(1.0), make.binary("mul", y, y)),
    "sigmoid": lambda make, x, y: make.binary("mul", y, make.binary("sub", make.number(1.0), y)),
    "sqrt": lambda make, x, y: make.binary("div", make.number(0.5), y),
    "rsqrt": lambda make, x, y: make.binary("mul", make.number(-0.5), make.binary("div", y, x)),
    "sin": lambda make, x, y: make.graph.unary("cos", x),
    "cos": lambda make, x, y: make.graph.unary("neg", make.graph.unary("sin", x)),
}
