"""Dropout by kernels, on a card or in the emulator: which weights they keep, bit by bit, and results by the oracle."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from gradient_cases import check
from oracle import assert_state, randn

from tilewise import attention, attention_varlen, reference
from tilewise.cpu.dropout import Dropout

SEED = torch.tensor(0x1234_5678_9ABC_DEF)
P = 0.3
GIVEN = {"dropout_p": P, "dropout_seed": SEED}


def kept_of(b: int, heads: int, rows: int, keys: int) -> torch.Tensor:
    """(heads, rows, keys) of sequence b, as the CPU has it."""
    count = torch.arange
    return Dropout(P, SEED).kept(torch.tensor([b]), count(heads)[:, None, None], count(rows)[:, None], count(keys))[0]


def starts(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def assert_kept(lengths_q, lengths_k, heads, head_dim, dtype, device="cpu", **options):
    """Every weight of packed sequences, as forward and backward have it.

    All scores are 0. Forward: values are unit vectors, so that an output is one weight. Backward: each of `head_dim`
    queries and gradients of o is a unit vector and all values are ones, so that an element of dV is one weight, and one
    of dK is one of dS, P (F − delta), which is above 0 where the weight is kept.
    """
    at = starts(lengths_q, device), starts(lengths_k, device)
    q, k, v = (torch.zeros(sum(n), heads, head_dim, dtype=dtype) for n in (lengths_q, lengths_k, lengths_k))
    call = partial(attention_varlen, cu_seqlens_q=at[0], cu_seqlens_k=at[1], **GIVEN, **options)
    for first in range(0, max(lengths_k), head_dim):
        o = call(q.to(device), k.to(device), _units(v, at[1], first).to(device)).cpu()
        for b, (row, end) in enumerate(pairwise(at[0].tolist())):
            want = kept_of(b, heads, end - row, lengths_k[b])[..., first : first + head_dim]
            got = (o[row:end] != 0).transpose(0, 1)[..., : want.shape[-1]]
            assert torch.equal(got, want), f"forward, sequence {b}, keys from {first} on"
    for first in range(0, max(lengths_q), head_dim):
        units = _units(q, at[0], first).to(device)
        leaves = [units.clone(), k.to(device), torch.ones_like(v).to(device)]
        _, d_k, d_v = torch.autograd.grad(call(*(x.requires_grad_() for x in leaves)), leaves, units)
        for b, (key, end) in enumerate(pairwise(at[1].tolist())):
            want = kept_of(b, heads, lengths_q[b], end - key)[:, first : first + head_dim].transpose(1, 2)
            for name, found in (("dv", d_v), ("dk", d_k)):
                got = (found[key:end].cpu() > 0).transpose(0, 1)[..., : want.shape[-1]]
                assert torch.equal(got, want), f"{name}, sequence {b}, rows from {first} on"


def _units(like, at, first):
    """Of each sequence, token first + d is unit vector d, and the others are 0."""
    made = torch.zeros_like(like)
    for start, end in pairwise(at.tolist()):
        for d in range(max(0, min(like.shape[-1], end - start - first))):
            made[start + first + d, :, d] = 1.0
    return made


def dense(q, k, v, sinks=None, *, device="cpu", **options):
    """State and gradients of `attention` by the tolerance rule; the oracle stays on the CPU."""
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
    given = {**GIVEN, **options}
    told = {name: x for name, x in given.items() if name not in ("deterministic", "backend", "exact")}

    def ours(q, k, v, s=None):
        at_it = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        s = None if s is None else s.to(device)
        found = attention(*(x.to(device) for x in (q, k, v)), sinks=s, return_lse=True, **at_it)
        return tuple(x.cpu() for x in found)

    oracle = lambda q, k, v, s=None, **more: reference.attention(q, k, v, sinks=s, **told, **more)  # noqa: E731
    return _judged(ours, oracle, tensors, randn(q.shape[0], q.shape[2], q.shape[1], seed=8), options.get("scale"))


def packed(lengths_q, lengths_k, heads_q, heads_kv, head_dim, dtype, *, device="cpu", **options):
    """The same of `attention_varlen`."""
    at = [starts(n, device) for n in (lengths_q, lengths_k)]
    q = randn(sum(lengths_q), heads_q, head_dim, dtype=dtype)
    k, v = (randn(sum(lengths_k), heads_kv, head_dim, dtype=dtype, seed=n) for n in (1, 2))
    given = {**GIVEN, **options}
    told = {name: x for name, x in given.items() if name not in ("deterministic", "backend", "exact")}

    def ours(q, k, v):
        at_it = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        found = attention_varlen(*(x.to(device) for x in (q, k, v)), *at, return_lse=True, **at_it)
        return tuple(x.cpu() for x in found)

    oracle = lambda q, k, v, **more: reference.attention_varlen(  # noqa: E731
        q, k, v, *(x.cpu() for x in at), **told, **more
    )
    return _judged(ours, oracle, (q, k, v), randn(heads_q, sum(lengths_q), seed=8), options.get("scale"))


def _judged(ours, oracle, tensors, d_lse, scale):
    with torch.no_grad():
        assert_state(ours(*tensors), oracle(*tensors), oracle(*tensors, dtype=tensors[0].dtype))
    d_o = randn(*tensors[0].shape, dtype=tensors[0].dtype, seed=7)
    return check(ours, oracle, tensors, d_o, d_lse, scale)
