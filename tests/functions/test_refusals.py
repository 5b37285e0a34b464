"""What cannot be traced: an error of the right kind that names the line of the user's function and what to write."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch
from function_cases import grid

from tilewise import functions

TABLE = torch.arange(64.0).reshape(4, 16)
INTS = torch.arange(64)
COUNTS = [0]
total = 0


def change_total(b, h, q, k):
    global total
    total += 1
    return k <= q


def change_outer():
    calls = 0

    def mask(b, h, q, k):
        nonlocal calls
        calls += 1
        return k <= q

    return mask


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, b, h, q, k):
        self.calls += 1
        return k <= q


def grows(b, h, q, k):
    COUNTS.append(1)
    return k < 5


def two_lines(b, h, q, k):
    near = q - k < 4
    if near:  # the line
        return near
    return k <= q


def loops(b, h, q, k):
    seen = k <= q
    for n in range(q):  # the line
        seen = seen | (k == n)
    return seen


def raises(b, h, q, k):
    return {}["missing"]


# a piece of the message -> masks
MASKS: dict[str, list[Any]] = {
    "write & | ~": [
        lambda b, h, q, k: q >= k and k > 3,
        lambda b, h, q, k: q >= k or k > 3,
        lambda b, h, q, k: not (q >= k),
        lambda b, h, q, k: k if q > k else q,
        lambda b, h, q, k: 0 <= k < q,
        lambda b, h, q, k: max(q, k) < 3,
        lambda b, h, q, k: q in (1, 2),
        two_lines,
    ],
    "x.int\\(\\) for int": [
        lambda b, h, q, k: int(q) > 3,
        lambda b, h, q, k: float(q) > 3,
        lambda b, h, q, k: math.sqrt(q) < k,
        lambda b, h, q, k: [1, 2, 3][h] < k,
        lambda b, h, q, k: round(q) < k,
        loops,
    ],
    "each of its values is one number": [
        lambda b, h, q, k: list(q),
        lambda b, h, q, k: q[0] < k,
        lambda b, h, q, k: len(q) > k,
    ],
    "is not known; known are": [
        lambda b, h, q, k: torch.cumsum(q, 0) < k,
        lambda b, h, q, k: q.item() < k,
        lambda b, h, q, k: torch.isin(k, INTS),
    ],
    "one number per dimension": [
        lambda b, h, q, k: TABLE[h, :] < 3,
        lambda b, h, q, k: TABLE[..., k] < 3,
        lambda b, h, q, k: TABLE[h, k, q] < 3,
    ],
    "index it down to one number": [
        lambda b, h, q, k: k > TABLE,
        lambda b, h, q, k: TABLE[h] < k,
        lambda b, h, q, k: torch.where(k < q, TABLE[h], 1.0) < 2,
    ],
    "indexed with integers": [lambda b, h, q, k: INTS[q / 2] < k, lambda b, h, q, k: INTS[k < q] < k],
    "must return a bool": [lambda b, h, q, k: q - k, lambda b, h, q, k: q * 0.5, lambda b, h, q, k: 1],
    "must return one bool": [
        lambda b, h, q, k: None,
        lambda b, h, q, k: TABLE,
        lambda b, h, q, k: (q, k),
        lambda b, h, q, k: TABLE[h],
    ],
    "must not change a tensor": [
        lambda b, h, q, k: INTS.add_(1)[k] < 3,
        lambda b, h, q, k: INTS.__setitem__(0, 1) or k < q,
        lambda b, h, q, k: INTS.__setitem__(k, 1) or k < q,
        lambda b, h, q, k: q.add_(1) < k,
        lambda b, h, q, k: torch.add(INTS, 1, out=INTS)[k] < 3,
    ],
    "it changes what": [change_total, change_outer(), Counting(), grows],
    "something else each time": [lambda b, h, q, k: k < 3 + random.random()],
    "draw random numbers once": [lambda b, h, q, k: torch.rand(64)[k] < 0.5],
    "integers of a function are 32 bits": [lambda b, h, q, k: k < 2**40],
    "// or % by 0": [lambda b, h, q, k: k // 0 < q, lambda b, h, q, k: k % 0 < q],
    "raised KeyError: 'missing'": [raises],
    "captured tensors are dense and one of": [
        lambda b, h, q, k: TABLE.to(torch.complex64)[h, k] == 0,
        lambda b, h, q, k: TABLE.to(torch.float8_e4m3fn)[h, k] == 0,
    ],
    "& \\| \\^ << >> are of bools and ints": [lambda b, h, q, k: (q * 0.5) & k],
    "of two bools": [lambda b, h, q, k: (q < k) - (k < 3)],
    "conversion to torch.int8": [lambda b, h, q, k: q.to(torch.int8) < k],
    "compare it, as with != 0": [lambda b, h, q, k: torch.where(q, k, 1) < 3, lambda b, h, q, k: q & 1],
    "only the forms that give one number": [
        lambda b, h, q, k: torch.max(q, 0, True) < k,
        lambda b, h, q, k: q.clamp(lowest=3) < k,
    ],
    "is no number": [lambda b, h, q, k: q < "three", lambda b, h, q, k: k < None],
    "of size \\(4,\\)": [lambda b, h, q, k: q.new_ones((4,), dtype=torch.bool)],
    "to a negative power": [lambda b, h, q, k: q ** (-2) < k],
}


@pytest.mark.parametrize(("message", "number"), [(m, n) for m, masks in MASKS.items() for n in range(len(masks))])
def test_masks_that_cannot_be_traced(message, number):
    mask = MASKS[message][number]
    with pytest.raises(functions.Untraceable, match=message) as error:
        functions.of(mask, None)
    assert isinstance(error.value, TypeError)
    assert re.search(rf"{re.escape(__file__)}:\d+ `", str(error.value)), error.value


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (two_lines, "if near:  # the line"),
        (loops, "for n in range(q):  # the line"),
        (change_total, "total += 1"),
        (raises, 'return {}["missing"]'),
    ],
)
def test_the_line_is_the_one(function, line):
    with pytest.raises(TypeError) as error:
        functions.of(function, None)
    assert f"`{line}`" in str(error.value)


def test_scores_of_the_wrong_kind():
    with pytest.raises(TypeError, match=r"test_refusals.py:\d+ .*must return a float, got a bool"):
        functions.of(None, lambda s, b, h, q, k: k <= q)
    with pytest.raises(TypeError, match=r"test_refusals.py:\d+ .*must return one float"):
        functions.of(None, lambda s, b, h, q, k: None)
    assert functions.of(None, lambda s, b, h, q, k: q - k).score.kind == "float"


def test_parameters():
    with pytest.raises(
        TypeError, match=r"mask must take 4 arguments \(b, h, q, k\), .*test_refusals.py:\d+ .*too many"
    ):
        functions.of(lambda q, k: k <= q, None)
    with pytest.raises(TypeError, match=r"score must take 5 arguments \(s, b, h, q, k\)"):
        functions.of(None, lambda s, b, h, q, k, more: s)
    with pytest.raises(TypeError, match=r"mask must be a function of \(b, h, q, k\), got int"):
        functions.of(3, None)
    assert functions.of(lambda *indices: indices[3] <= indices[2], None).uses == "qk"


def test_captured_tensors_are_where_q_is():
    other = torch.empty(64, dtype=torch.int64, device="meta")
    function = functions.of(lambda b, h, q, k: other[k] < 3, None)
    with pytest.raises(ValueError, match=r"test_refusals.py:\d+ `.*other\[k\].*must be on cpu like q, got meta"):
        function.check(torch.device("cpu"))
    functions.of(lambda b, h, q, k: INTS[k] < 3, None).check(torch.device("cpu"))
    with pytest.raises(ValueError, match="must be on meta like q, got cpu"):
        functions.of(lambda b, h, q, k: INTS[k] < 3, None).check(torch.device("meta"))
    # A number in a tensor of no dimensions may lie on the CPU, as with torch.
    limit = torch.tensor(3)
    functions.of(lambda b, h, q, k: k < limit, None).check(torch.device("meta"))


def test_captured_tensors_without_entries_or_with_gradients():
    empty, wanted = torch.zeros(0), torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"test_refusals.py:\d+ .*must have entries, got shape \(0,\)"):
        functions.of(lambda b, h, q, k: empty[k] < 3, None).check(torch.device("cpu"))
    scored = functions.of(None, lambda s, b, h, q, k: s + wanted[h])
    with pytest.raises(NotImplementedError, match=r"test_refusals.py:\d+ .*requires grad.*use x.detach"):
        scored.check(torch.device("cpu"))
    with torch.no_grad():
        scored.check(torch.device("cpu"))


def test_indices_out_of_range_are_told_in_debug_mode(monkeypatch):
    indices = grid().unbind(1)
    small = torch.arange(10)
    function = functions.of(lambda b, h, q, k: small[q - k] == 9, None)
    assert torch.equal(function.seen(*indices), (indices[2] - indices[3]).clamp(0, 9) == 9)
    monkeypatch.setenv("TILEWISE_DEBUG", "1")
    with pytest.raises(IndexError, match=r"test_refusals.py:\d+ `.*small\[q - k\].*indices -55 … 39 in dimension 0"):
        function.seen(*indices)
    huge = torch.tensor([2**40, 1])
    with pytest.raises(OverflowError, match=r"test_refusals.py:\d+ .*32 bits"):
        functions.of(lambda b, h, q, k: huge[b] == 0, None).seen(*indices)
    with pytest.raises(ZeroDivisionError, match=r"test_refusals.py:\d+ .*k // q"):
        functions.of(lambda b, h, q, k: k // q == 0, None).seen(*indices)


def test_what_can_be_asked_of_a_value():
    """Attributes that generic code looks at."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        assert (q.dtype, q.shape, q.dim(), q.ndim, q.numel()) == (torch.int32, (), 0, 0, 1)
        assert not hasattr(q, "nonsense")
        return b.new_ones(size=(), dtype=torch.bool, device=b.device)

    assert functions.of(mask, None).seen(*grid().unbind(1)).all()
