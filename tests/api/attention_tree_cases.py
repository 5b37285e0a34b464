"""attention_tree and its oracle, the unshared sequences one by one in float64."""

from __future__ import annotations

from functools import partial

import torch
from oracle import assert_gradients, assert_state, gradient_floors, gradients, randn

from tilewise import attention_tree, reference


def tensors_of(tree, heads_q, heads_kv, head_dim, dtype=torch.float32, sinks=False):
    total = tree.num_tokens
    q, k, v = (randn(total, h, head_dim, dtype=dtype, seed=n) for n, h in enumerate((heads_q, heads_kv, heads_kv)))
    return (q, k, v, randn(heads_q, seed=3)) if sinks else (q, k, v)


def unshared(tree, q, k, v, *sinks, dtype=torch.float64, **options):
    """The oracle: each sequence alone, and of every packed token what one of its sequences has."""
    given = dict(zip(("sinks",), sinks, strict=False))
    o, lse = reference.attention_varlen(
        *(x[tree.index] for x in (q, k, v)), tree.starts, tree.starts, causal=True, dtype=dtype, **given, **options
    )
    first = torch.zeros(tree.num_tokens, dtype=torch.long).scatter_(0, tree.index, torch.arange(len(tree.index)))
    return o[first], lse[:, first]


def ours(tree, q, k, v, *sinks, **options):
    given = dict(zip(("sinks",), sinks, strict=False))
    return attention_tree(q, k, v, tree, return_lse=True, **given, **options)


def check(tree, tensors, with_lse=True, backend="auto", device="cpu", deterministic=False, **options):
    """State and gradients; tensors and the oracle are on the CPU, and we compute on `device`."""
    there = tree.to(device)

    def by_us(*given):
        there_too = (x.to(device) for x in given)
        return [x.cpu() for x in ours(there, *there_too, backend=backend, deterministic=deterministic, **options)]

    oracle, dtype = partial(unshared, tree, **options), tensors[0].dtype
    exact, honest = oracle(*(x.double() for x in tensors)), oracle(*tensors, dtype=dtype)
    assert_state(by_us(*tensors), exact, honest)
    d_o = randn(*tensors[0].shape, dtype=dtype, seed=7)
    d_lse = randn(tensors[0].shape[1], tree.num_tokens, seed=8) if with_lse else None
    got = gradients(by_us, tensors, d_o, d_lse)
    assert [x.dtype for x in got] == [x.dtype for x in tensors]
    assert_gradients(
        got,
        gradients(oracle, tensors, d_o, d_lse, dtype=torch.float64),
        gradients(partial(oracle, dtype=dtype), tensors, d_o, d_lse),
        gradient_floors(oracle, tensors, d_o, options.get("scale")),
        exact[1],
    )
