"""What plan_step() and attend() refuse, in words, with nothing changed."""

from __future__ import annotations

import pytest
import torch
from decode_tree_cases import grow, make_cache
from oracle import poison, randn

from tilewise import PrefixCache, attend, plan_decode, plan_step


def made():
    cache = make_cache(num_layers=2)
    seqs = [cache.allocate() for _ in range(4)]
    grow(cache, seqs, [9, 3, 14, 6])
    return cache, seqs


PLANS = {
    "a cache": (TypeError, "cache must be a PagedKVCache", {"cache": 3}),
    "a list": (TypeError, "prefill must be a list of .seq, tokens., got int", {"prefill": 3}),
    "a list of decodes": (
        TypeError,
        "decode must be a list of sequences or a plan of theirs, got str",
        {"decode": "ab"},
    ),
    "pairs": (TypeError, r"prefill\[1\] must be .seq, tokens., got 2", {"prefill": [(0, 2), 2]}),
    "pairs, not triples": (TypeError, r"prefill\[0\] must be", {"prefill": [(0, 2, 1)]}),
    "whole tokens": (TypeError, r"prefill\[0\]\[1\] must be an int, got float", {"prefill": [(0, 2.0)]}),
    "a token": (ValueError, r"prefill\[0\]\[1\] must be at least 1, got 0", {"prefill": [(0, 0)]}),
    "tokens that are there": (ValueError, r"at most the 3 tokens of sequence 1, got 4", {"prefill": [(1, 4)]}),
    "living chunks": (ValueError, "seq must be alive, but sequence 9", {"prefill": [(9, 1)]}),
    "living decodes": (ValueError, "must be alive, but sequence 9", {"decode": [9]}),
    "numbers": (TypeError, "decode must be an int, got float", {"decode": [1.5]}),
    "each once": (ValueError, "each sequence once, got sequence 1 twice", {"prefill": [(1, 2), (1, 1)]}),
    "each on one side": (ValueError, "each sequence once, got sequence 2 twice", {"prefill": [(2, 2)]}),
    "each decode once": (ValueError, "each sequence once, got sequence 3 twice", {"decode": [3, 2, 3]}),
    "heads": (ValueError, "num_heads must be a multiple of the cache's 2 KV heads, got 3", {"num_heads": 3}),
    "some heads": (ValueError, "num_heads must be at least 1, got 0", {"num_heads": 0}),
    "how to share": (ValueError, 'share_prefix must be "auto", True or False, got 1', {"share_prefix": 1}),
    "a cost model": (TypeError, "cost must be a tilewise.CostModel, got int", {"cost": 1}),
    "a window": (TypeError, "window must be .left, right.", {"window": 4}),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_take(name):
    error, match, given = PLANS[name]
    cache, seqs = made()
    asked = {"cache": cache, "prefill": [(seqs[0], 4)], "decode": seqs[2:], "num_heads": 4} | given
    with pytest.raises(error, match=match):
        plan_step(asked.pop("cache"), asked.pop("prefill"), asked.pop("decode"), **asked)


def test_a_decode_plan_of_another_kind():
    (cache, seqs), (other, _) = made(), made()
    for error, match, plan in (
        (ValueError, "decode is a plan for another cache", plan_decode(other, seqs, num_heads=4)),
        (ValueError, "num_heads 4, window None and chunk None, got one with 8", plan_decode(cache, seqs, num_heads=8)),
        (
            ValueError,
            "window None and chunk None, got one with 4, .3, 0. and None",
            plan_decode(cache, seqs, num_heads=4, window=(3, 0)),
        ),
        (NotImplementedError, "for selected pages", plan_decode(cache, seqs, num_heads=4, pages_per_seq=2)),
    ):
        with pytest.raises(error, match=match):
            plan_step(cache, [], plan, num_heads=4)
    with pytest.raises(ValueError, match="each sequence once, got sequence 0 twice"):
        plan_step(cache, [(0, 2)], plan_decode(cache, seqs, num_heads=4), num_heads=4)


CALLS = {
    "a cache": (TypeError, "cache must be a PagedKVCache", {"cache": None}),
    "a step": (TypeError, "plan must come from tilewise.plan_step, got DecodePlan", {"plan": "decode"}),
    "a plan of this cache": (ValueError, "plan was made for another cache; call plan_step", {"plan": "other"}),
    "a layer": (ValueError, "layer must be at least 0 and at most 1, got 2", {"layer": 2}),
    "a tensor": (TypeError, "q must be a torch.Tensor, got list", {"q": [1]}),
    "every row": (ValueError, r"q must have shape \(6, 4, 16\), got \(5, 4, 16\)", {"q": randn(5, 4, 16)}),
    "packed rows": (ValueError, "q must have 3 dimensions", {"q": randn(1, 6, 4, 16)}),
    "no float64": (NotImplementedError, "q is float64", {"q": randn(6, 4, 16).double()}),
    "floats": (ValueError, "q must be one of float32, float16, bfloat16", {"q": randn(6, 4, 16).int()}),
    "dense channels": (ValueError, "q must have stride 1", {"q": randn(6, 16, 4).transpose(1, 2)}),
    "gradients": (NotImplementedError, "no backward pass", {"q": randn(6, 4, 16).requires_grad_()}),
    "a scale": (TypeError, "scale must be a float", {"scale": "much"}),
    "a softcap": (ValueError, "softcap must be finite and at least 0", {"softcap": -1.0}),
    "sinks": (ValueError, r"sinks must have shape \(4,\)", {"sinks": randn(3)}),
    "a flag": (TypeError, "return_lse must be True or False", {"return_lse": 1}),
    "room": (ValueError, r"out must have shape \(6, 4, 16\)", {"out": randn(4, 16)[None]}),
    "room of the dtype": (ValueError, "out must be one of float32", {"out": randn(6, 4, 16).half()}),
    "a backend": (ValueError, "backend must be one of", {"backend": "tpu"}),
    "a backend of the device": (ValueError, 'backend "cuda" takes CUDA tensors', {"backend": "cuda"}),
    "no rungs": (NotImplementedError, "runs attention.. only", {"backend": "emulator:forward"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_take(name):
    error, match, given = CALLS[name]
    (cache, seqs), (other, _) = made(), made()
    step = plan_step(cache, [(seqs[0], 4)], seqs[2:], num_heads=4)
    plans = {
        "decode": plan_decode(cache, seqs, num_heads=4),
        "other": plan_step(other, [(seqs[0], 4)], seqs[2:], num_heads=4),
    }
    out = poison(torch.empty(6, 4, 16))
    asked = {"q": randn(6, 4, 16), "cache": cache, "layer": 0, "plan": step, "out": out} | given
    asked["plan"] = plans.get(asked["plan"], asked["plan"]) if isinstance(asked["plan"], str) else asked["plan"]
    with pytest.raises(error, match=match):
        attend(asked.pop("q"), asked.pop("cache"), asked.pop("layer"), asked.pop("plan"), **asked)
    assert out.isnan().all()


@pytest.mark.parametrize("changed", [0, 2])
def test_a_plan_out_of_date(changed):
    cache, seqs = made()
    plan = plan_step(cache, [(seqs[0], 4)], seqs[2:], num_heads=4)
    grow(cache, [seqs[changed]], [1])
    with pytest.raises(ValueError, match=f"plan is out of date: sequence {changed} had .* call plan_step again"):
        attend(randn(6, 4, 16), cache, 0, plan)
    cache.free(seqs[changed])
    with pytest.raises(ValueError, match=f"sequence {changed} was freed"):
        attend(randn(6, 4, 16), cache, 0, plan)


def test_tokens_that_are_not_written():
    cache, seqs = made()
    cache.extend([seqs[0]], 2)
    plan = plan_step(cache, [(seqs[0], 4)], seqs[2:], num_heads=4)
    with pytest.raises(ValueError, match="not all written in layer 1"):
        attend(randn(6, 4, 16), cache, 1, plan)


def test_a_wide_head_dim_is_served():
    """Decode has no kernel of its own for it; the forward over pages serves all rows."""
    cache = make_cache(head_dim=300)
    seqs = [cache.allocate(), cache.allocate()]
    grow(cache, seqs, [5, 3])
    for prefill, decodes in (([(seqs[0], 2)], seqs[1:]), ([], seqs)):
        plan = plan_step(PrefixCache(cache), prefill, decodes, num_heads=4)
        q = randn(plan.rows, 4, 300)
        states = [attend(q, cache, 0, plan, backend=name) for name in ("emulator", "cpu")]
        torch.testing.assert_close(*states, atol=2e-2, rtol=2e-2)
