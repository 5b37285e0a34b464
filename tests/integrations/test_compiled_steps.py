"""attend() in compiled graphs: one operator, which a new plan does not compile again."""

from __future__ import annotations

import gc

import pytest
import torch
from compiled_cases import Graphs, compiled
from oracle import randn
from torch.library import opcheck

import tilewise
from tilewise import PagedKVCache, traced

OPS = torch.ops.tilewise


def make_cache(kv_format="fp32"):
    cache = PagedKVCache(64, 4, 2, 16, num_layers=2, kv_format=kv_format)
    seqs = [cache.allocate() for _ in range(4)]
    extend(cache, seqs, [9, 3, 14, 6])
    return cache, seqs


def extend(cache, seqs, counts):
    slots = cache.extend(seqs, counts)
    for layer in range(2):
        cache.write(layer, slots, randn(len(slots), 2, 16, seed=layer), randn(len(slots), 2, 16, seed=layer + 2))


def test_steps_compile_once():
    """Each step has a new plan, which is no reason to compile again: once for the first, once for all others."""

    def step(q, cache, plan, sinks):
        for layer in range(2):
            o, lse = tilewise.attend(q, cache, layer, plan, sinks=sinks, return_lse=True)
            q = q + o + lse.t()[..., None]
        return q

    cache, seqs = make_cache()
    graphs = Graphs()
    fast = compiled(step, graphs)
    for n in range(4):
        extend(cache, seqs, [1, 2, 1, 1 + n])
        plan = tilewise.plan_step(cache, [(seqs[1], 2), (seqs[3], 1 + n)], [seqs[0], seqs[2]], num_heads=4)
        given = (randn(plan.rows, 4, 16, seed=n), cache, plan, randn(4))
        assert torch.equal(fast(*given), step(*given))
    assert graphs.operators() == [["attend", "attend"]] * 2


def test_opcheck():
    cache, seqs = make_cache("int8")
    plan = tilewise.plan_step(cache, [(seqs[1], 2)], seqs[2:], num_heads=4)
    given = (randn(4, 4, 16), cache._k, cache._v, 1, plan.serial, randn(4))
    which = ("test_schema", "test_faketensor", "test_autograd_registration")
    opcheck(OPS.attend.default, given, {"return_lse": True, "scale": 0.3}, test_utils=which)


def test_refusals():
    (cache, seqs), (other, _) = make_cache(), make_cache()
    plan = tilewise.plan_step(cache, [(seqs[1], 2)], seqs[2:], num_heads=4)
    q = randn(4, 4, 16)
    for match, of, more in (
        ("another cache", other, {}),
        ("out cannot be part of a compiled graph", cache, {"out": q}),
    ):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=match):
            compiled(tilewise.attend, Graphs())(q, of, 0, plan, **more)
    fast = compiled(lambda q, cache, plan: tilewise.attend(q, cache, 0, plan), Graphs())
    extend(cache, seqs, 1)
    with pytest.raises(ValueError, match="plan is out of date"):
        fast(q, cache, plan)


def test_nothing_is_kept_alive():
    cache, seqs = make_cache()
    plan = tilewise.plan_step(cache, [(seqs[1], 2)], seqs[2:], num_heads=4)
    q, serial = randn(4, 4, 16), plan.serial
    compiled(lambda q, cache, plan: tilewise.attend(q, cache, 0, plan), Graphs())(q, cache, plan)
    del plan
    gc.collect()
    assert serial not in traced._plans
    with pytest.raises(ValueError, match=f"plan {serial} is not there any more; keep plans and caches"):
        OPS.attend(q, cache._k, cache._v, 0, serial)
