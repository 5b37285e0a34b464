"""Random mask and score functions for hypothesis: Python sources, with the tensors they capture.

    @given(expressions.masks())
    def test(made):  # made.function is the callable, made.source its text, for reports
        ...

They take b < 2, h < 3 and q, k < 64, and are such that torch computes them eagerly: indices stay inside tensors,
nothing is divided by 0. Integers may wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

SIZES = (2, 3, 64, 64)


@dataclass(frozen=True)
class Made:
    """A function with its source."""

    source: str
    function: Callable[..., Any] = field(repr=False, compare=False)


def tables() -> dict[str, torch.Tensor]:
    """What the functions capture, by name; the same at every call."""
    draw = torch.Generator().manual_seed(11)
    return {
        "ids": torch.sort(torch.randint(0, 6, (64,), generator=draw)).values,  # int64
        "jumble": torch.randint(-40, 40, (64,), generator=draw, dtype=torch.int32),
        "bytes_": torch.randint(0, 255, (64,), generator=draw, dtype=torch.uint8),
        "flags": torch.rand(64, generator=draw) < 0.5,
        "pairs": torch.rand(64, 64, generator=draw) < 0.7,
        "widths": torch.tensor([3, 17, 40], dtype=torch.int16),
        "slopes": torch.tensor([0.5, 0.25, 0.1]),
        "bias": torch.randn(3, 127, generator=draw),
        "half": torch.randn(64, 3, generator=draw).half().t(),  # (3, 64), its first dimension dense
        "wide": torch.randn(2, 64, generator=draw, dtype=torch.float64),
        "mixed": torch.randn(64, generator=draw).bfloat16(),
    }


_INT_LEAVES = ("q", "k", "q", "k", "h", "b", "0", "1", "2", "-1", "7", "-3", "13", "100", "2147483647")
_INT_TABLES = ("ids[{i}]", "jumble[{i}]", "bytes_[{i}].int()", "widths[h].int()")
_FLOAT_BINARY = ("({} + {})", "({} - {})", "({} * {})", "torch.minimum({}, {})", "torch.maximum({}, {})")
_INT_BINARY = (*_FLOAT_BINARY, "({} & {})", "({} | {})", "({} ^ {})")
_INT_OTHER = (
    *("({0} // 7)", "({0} % 5)", "({0} // -3)", "({0} % -4)", "({0} // (k % 4 + 1))", "({0} % (q % 6 + 2))"),
    *("({0}).abs()", "(-{0})", "(~{0})", "({0} >> 1)", "({0} << 2)", "({0}).clamp(-5, 20)", "({0} ** 2)"),
    *("torch.where({c}, {0}, {1})", "({c}).int()"),
)
_FLOAT_LEAVES = ("q.float()", "k.float()", "0.5", "2.0", "1.75", "-0.3", "100.0")
_FLOAT_TABLES = (
    *("slopes[h]", "bias[h, q - k + 63]"),
    *("half[h, {i}].float()", "wide[b, {i}].float()", "mixed[{i}].float()"),
)
_FLOAT_OTHER = (
    *("({0} / 3.0)", "({0} / (q + 1))", "({n} / 4)", "({0}).abs()", "(-{0})", "torch.floor({0})"),
    *("torch.where({c}, {0}, {1})", "({n}).float()", "({0} ** 2)", "({0}).abs().sqrt()"),
)
# Where the last bit may differ between backends: in scores only
_SMOOTH = (
    *("torch.tanh({0} / 5.0)", "torch.sigmoid({0})", "torch.exp(-({0}).abs())"),
    *("torch.cos({0} / 64)", "torch.log(({0}).abs() + 1.0)"),
)
_COMPARE = ("({} < {})", "({} <= {})", "({} > {})", "({} >= {})", "({} == {})", "({} != {})")
_BOOL_BINARY = ("({} & {})", "({} | {})", "({} ^ {})", "torch.logical_and({}, {})")
_BOOL_LEAVES = ("(k <= q)", "flags[{i}]", "pairs[q, k]", "(ids[q] == ids[k])", "(q - k < 9)")
_SCORES = ("s + {f} * 0.1", "s * torch.sigmoid({f})", "torch.where({c}, s, {f})", "2.0 * torch.tanh(s / 2.0) - {f}")


class _Writer:
    """Writes an expression of about `budget` operations."""

    def __init__(self, draw: Callable[..., Any], budget: int, smooth: bool) -> None:
        self._draw, self.budget, self._smooth = draw, budget, smooth

    def _one_of(self, options: tuple[str, ...]) -> str:
        return self._draw(st.sampled_from(options))

    def _filled(self, form: str, kind: str) -> str:
        """The form with values of `kind` in {}, {0} and {1}, an index in {i}, a bool in {c}, an int in {n}."""
        self.budget -= 1
        write = {"bool": self.bool, "int": self.int, "float": self.float}[kind]
        count = max(form.count("{}"), ("{0}" in form) + ("{1}" in form))
        values = [write() for _ in range(count)]
        named = {
            "i": self._draw(st.sampled_from(("q", "k", "(q - k).abs()", "(q + k) // 2"))) if "{i}" in form else "",
            "c": self.bool() if "{c}" in form else "",
            "n": self.int() if "{n}" in form else "",
        }
        return form.format(*values, **named)

    def int(self) -> str:
        if self.budget <= 0:
            return self._one_of(_INT_LEAVES[:6])
        form = self._one_of(self._one_of((_INT_LEAVES, _INT_TABLES, _INT_BINARY, _INT_OTHER)))  # type: ignore[arg-type]
        # A number alone would be computed by Python.
        return f"(q * 0 + {form})" if form in _INT_LEAVES[6:] else self._filled(form, "int")

    def float(self) -> str:
        if self.budget <= 0:
            return self._one_of(_FLOAT_LEAVES[:2])
        kinds = (_FLOAT_LEAVES, _FLOAT_TABLES, _FLOAT_BINARY, _FLOAT_OTHER, *((_SMOOTH,) if self._smooth else ()))
        form = self._one_of(self._one_of(kinds))  # type: ignore[arg-type]
        return f"(q * 0 + {form})" if form in _FLOAT_LEAVES[2:] else self._filled(form, "float")

    def bool(self) -> str:
        if self.budget <= 0:
            return self._filled(self._one_of(_BOOL_LEAVES), "bool")
        form = self._one_of(self._one_of((_BOOL_LEAVES, _COMPARE, _COMPARE, _BOOL_BINARY, ("(~{})",))))  # type: ignore[arg-type]
        if form in _COMPARE:
            return self._filled(form, self._one_of(("int", "int", "float")))
        return self._filled(form, "bool")


def _made(source: str, parameters: str) -> Made:
    scope = {"torch": torch, **tables()}
    return Made(source, eval(compile(f"lambda {parameters}: {source}", "<random expression>", "eval"), scope))


@st.composite
def masks(draw: Callable[..., Any], operations: int = 8) -> Made:
    """mask(b, h, q, k) of up to about so many operations."""
    writer = _Writer(draw, draw(st.integers(1, operations)), smooth=False)
    return _made(writer.bool(), "b, h, q, k")


@st.composite
def scores(draw: Callable[..., Any], operations: int = 6) -> Made:
    """score(s, b, h, q, k) of up to about so many operations on what is added to s, multiplied with it or chosen."""
    writer = _Writer(draw, draw(st.integers(1, operations)), smooth=True)
    form = draw(st.sampled_from(_SCORES))
    return _made(form.format(f=writer.float(), c=writer.bool() if "{c}" in form else ""), "s, b, h, q, k")
