"""When a function is traced again and when not, what its key tells, and that nothing is held for longer than needed."""

from __future__ import annotations

import functools
import gc
import time
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from function_cases import SIZES, grid, well_known

from tilewise import functions
from tilewise.functions import tracing

INDICES = grid().unbind(1)
WINDOW = 5
TABLE = torch.arange(64)


@pytest.fixture
def traced(monkeypatch) -> list[Any]:
    """One entry per call of a user's function."""
    calls: list[Any] = []
    real = tracing._run
    monkeypatch.setattr(tracing, "_run", lambda *args: calls.append(args) or real(*args))
    return calls


def count(traced: list[Any], mask: Any, times: int = 3) -> int:
    """How often `mask` is called for so many attention calls, after those that a new code is tried with."""
    functions.of(mask, None)
    traced.clear()
    for _ in range(times):
        functions.of(mask, None)
    return len(traced)


def test_a_known_function_is_not_called(traced):
    for mask, score in well_known().values():
        functions.of(mask, score)
        traced.clear()
        functions.of(mask, score)
        assert not traced


def test_what_is_reached_decides(traced):
    box = [3]
    module = types.ModuleType("settings")
    module.width = 4
    scope: dict[str, Any] = {"limit": 7, "settings": module, "helper": lambda k: k < 9}
    exec("def mask(b, h, q, k, more=1):\n    return (k < limit + more) & helper(k) & (q < settings.width)", scope)
    masks = {
        "closure": lambda b, h, q, k: k < box[0],
        "global": lambda b, h, q, k: k < WINDOW,
        "tensor": lambda b, h, q, k: TABLE[k] < 4,
        "default": lambda b, h, q, k, w=4: k < w,
        "partial": functools.partial(lambda w, b, h, q, k: k < w, 4),
        "many": scope["mask"],
    }
    for name, mask in masks.items():
        assert count(traced, mask) == 0, name
    for change in (
        lambda: box.__setitem__(0, 8),
        lambda: setattr(scope["mask"], "__defaults__", (2,)),
        lambda: scope.update(limit=3),
        lambda: setattr(module, "width", 9),
        lambda: scope.update(helper=lambda k: k < 2),
    ):
        before = [functions.of(masks[name], None).seen(*INDICES) for name in ("closure", "many")]
        change()
        after = [functions.of(masks[name], None).seen(*INDICES) for name in ("closure", "many")]
        assert not all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_numbers_count_with_their_type():
    """1, 1.0, True and a numpy number are not the same; nor are 0.0 and -0.0."""
    s = torch.full((), 3.0)
    zero = torch.zeros(())

    def scored(w: Any) -> float:
        return functions.of(None, lambda s, b, h, q, k: 1.0 / (s * 0.0 + w)).scored(s, zero, zero, zero, zero).item()

    assert scored(-0.0) == scored(0.0) == torch.inf  # 0.0 · s is 0.0, and 0.0 + -0.0 too
    kinds = [
        functions.of(lambda b, h, q, k, w=w: (q // 2) * w == k, None).key for w in (3, 3.0, np.int64(3), np.float32(3))
    ]
    assert len(set(kinds)) == 2  # ints and floats


def test_new_tensors_are_not_traced_for(traced):
    """A lookup holds for any tensor of the dtype; another dtype or a tensor that stands twice is another function."""

    def mask_of(x: torch.Tensor, y: torch.Tensor) -> Any:
        return lambda b, h, q, k: x[q] == y[k]

    ids = torch.arange(64) // 7
    functions.of(mask_of(ids, ids.clone()), None)
    traced.clear()
    other = mask_of(torch.arange(64) // 9, torch.arange(64) // 8)
    assert torch.equal(functions.of(other, None).seen(*INDICES), INDICES[2] // 9 == INDICES[3] // 8)
    assert not traced
    for again in (mask_of(ids, ids), mask_of(ids.int(), ids), mask_of(ids, ids.double())):
        traced.clear()
        functions.of(again, None)
        assert traced


def test_rows_of_tensors_are_not_looked_into(traced):
    def mask_of(x: torch.Tensor) -> Any:
        return lambda b, h, q, k: x[h][k]

    functions.of(mask_of(torch.ones(3, 64, dtype=torch.bool)), None)
    traced.clear()
    assert not functions.of(mask_of(torch.zeros(3, 64, dtype=torch.bool)), None).seen(*INDICES).any()
    assert not traced


def test_the_shape_of_a_row_is_looked_at():
    def mask_of(x: torch.Tensor) -> Any:
        return lambda b, h, q, k: (k < len(x[h])) & x[h][-1]

    for size in (30, 50):
        made = functions.of(mask_of(torch.ones(3, size, dtype=torch.bool)), None)
        assert made.seen(*INDICES).sum() == 2 * 3 * 40 * size


def test_a_function_that_looks_into_a_tensor_is_traced_for_it(traced):
    def mask_of(x: torch.Tensor) -> Any:
        return lambda b, h, q, k: (k < x.shape[0]) & (q < x.sum().item()) & (x[0] * 2 <= x[k])

    ids = torch.full((30,), 1)
    functions.of(mask_of(ids), None)
    traced.clear()
    functions.of(mask_of(ids), None)
    assert not traced
    ids[0] = 0  # written to
    assert functions.of(mask_of(ids), None).seen(*INDICES).any()
    assert traced
    traced.clear()
    functions.of(mask_of(torch.ones(30, dtype=torch.int64)), None)
    assert traced


def test_numbers_in_tensors_of_no_dimensions(traced):
    limit = torch.tensor(4)
    mask = lambda b, h, q, k: k < limit  # noqa: E731
    assert count(traced, mask) == 0
    limit.fill_(9)
    assert functions.of(mask, None).seen(*INDICES).sum() == 2 * 3 * 40 * 9


def test_objects_methods_and_nested_functions():
    """What cannot be told by its value is traced each time, and right each time."""

    class Holder:
        def __init__(self) -> None:
            self.width, self.table = 3, torch.arange(64)

        def mask(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return self.table[k] < self.width

        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return self.mask(b, h, q, k) & (q > 1)

    holder = Holder()
    for mask in (holder.mask, holder, functools.partial(holder.mask)):
        for holder.width in (3, 8):
            rows = 38 if mask is holder else 40
            assert functions.of(mask, None).seen(*INDICES).sum() == 2 * 3 * rows * holder.width

    def both(*masks: Any) -> Any:
        return lambda b, h, q, k: functools.reduce(lambda x, y: x & y, [m(b, h, q, k) for m in masks])

    mask = both(lambda b, h, q, k: k <= q, both(lambda b, h, q, k: q - k < WINDOW, lambda b, h, q, k: True))
    _, _, q, k = INDICES
    assert torch.equal(functions.of(mask, None).seen(*INDICES), (k <= q) & (q - k < WINDOW))


def test_a_known_function_costs_microseconds(one_thread):
    """At most 30 µs for the trace, the text and the arguments of an ordinary function, on a busy machine too."""
    mask = well_known()["documents causal"][0]

    def least(do: Any) -> float:
        do()
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            do()
            times.append(time.perf_counter() - begin)
        return min(times)

    function = functions.of(mask, None)
    assert least(lambda: functions.of(mask, None)) < 30e-6
    assert least(lambda: (function.text(SIZES), function.arguments(), function.key)) < 60e-6


def test_key_tells_values():
    """Equal for another function of the same code over the same values; another after a write or for another tensor."""

    def mask_of(x: torch.Tensor, w: int) -> Any:
        return lambda b, h, q, k: (x[q] == x[k]) & (q - k < w)

    ids = torch.arange(64)
    key = functions.of(mask_of(ids, 3), None).key
    assert functions.of(mask_of(ids, 3), None).key == key
    hash(key)
    assert functions.of(mask_of(ids, 4), None).key != key
    assert functions.of(mask_of(ids.clone(), 3), None).key != key
    assert functions.of(lambda b, h, q, k: (ids[q] == ids[k]) | (q - k < 3), None).key != key
    ids[0] = 5
    assert functions.of(mask_of(ids, 3), None).key != key


def test_key_of_a_tensor_in_another_ones_place():
    """An allocator gives a freed tensor's address to the next one; their keys must differ."""
    keys = set()
    for n in range(20):
        ids = torch.full((64,), n)
        keys.add(functions.of(lambda b, h, q, k, ids=ids: ids[q] == ids[k], None).key)
        del ids
    assert len(keys) == 20


def test_inference_tensors_have_no_version():
    with torch.inference_mode():
        ids = torch.arange(64)
    mask = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
    assert functions.of(mask, None).key != functions.of(mask, None).key
    assert functions.of(mask, None).seen(*INDICES).sum() == 2 * 3 * 40


def test_tensors_are_not_held():
    """Neither by traces nor by texts nor by keys."""
    ids = torch.arange(64)
    dead = weakref.ref(ids)
    function = functions.of(lambda b, h, q, k, ids=ids: ids[q] == ids[k], None)
    function.text(SIZES)
    key = function.key
    del ids, function
    gc.collect()
    assert dead() is None
    assert key


def test_uses():
    table = torch.arange(64)
    for mask, uses in (
        (lambda b, h, q, k: k <= q, "qk"),
        (lambda b, h, q, k: table[b] + h < 3, "bh"),
        (lambda b, h, q, k: True, ""),
        (lambda b, h, q, k: (k < 3) & (h < table[q]), "hqk"),
    ):
        assert functions.of(mask, lambda s, b, h, q, k: s + b).uses == uses
