"""Functions whose captured numbers change from call to call: never a stale value, and no trace where none is needed."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from function_cases import SCALE, SIZES, grid, probed

from tilewise import functions
from tilewise.functions import tracing

INDICES = grid().unbind(1)
NUMBERS = (5, 9, 30, 2, 1, 0, -1, -7, 7.5, 30.0, 5.0, 0.5, -0.0, True, False, 8)
TABLE = torch.arange(64)
GLOBAL = 3


@pytest.fixture
def traced(monkeypatch) -> list[Any]:
    """One entry per call of a user's function."""
    calls: list[Any] = []
    real = tracing._run
    monkeypatch.setattr(tracing, "_run", lambda *args: calls.append(args) or real(*args))
    return calls


def steered_by_if(w):
    def mask(b, h, q, k):
        return q - k < w if w > 6 else k < w

    return mask


def steered_by_truth(w):
    return lambda b, h, q, k: (w and True) | (q < k)


def steered_by_type(w):
    return lambda b, h, q, k: (k < 11) if type(w) is int else (k < 3)


def steered_by_kind(w):
    return lambda b, h, q, k: (k < 11) if isinstance(w, float) else (k < 3)


def steered_by_equality(w):
    table = [7, 8]
    return lambda b, h, q, k: (k < 11) if w in table or w == 30 else (k < 3)


def steered_by_text(w):
    return lambda b, h, q, k: k < len(f"{w}") * 5


def steered_by_identity(w):
    nine = 9
    return lambda b, h, q, k: (k < 11) if w is nine else (k < 3)


def steered_by_a_failure(w):
    def mask(b, h, q, k):
        try:
            return k < [4, 5, 6, 7, 8, 9][w]
        except (TypeError, IndexError):
            return k < 20

    return mask


def steered_by_an_attribute(w):
    return lambda b, h, q, k: (k < 11) if w.__class__ is int else (k < 3)


def steered_by_loops(w):
    def mask(b, h, q, k):
        seen = k < 0
        for n in range(int(abs(w))):
            seen = seen | (k == 2 * n)
        return seen

    return mask


def in_an_inner_function(w):
    def mask(b, h, q, k):
        def near(x, y):
            return (x - y).abs() < w

        return near(q, k)

    return mask


def in_a_helper(w):
    def near(x, y, by=2):
        return (x - y).abs() < w + by

    return lambda b, h, q, k: near(q, k) & (q < w)


def by_itself(w):
    def mask(b, h, q, k, depth=0):
        return (q - k < w) if depth else mask(b, h, q, k, 1) | (k == w)

    return mask


def with_others(w):
    pair, more = [w, 4], (w, {"no": 1})[0]
    return lambda b, h, q, k: (q - k < pair[0]) & (k < 8 * more)


def of_numpy(w):
    w = np.float64(w)
    return lambda b, h, q, k: q - k < w


# How a number is captured -> whether other numbers of its kind take no trace
KINDS: dict[Any, bool] = {
    "window": (lambda w: lambda b, h, q, k: (q >= k) & (q - k < w), True),
    "twice": (lambda w: lambda b, h, q, k: (q - w < k) ^ (k < w), True),
    "reflected": (lambda w: lambda b, h, q, k: (w > k) | (w == q) | (w != b) & (w - q <= k), True),
    "computed": (lambda w: lambda b, h, q, k: (q - k < 2 * w + 3) & (k > -w), True),
    "torch's": (lambda w: lambda b, h, q, k: torch.where(k < w, torch.maximum(q, k) * w, k.clamp(w)) > 3 * q, True),
    "divided": (lambda w: lambda b, h, q, k: q // (w * w + 3) == k // (w * w + 3), True),
    "beside a table": (lambda w: lambda b, h, q, k: TABLE[(k * w) % 64] < 20, True),
    "inner function": (in_an_inner_function, True),
    "a helper's": (in_a_helper, False),
    "index": (lambda w: lambda b, h, q, k: TABLE[abs(int(w))] < k, False),
    "power": (lambda w: lambda b, h, q, k: q.float() ** w < 9, False),
    "conversion": (lambda w: lambda b, h, q, k: (q >= k) & bool(w), False),
    "math": (lambda w: lambda b, h, q, k: k < math.floor(w), False),
    "default": (lambda w: lambda b, h, q, k, w=w: q - k < w, False),
    "keyword": (lambda w: functools.partial(lambda b, h, q, k, *, w: q - k < w, w=w), False),
    "partial": (lambda w: functools.partial(lambda w, b, h, q, k: q - k < w, w), False),
    "container": (with_others, False),
    "numpy": (of_numpy, False),
    "recursion": (by_itself, False),
    "if": (steered_by_if, False),
    "and": (steered_by_truth, False),
    "type": (steered_by_type, False),
    "isinstance": (steered_by_kind, False),
    "==": (steered_by_equality, False),
    "format": (steered_by_text, False),
    "is": (steered_by_identity, False),
    "try": (steered_by_a_failure, False),
    "attribute": (steered_by_an_attribute, False),
    "range": (steered_by_loops, False),
}


def truth(mask: Any) -> torch.Tensor:
    return torch.as_tensor(mask(*INDICES)).expand(INDICES[0].shape).bool()


@pytest.mark.parametrize("kind", KINDS)
def test_never_a_stale_value(kind):
    make = KINDS[kind][0]
    for w in (*NUMBERS, *NUMBERS[::-1]):
        try:
            expected = truth(make(w))
        except Exception:  # torch refuses it too
            continue
        try:
            found = functions.of(make(w), None)
        except functions.Untraceable:
            continue
        assert torch.equal(found.seen(*INDICES), expected), w
        assert torch.equal(functions.of(make(w), None).seen(*INDICES), expected), w


@pytest.mark.parametrize("kind", KINDS)
def test_what_takes_no_trace(kind, traced):
    make, expected = KINDS[kind]
    functions.of(make(5), None)
    functions.of(make(9), None)
    traced.clear()
    for w in (3, 4, 12, 30):
        functions.of(make(w), None)
    assert bool(traced) != expected


def test_kernels_get_the_numbers_of_now():
    """Text and arguments of functions that were never traced themselves."""

    def score_of(slope: float, window: int, cap: float):
        score = lambda s, b, h, q, k: torch.where(q - k < window, s * slope / cap, s - (q - k).abs() * slope)  # noqa: E731
        return functions.of(lambda b, h, q, k: (q + k) // window % 2 == 0, score), score

    scores = torch.randn(len(INDICES[0]), generator=torch.Generator().manual_seed(1))
    cases = [(0.25, 7, 3.0), (0.7, 11, 5.0), (-3.0, 23, 0.1), (0.25, 40, 3.0)]
    made = [score_of(*case) for case in cases]
    found = probed([function for function, _ in made], grid(), scores, torch.zeros(0, 4, 2))
    for n, ((_, window, _), (_, score)) in enumerate(zip(cases, made, strict=True)):
        assert torch.equal(found.mask[n], (INDICES[2] + INDICES[3]) // window % 2 == 0)
        expected = score((scores * SCALE).double(), *INDICES).float()
        torch.testing.assert_close(found.score[n], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.sided[n], expected, rtol=1e-5, atol=1e-5)


def test_both_functions_have_numbers(traced):
    def made(window: int, slope: float, other: int):
        mask = lambda b, h, q, k: q - k < window  # noqa: E731
        return mask, lambda s, b, h, q, k: s - slope * (q - k) + other

    s = torch.zeros(())
    for window, slope, other in ((5, 0.25, 4), (6, 0.75, -4), (9, 2.5, -9), (40, 1.5, -3)):
        function = functions.of(*made(window, slope, other))
        assert torch.equal(function.seen(*INDICES), INDICES[2] - INDICES[3] < window)
        expected = -slope * (INDICES[2] - INDICES[3]).double() + other
        torch.testing.assert_close(function.scored(s.double(), *INDICES), expected)
    assert len(traced) == 3 * 4, "the first, twice and with its numbers open, and -4, which has another sign"


def test_a_number_that_is_changed_in_place(traced):
    window = 5

    def mask(b, h, q, k):
        return q - k < window

    before = functions.of(mask, None).seen(*INDICES)
    window = 8
    assert torch.equal(functions.of(mask, None).seen(*INDICES), INDICES[2] - INDICES[3] < 8)
    assert not torch.equal(before, functions.of(mask, None).seen(*INDICES))


def test_keys_and_blocks_follow_the_numbers():
    def mask_of(w: int):
        return lambda b, h, q, k: (q >= k) & (q - k < w)

    first, second = (functions.of(mask_of(w), None) for w in (12, 20))
    assert first.key != second.key
    assert second.key == functions.of(mask_of(20), None).key
    assert second.text(SIZES) == first.text(SIZES)
    assert bytes(first.arguments()) != bytes(second.arguments())
    assert second.blocks(1, 1, 64, 64, 16, 16).tolist() != first.blocks(1, 1, 64, 64, 16, 16).tolist()
    assert second.mask is second.mask


def test_an_error_names_the_number_that_is_too_long():
    def mask_of(w: int):
        return lambda b, h, q, k: q - k < w

    for w in (5, 6, 2**31):
        if w < 2**31:
            functions.of(mask_of(w), None)
    with pytest.raises(functions.Untraceable, match="32 bits, got 2147483648"):
        functions.of(mask_of(2**31), None)


def test_modules_other_than_torch_see_no_slot(traced):
    """Whatever code a number may reach unseen, it is traced with the number itself."""

    def mask_of(w: float):
        return lambda b, h, q, k: k < np.asarray(w).dtype.itemsize + w

    for w in (5.0, 6.0, 7.0):
        assert torch.equal(functions.of(mask_of(w), None).seen(*INDICES), INDICES[3] < 8 + w)
    assert len(traced) >= 3
