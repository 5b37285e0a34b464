"""What the text of a function depends on: facts of ranges, which plain numbers give as arrays do."""

from __future__ import annotations

import math
import warnings

import expressions
import numpy as np
import torch
from hypothesis import given, settings

from tilewise import functions
from tilewise.functions import intervals
from tilewise.functions.facts import EXACT, INSIDE, NAN, POSITIVE, SMALL, WRAPS, flags_of

SIZES = (3, 5, 70, 90)


def by_arrays(function) -> tuple[int, ...]:
    """The same facts from intervals.py's ranges."""
    nodes, shapes = function._expressions.nodes, [tuple(x.shape) for x in function.tensors]
    inputs = {name: (np.float64(0), np.float64(n - 1)) for name, n in zip("bhqk", SIZES, strict=True)}
    read = lambda slot, _: intervals.any_of(function.tensors[slot].dtype)  # noqa: E731
    ranges = intervals.ranges(nodes, inputs, read)
    found = []
    for node in nodes:
        low, high = (float(x) for x in ranges[node])
        flag = (
            WRAPS * ((low, high) == (-(2**31), 2**31 - 1)) | SMALL * (max(-low, high) < EXACT) | POSITIVE * (low >= 0)
        )
        if node.op == "lookup":
            for dim, (index, size) in enumerate(zip(node.args, shapes[node.value], strict=True)):
                flag |= (INSIDE << dim) * bool(ranges[index][0] >= 0 and ranges[index][1] < size)
        found.append(flag | NAN * (node.op == "number" and math.isnan(node.value)))
    return tuple(found)


def facts_of(function) -> tuple[int, ...]:
    expressions = function._expressions
    values = dict(zip(expressions.numbers, expressions.values, strict=True))
    tensors = function.tensors
    return flags_of(expressions.nodes, values, SIZES, [tuple(x.shape) for x in tensors], [x.dtype for x in tensors])


@given(expressions.masks())
@settings(max_examples=150)
def test_facts_of_masks(made):
    function = functions.of(made.function, None)
    assert facts_of(function) == by_arrays(function), made.source


@given(expressions.scores())
@settings(max_examples=100)
def test_facts_of_scores(made):
    function = functions.of(None, made.function)
    assert facts_of(function) == by_arrays(function), made.source


def test_facts_that_numbers_decide():
    """An index within its tensor or not, 32 bits or more, NaN: other texts; all else is one text."""
    table = torch.arange(100)

    def texts(*functions_of) -> set[str]:
        return {f.text(SIZES) for f in functions_of}

    def looked_up(offset: int):
        return functions.of(lambda b, h, q, k: table[k + offset] < 3, None)

    assert len(texts(looked_up(3), looked_up(10))) == 1
    assert len(texts(looked_up(3), looked_up(11))) == 2  # 89 + 11 is past the end
    assert "within" not in looked_up(10).text(SIZES)

    def scaled(by: int):
        return functions.of(lambda b, h, q, k: k * by < 3, None)

    assert len(texts(scaled(3), scaled(2**24))) == 1
    assert len(texts(scaled(3), scaled(2**26))) == 2

    def limited(by: float):
        return functions.of(None, lambda s, b, h, q, k: s.clamp(max=by))

    assert len(texts(limited(3.5), limited(1e30))) == 1
    assert len(texts(limited(1e30), limited(math.nan))) == 2


warnings.filterwarnings("ignore", message=".*floor_divide.*")
