"""Gradients of the public calls against autograd through the float64 oracle, on whatever device the tensors are."""

from __future__ import annotations

from functools import partial

import torch
from oracle import assert_gradients, gradient_floors, gradients, randn

from tilewise import attention, reference


def check(ours, oracle, tensors, d_o, d_lse=None, scale=None, floors=None):
    """ours and oracle: calls of the tensors that return (o, lse). Returns our gradients."""
    got = gradients(ours, tensors, d_o, d_lse)
    exact = gradients(oracle, tensors, d_o, d_lse, dtype=torch.float64)
    honest = gradients(partial(oracle, dtype=tensors[0].dtype), tensors, d_o, d_lse)
    assert [x.dtype for x in got] == [x.dtype for x in tensors]
    _, lse = oracle(*(x.double() for x in tensors))
    if floors is None:
        floors = gradient_floors(oracle, tensors, d_o, scale)
    assert_gradients(got, exact, honest, floors, lse, [f"gradient {n}" for n in range(len(got))])
    return got


def check_dense(q, k, v, sinks=None, *, with_lse=True, **options):
    """`attention` with these options; a gradient of the LSE, too, if asked for."""
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
    given = ("sinks",) if sinks is not None else ()

    def ours(q, k, v, *rest):
        return attention(q, k, v, return_lse=True, **dict(zip(given, rest, strict=True)), **options)

    def oracle(q, k, v, *rest, **more):
        told = {name: x for name, x in options.items() if name != "deterministic"}
        return reference.attention(q, k, v, **dict(zip(given, rest, strict=True)), **told, **more)

    d_lse = randn(q.shape[0], q.shape[2], q.shape[1], seed=8).to(q.device) if with_lse else None
    d_o = randn(*q.shape, dtype=q.dtype, seed=7).to(q.device)
    return check(ours, oracle, tensors, d_o, d_lse, options.get("scale"))
