"""Wrong arguments in compiled code: the message is the one of the same call outside of it, never the compiler's."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from oracle import qkv, randn

import tilewise
from tilewise import PagedKVCache

WRONG = {
    "a window that is a string": {"window": "ab"},
    "a window of fractions": {"window": (1.5, 0)},
    "a window of truth": {"window": (True, 0)},
    "a negative window": {"window": (-2, 0)},
    "half a window": {"window": (1,)},
    "scale": {"scale": "x"},
    "softcap": {"softcap": "x"},
    "causal": {"causal": 3},
    "return_lse": {"return_lse": "yes"},
    "backend of the wrong kind": {"backend": 3},
    "sinks": {"sinks": 3},
    "a descale": {"q_descale": 3},
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def error_of(call, *args, **options):
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        call(*args, **options)
    return type(caught.value), str(caught.value)


def assert_alike(call, *args, **options):
    torch._dynamo.reset()
    assert error_of(torch.compile(call, backend="eager"), *args, **options) == error_of(call, *args, **options)


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG.keys())
def test_attention(options):
    assert_alike(tilewise.attention, *qkv(1, 5, 5, 2, 2, 8), **options)


@pytest.mark.parametrize("options", [WRONG[name] for name in ("a window of fractions", "causal", "sinks", "scale")])
def test_attention_varlen(options):
    q, k, v = (x[0] for x in qkv(1, 5, 5, 2, 2, 8))
    starts = torch.tensor([0, 2, 5])
    assert_alike(tilewise.attention_varlen, q, k, v, starts, starts, **options)


@pytest.mark.parametrize("position", range(3))
def test_what_is_no_tensor(position):
    given = list(qkv(1, 5, 5, 2, 2, 8))
    given[position] = 3
    assert_alike(tilewise.attention, *given)


@pytest.mark.parametrize("options", [{"scale": "x"}, {"softcap": None}, {"sinks": 3}, {"return_lse": 1}])
def test_decode(options):
    cache = PagedKVCache(4, 4, 2, 8)
    seqs = [cache.allocate()]
    slots = cache.extend(seqs, [5])
    cache.write(0, slots, randn(5, 2, 8), randn(5, 2, 8))
    plan = tilewise.plan_decode(cache, seqs, num_heads=2)
    assert_alike(tilewise.decode, randn(1, 1, 2, 8), cache, 0, plan, **options)


def test_code_around_the_call():
    """And a function of the user's, in which more is compiled than the call."""

    def model(x, window):
        return tilewise.attention(x + 1, x, x, window=window).sum()

    assert_alike(model, qkv(1, 5, 5, 2, 2, 8)[0], (1.5, 0))


def test_a_whole_graph_says_it_too():
    compiled = torch.compile(tilewise.attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=re.escape("window must be an int, got float")):
        compiled(*qkv(1, 5, 5, 2, 2, 8), window=(1.5, 0))


def test_what_is_right_is_not_refused():
    """Integers of numpy and ints for floats are taken, as outside; what an operator takes stays in the graph."""
    q, k, v = qkv(1, 5, 5, 2, 2, 8)
    within = ({"window": [2, None]}, {"scale": 1}, {"softcap": 2})
    for options in (*within, {"window": (np.int64(2), 0)}):
        torch._dynamo.reset()
        expected = tilewise.attention(q, k, v, **options)
        call = torch.compile(tilewise.attention, backend="eager", fullgraph=options in within)
        assert torch.equal(call(q, k, v, **options), expected)
