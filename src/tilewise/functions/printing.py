"""An expression as CUDA C++: UserFunction, whose text holds no value of what the function captured.

Ranges that the sizes give let the text do less: an index that stays inside its tensor is not clamped, an integer that
does not leave 32 bits needs no care, floats of small integers stay floats all along (fq, fk). In the score, factors
that are the same for a whole tile are multiplied first. Of blocks whose keys all lie on one side of the rows
(sides.py) there is a text of its own where that makes it shorter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tilewise.functions.expression import (
    COMPARISONS,
    INPUTS,
    Node,
    Number,
    in_context,
    in_order,
    needs_smooth,
)
from tilewise.functions.facts import Facts
from tilewise.functions.layout import Table, fields
from tilewise.functions.sides import SIDES, Line, line_of, on_side

_CONSTANT = re.compile(r"\bv\d+\b")
_SYMBOLS = {
    **dict(zip(COMPARISONS, ("<", "<=", ">", ">=", "==", "!="), strict=True)),
    **dict(zip(("add", "sub", "mul", "and", "or", "xor"), "+-*&|^", strict=True)),
}
_NAMES = {"min": "least", "max": "greatest", "lshift": "shift_left", "rshift": "shift_right", "pow": "power"}
_BOTH_KINDS = ("add", "sub", "mul", "min", "max", "neg", "abs")  # of ints and of floats by one rule
# As every backend computes them
_PLAIN = {
    **{name: f"{name}f({{0}})" for name in ("exp", "exp2", "log", "log2", "tanh", "sqrt", "sin", "cos")},
    **{name: f"{name}f({{0}})" for name in ("floor", "ceil", "trunc")},
    "round": "rintf({0})",
    "sigmoid": "(1.0f / (1.0f + expf(-{0})))",
    "rsqrt": "(1.0f / sqrtf({0}))",
    "abs": "fabsf({0})",
    "neg": "(-{0})",
}
# As the score may have them: a factor of the argument, and what is done to it
_FAST = {
    "exp": ("kLog2e", "ptx::exp2({0})"),
    "exp2": ("", "ptx::exp2({0})"),
    "log2": ("", "ptx::log2({0})"),
    "tanh": ("(2.0f * kLog2e)", "warp::tanh_from_log2({0})"),
    "sigmoid": ("(-kLog2e)", "ptx::reciprocal(1.0f + ptx::exp2({0}))"),
}


class Product(NamedTuple):
    """Factors: of the whole tile, of a row, of an element."""

    tile: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    element: tuple[str, ...] = ()

    def __mul__(self, other: Product) -> Product:  # type: ignore[override]
        return Product(self.tile + other.tile, self.row + other.row, self.element + other.element)


def _literal(value: Number) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"({value})" if value < 0 else str(value)
    return {math.inf: "INFINITY", -math.inf: "(-INFINITY)"}.get(value, f"{value}f")


def steps(node: Node) -> tuple[int, int] | None:
    """By how much an index moves per query row and per key, where that is −1, 0 or 1; None if it is not so plain."""
    if node.op in ("q", "k"):
        return (1, 0) if node.op == "q" else (0, 1)
    if not {"q", "k"} & set(node.uses):
        return 0, 0
    if node.kind != "int" or node.op not in ("add", "sub"):
        return None
    first, second = (steps(arg) for arg in node.args)
    if first is None or second is None:
        return None
    sign = 1 if node.op == "add" else -1
    per_row, per_key = first[0] + sign * second[0], first[1] + sign * second[1]
    return (per_row, per_key) if max(abs(per_row), abs(per_key)) <= 1 else None


def text(
    mask: Node | None,
    score: Node | None,
    numbers: Sequence[Node],
    tables: Sequence[Table],
    facts: Facts,
) -> str:
    """The structure with its functions. facts: of every node, over the whole problem."""
    roots = [root for root in (mask, score) if root is not None]
    by_key, by_row = (any(n.op == "lookup" and x in n.uses for n in in_order(*roots)) for x in "kq")
    indices = "int b, int h, int q, int k, float fq, float fk, int q0, int dq, int k0, int dk"
    lines = ['#include "common/functions.cuh"', "struct UserFunction {"]
    lines += [f"    {field.type} {field.name};" for field in fields(tables, numbers)]
    flags = {"kMask": mask is not None, "kScore": score is not None, "kByKey": by_key, "kByRow": by_row}
    lines += [f"    static constexpr bool {name} = {str(flag).lower()};" for name, flag in flags.items()]
    lines.append(f"    TILE_DEVICE bool mask({indices}) const {{")
    lines += [*Printer(numbers, tables, facts).body(mask, "true"), "    }"]
    lines += _scores(score, numbers, tables, facts, indices)
    touched = _touched(score, facts)
    lines.append(f"    static constexpr bool kTouches = {str(bool(touched)).lower()};")
    lines.append(f"    TILE_DEVICE void touch({indices}) const {{")
    lines += [*Printer(numbers, tables, facts).touches(touched), "    }"]
    lines.append("    TILE_DEVICE Interval seen(Interval b, Interval h, Interval q, Interval k) const {")
    lines += seen(mask, numbers, tables) if mask is not None else ["        return {1.0, 1.0};"]
    return "\n".join([*lines, "    }", "};", ""])


def _scores(
    score: Node | None,
    numbers: Sequence[Node],
    tables: Sequence[Table],
    facts: Facts,
    indices: str,
) -> list[str]:
    """score() of each side, and line() of the sides where it is a line."""
    scores: dict[str, list[str]] = {}
    lines: dict[str, list[str]] = {}
    for side in SIDES:
        if score is None:
            break
        sided = on_side(score, side, facts)
        line, printer = line_of(sided.root, sided.facts), Printer(numbers, tables, sided.facts)
        if line is not None:
            lines[side] = printer.line(line)
        elif sided.root is not score:
            scores[side] = printer.body(sided.root, "")
    flags = ", ".join(str(side in lines).lower() for side in ("", *SIDES))
    return [
        f"    static constexpr bool kSided = {str(bool(scores or lines)).lower()}, kLine[3] = {{{flags}}};",
        f"    template <int kSide = kAround> TILE_DEVICE float score(float s, float scale, {indices}) const {{",
        *_by_side(scores, Printer(numbers, tables, facts).body(score, "s * scale")),
        "    }",
        f"    template <int kSide> TILE_DEVICE Line line(float scale, {indices}) const {{",
        *_by_side(lines, ["        return {};"]),
        "    }",
    ]


def _by_side(cases: Mapping[str, Sequence[str]], otherwise: Sequence[str]) -> list[str]:
    """Statements of each side that has its own, else the others."""
    lines: list[str] = []
    for side, body in cases.items():
        lines += [f"        {'} else ' if lines else ''}if constexpr (kSide == {side}) {{", *_inner(body)]
    return [*lines, "        } else {", *_inner(otherwise), "        }"] if lines else list(otherwise)


def _inner(lines: Sequence[str]) -> list[str]:
    return ["    " + line for line in lines]


class Printer:
    """The statements of one expression, each a constant; the same statement stands there once."""

    def __init__(self, numbers: Sequence[Node], tables: Sequence[Table], facts: Facts) -> None:
        self._numbers = {node: n for n, node in enumerate(numbers)}
        self._tables, self._facts = tables, facts
        self._names: dict[tuple[str, str], str] = {}  # of constants, by their type and value
        self._values: dict[tuple[Node, bool], str | Product] = {}

    def body(self, root: Node | None, otherwise: str) -> list[str]:
        result = otherwise if root is None else self._whole(root.kind, self._value(root))
        return [*self._needed(result), f"        return {result};"]

    def line(self, line: Line) -> list[str]:
        scale = Product(tile=("scale",))
        factor = scale if line.factor is None else self._factor(line.factor, self._value(line.factor)) * scale
        values = (factor, *(self._factor(node, self._value(node)) for node in (line.step, line.base)))
        result = ", ".join(self._whole("float", value) for value in values)
        return [*self._needed(result), f"        return {{{result}}};"]

    def _value(self, root: Node) -> str | Product:
        """What is printed of a root and of all that it needs."""
        smooth = root.kind == "float"
        for node, way in in_context(root, smooth):
            self._values[node, way] = self._smooth(node) if way else self._exact(node, False)
        return self._values[root, smooth]

    def touches(self, lookups: Sequence[Node]) -> list[str]:
        """Statements that ask for what these lookups will read, and do not wait for it."""
        entries = []
        for node in lookups:
            for arg in node.args:
                for part, way in in_context(arg, False):
                    self._values[part, way] = self._smooth(part) if way else self._exact(part, False)
            entries.append(self._entry(node))
        lines = self._needed(" ".join(entries))
        return [*lines, *(f"        ptx::touch(function::entry({at}));" for at in entries)]

    def _needed(self, result: str) -> list[str]:
        """The statements that the result comes from."""
        lines, needed = [], set(_CONSTANT.findall(result))
        for (kind, value), name in reversed(self._names.items()):
            if name in needed:
                lines.append(f"        const {kind} {name} = {value};")
                needed.update(_CONSTANT.findall(value))
        return lines[::-1]

    def _let(self, kind: str, value: str) -> str:
        return self._names.setdefault((kind, value), f"v{len(self._names)}")

    def _whole(self, kind: str, value: str | Product) -> str:
        """A value as one name or literal; a product is multiplied out, what is shared first."""
        if isinstance(value, str):
            return value
        made: tuple[str, ...] = ()
        for factors in value:
            made += factors
            if len(made) > 1:
                made = (self._let(kind, " * ".join(made)),)
        return made[0]

    def _arg(self, node: Node, smooth: bool, place: int) -> str:
        arg = node.args[place]
        return self._whole(arg.kind, self._values[arg, needs_smooth(node, smooth, arg)])

    # ---- leaves -----------------------------------------------------------------------------------------------------

    def _leaf(self, node: Node) -> str | None:
        if node.op in INPUTS:
            return node.op
        if node.op == "literal":
            return _literal(node.value)
        return f"n{self._numbers[node]}" if node.op == "number" else None

    def _lookup(self, node: Node) -> str:
        return self._let(node.kind, f"function::{node.kind}_at({self._entry(node)})")

    def _entry(self, node: Node) -> str:
        """Where a lookup reads: a pointer, and how many entries further on."""
        slot = int(node.value)
        table = self._tables[slot]
        offsets, step = [], ""
        for d, arg in enumerate(node.args):
            inside = self._facts.inside(node, d)
            if inside and table.dense[d] and not step and (moves := steps(arg)) and any(moves):
                offsets.append(self._apart(arg))
                step = f"{moves[0]} * dq + {moves[1]} * dk"
                continue
            index = self._arg(node, False, d)
            if not inside:
                index = self._let("int", f"function::within({index}, t{slot}_size{d})")
            index = f"int64_t({index})" if table.wide else index
            offsets.append(index if table.dense[d] else f"{index} * t{slot}_stride{d}")
        at = " + ".join(offsets) or "0"
        return f"t{slot} + ({at}), {step}" if step else f"t{slot}, {at}"

    def _apart(self, node: Node) -> str:
        """An index in 64 bits of row q0 and key k0, where q = q0 + dq and k = k0 + dk.

        q0 and k0 are the same for all that a lane looks up in a block, and dq and dk constants, which a load adds for
        nothing; and where two lookups differ in nothing, there is one.
        """
        if node.op in ("q", "k"):
            return f"int64_t({node.op}0)"
        if any(steps(node) or ()):
            symbol = "+" if node.op == "add" else "-"
            return f"({self._apart(node.args[0])} {symbol} {self._apart(node.args[1])})"
        return f"int64_t({self._whole(node.kind, self._values[node, False])})"

    # ---- as every backend computes it -------------------------------------------------------------------------------

    def _exact(self, node: Node, smooth: bool) -> str:
        leaf = self._leaf(node)
        if leaf is not None:
            return leaf if node.op != "s" else self._let("float", "ptx::multiply(s, scale)")
        if node.op == "lookup":
            return self._lookup(node)
        args = [self._arg(node, smooth, place) for place in range(len(node.args))]
        if node.op in COMPARISONS:
            value = f"({args[0]} {_SYMBOLS[node.op]} {args[1]})"
        elif node.op == "where":
            value = f"({args[0]} ? {args[1]} : {args[2]})"
        elif node.op in ("bool", "int", "float"):
            return self._converted(node, args[0])
        elif node.kind == "float":
            value = self._exact_float(node, args)
        elif node.kind == "int":
            value = self._integer(node, args)
        else:
            value = f"(!{args[0]})" if node.op == "not" else f"({args[0]} {_SYMBOLS[node.op]} {args[1]})"
        return self._let(node.kind, value)

    def _converted(self, node: Node, arg: str) -> str:
        if node.op == "bool":
            return self._let("bool", f"({arg} != 0)")
        if node.op == "int":
            return self._let("int", f"function::to_int({arg})" if node.args[0].kind == "float" else f"int({arg})")
        made = self._as_float(node.args[0]) or f"float({arg})"
        return made if made in ("fq", "fk") else self._let("float", made)

    def _as_float(self, node: Node) -> str | None:
        """An int as a float by float arithmetic, where that is exact."""
        if not self._facts.small(node):
            return None
        if node.op in ("q", "k"):
            return f"f{node.op}"
        if node.op == "literal":
            return f"{float(node.value)}f"
        if node.op in ("add", "sub", "mul", "neg", "abs", "min", "max"):
            parts = [self._as_float(arg) for arg in node.args]
            if None in parts:
                return None
            if len(parts) == 1:
                return f"(-{parts[0]})" if node.op == "neg" else f"fabsf({parts[0]})"
            if node.op in ("min", "max"):
                return f"f{node.op}f({parts[0]}, {parts[1]})"
            return f"({parts[0]} {_SYMBOLS[node.op]} {parts[1]})"
        return f"float({self._values[node, False]})"

    def _exact_float(self, node: Node, args: list[str]) -> str:
        if node.op in _PLAIN:
            return _PLAIN[node.op].format(*args)
        if node.op == "mul":
            return f"ptx::multiply({args[0]}, {args[1]})"  # not fused into a sum
        if node.op in ("add", "sub"):
            return f"({args[0]} {_SYMBOLS[node.op]} {args[1]})"
        if node.op == "div":
            return f"({args[0]} / {args[1]})"
        limit = node.args[1]
        if node.op in ("min", "max") and limit.op in ("literal", "number") and not self._facts.is_nan(limit):
            return f"function::at_{'most' if node.op == 'min' else 'least'}({args[0]}, {args[1]})"
        return f"function::{_NAMES.get(node.op, node.op)}({args[0]}, {args[1]})"

    def _integer(self, node: Node, args: list[str]) -> str:
        if node.op in ("and", "or", "xor") or (node.op in ("add", "sub", "mul") and not self._facts.wraps(node)):
            return f"({args[0]} {_SYMBOLS[node.op]} {args[1]})"
        if node.op == "not":
            return f"(~{args[0]})"
        if node.args[-1].role == "divisor":
            divisor = f"d{self._numbers[node.args[1]]}"
            positive = "_positive" if self._facts.positive(node.args[0]) else ""
            return f"function::{node.op}{positive}({args[0]}, {divisor})"
        return f"function::{_NAMES.get(node.op, node.op)}({', '.join(args)})"

    # ---- as the score may have it -----------------------------------------------------------------------------------

    def _factor(self, node: Node, value: str | Product) -> Product:
        if isinstance(value, Product):
            return value
        if "s" in node.uses or "k" in node.uses:
            return Product(element=(value,))
        return Product(row=(value,)) if "q" in node.uses else Product(tile=(value,))

    def _product(self, node: Node, place: int) -> Product:
        arg = node.args[place]
        return self._factor(arg, self._values[arg, needs_smooth(node, True, arg)])

    def _smooth(self, node: Node) -> str | Product:
        if node.op == "s":
            return Product(tile=("scale",), element=("s",))
        if node.op == "mul":
            return self._product(node, 0) * self._product(node, 1)
        if node.op == "div":
            return self._product(node, 0) * self._reciprocal(node)
        if node.op == "neg" and (product := self._product(node, 0)).tile:
            return product * Product(tile=("-1.0f",))
        if node.op == "log":
            base2 = self._let("float", f"ptx::log2({self._arg(node, True, 0)})")
            return self._factor(node, base2) * Product(tile=("kLn2",))
        if node.op in _FAST:
            factor, form = _FAST[node.op]
            product = self._product(node, 0) * Product(tile=(factor,) if factor else ())
            return self._let("float", form.format(self._whole("float", product)))
        return self._exact(node, True)

    def _reciprocal(self, node: Node) -> Product:
        by = node.args[1]
        if by.op == "number":
            return Product(tile=(f"r{self._numbers[by]}",))
        if by.op == "literal" and by.value in (-1, 0.5, 1, 2):
            return Product(tile=(f"{1 / by.value}f",))
        return self._factor(by, self._let("float", f"ptx::reciprocal({self._arg(node, True, 1)})"))


def _touched(score: Node | None, facts: Facts) -> list[Node]:
    """The score's lookups by row or key whose place is known before anything is looked up, and lies in their tensor."""
    found = []
    for node in in_order(score) if score is not None else ():
        if (
            node.op == "lookup"
            and {"q", "k"} & set(node.uses)
            and not any(n.op in ("lookup", "s") for arg in node.args for n in in_order(arg))
            and all(facts.inside(node, dim) for dim in range(len(node.args)))
        ):
            found.append(node)
    return found


def seen(mask: Node, numbers: Sequence[Node], tables: Sequence[Table]) -> list[str]:
    """The statements of interval arithmetic over the mask: common/intervals.cuh."""
    places = {node: n for n, node in enumerate(numbers)}
    names: dict[Node, str] = {}
    lines: list[str] = []
    for node in in_order(mask):
        args = [names[a] for a in node.args]
        if node.op in INPUTS:
            names[node] = node.op
            continue
        if node.op == "literal":
            made = f"interval::only({_literal(node.value)})"
        elif node.op == "number":
            value = f"int(d{places[node]}.divisor)" if node.role == "divisor" else f"n{places[node]}"
            made = f"interval::number({value})"
        elif node.op == "lookup":
            made = _reach(node, args, tables[int(node.value)])
        elif node.op == "mul" and node.args[0] is node.args[1]:
            made = f"interval::square<{node.kind}>({args[0]})"
        else:
            made = _interval_call(node, args)
        names[node] = f"v{len(lines)}"
        lines.append(f"        const Interval {names[node]} = {made};")
    return [*lines, f"        return {names[mask]};"]


def _reach(node: Node, args: list[str], table: Table) -> str:
    t = f"t{node.value}"
    strides = ["1" if dense else f"{t}_stride{d}" for d, dense in enumerate(table.dense)]
    axes = [f"{{{index}, {t}_size{d}, {strides[d]}}}" for d, index in enumerate(args)]
    of_bools = "_bool" if node.kind == "bool" else ""
    return f"interval::reach{of_bools}({t}, {{{', '.join(axes) or '{{0.0, 0.0}, 1, 1}'}}})"


def _interval_call(node: Node, args: list[str]) -> str:
    given = ", ".join(args)
    if node.op in _BOTH_KINDS:
        return f"interval::{node.op}<{node.kind}>({given})"
    if node.op in ("bool", "int", "float"):
        return f"interval::to_{node.op}({given})"
    if node.op in ("and", "or", "xor", "not"):
        logical = {"and": "both", "or": "either", "xor": "exclusive", "not": "opposite"}[node.op]
        return f"interval::{logical if node.kind == 'bool' else f'bits_{node.op}'}({given})"
    if node.op == "pow" or (node.op in ("floordiv", "mod") and node.kind == "float"):
        return "interval::any_float()" if node.kind == "float" else "interval::kAnyInt"
    if node.op in ("sin", "cos"):
        return f"interval::wave({given})"
    return f"interval::{_NAMES.get(node.op, node.op)}({given})"
