"""A small cache, steps of chunks and decodes over it, and what a standing step's rows are held against."""

from __future__ import annotations

import torch
from decode_tree_cases import grow, make_cache
from oracle import randn
from step_cases import judge_step

from tilewise import attend, plan_decode, plan_step

BF16 = torch.bfloat16
ROWS, HEADS = 40, 2
LATENT = {"head_dim": 192, "value_dim": 128, "shared_kv": True}


def small(**options):
    """Sequences of 37, 50, 33, 7, 40 and 21 tokens, the first three of which share 32; what nobody wrote is NaN."""
    cache = make_cache(**{"page_size": 16, "pages": 60, "kv_heads": 1, "head_dim": 64, "kv_format": "bf16"} | options)
    for x in (*cache._k, *cache._v):
        if x.is_floating_point():
            x.fill_(float("nan"))
    root = cache.allocate()
    grow(cache, [root], [32], seed=1)
    seqs = [root, *(cache.fork(root) for _ in range(2)), *(cache.allocate() for _ in range(3))]
    grow(cache, seqs, [5, 18, 1, 7, 40, 21], seed=2)
    return cache, seqs


def standing(cache, prefill=(), decode=(), *, rows=ROWS, decodes=6, max_chunks=3, share=False, **options):
    options = {"num_heads": HEADS, **options}
    plan = plan_decode(cache, decode, rows=decodes, max_length=100, share_prefix=share, **options)
    return plan_step(cache, prefill, plan, rows=rows, max_chunks=max_chunks, **options)


def steps_of(seqs):
    """Chunks and decodes of some steps: many and few of both, all rows in use, only one kind, nothing."""
    a, b, c, d, e, f = seqs
    return [
        ([(a, 3), (e, 20), (b, 13)], [c, d, f]),
        ([(f, 21)], [e, a]),
        ([(d, 1)], [a, b, c, e, f]),
        ([], [b, d]),
        ([(c, 33), (b, 1)], []),
        ([], []),
        ([(e, 40)], []),
    ]


def rows_used(prefill, decode):
    return len(decode) + sum(tokens for _, tokens in prefill)


def queries(cache, prefill, decode, *, rows=ROWS, heads=HEADS, dtype=BF16, seed=0, size=1.0):
    """(rows, heads, D), NaN in idle rows, which nobody may read."""
    q = randn(rows, heads, cache.head_dim, dtype=dtype, seed=seed, size=size)
    q[rows_used(prefill, decode) :] = float("nan")
    return q


def room_for(q, cache):
    """An output of these queries, of NaN."""
    return torch.full((*q.shape[:2], cache.value_dim), float("nan"), dtype=q.dtype)


def chunks_first(prefill, decode):
    """The rows in use of a standing step in the order in which other steps have them."""
    used, count = rows_used(prefill, decode), len(decode)
    return torch.cat([torch.arange(count, used), torch.arange(count)])


def asked(cache, prefill, decode, q, *, window=None, chunk=None, backend="auto", **options):
    """(o, lse) of the rows in use by a plan of just this step, put in a standing step's order."""
    plan = plan_step(cache, prefill, decode, num_heads=q.shape[1], window=window, chunk=chunk, share_prefix=False)
    rows = chunks_first(prefill, decode)
    o, lse = attend(q[rows], cache, 0, plan, return_lse=True, backend=backend, **options)
    back = rows.argsort()
    return o[back], lse[:, back]


def judge(cache, prefill, decode, q, got, *, window=None, chunk=None, sinks=None, **options):
    """(o, lse) of a standing step's rows q by the oracle, and nothing in idle ones."""
    seen = {"window": window, "chunk": chunk}
    plan = plan_step(cache, prefill, decode, num_heads=q.shape[1], **seen)
    rows, (o, lse) = chunks_first(prefill, decode), got
    judge_step(q[rows], o[rows], lse[:, rows], cache, 0, plan, sinks=sinks, **seen, **options)
    check_idle(q, got, len(rows), sinks)


def check(q, got, expected, sinks=None):
    """To the bit where rows are in use, and nothing in the others."""
    (o, lse), used = got, len(expected[0])
    assert torch.equal(o[:used], expected[0])
    assert torch.equal(lse[:, :used], expected[1])
    check_idle(q, got, used, sinks)


def check_idle(q, got, used, sinks=None):
    """Rows from `used` on give 0 and the LSE of nothing."""
    o, lse = got
    heads, idle = q.shape[1], len(q) - used
    assert (o[used:] == 0).all()
    nothing = torch.full((heads, idle), -torch.inf) if sinks is None else sinks[:, None].expand(heads, idle)
    assert torch.equal(lse[:, used:], nothing)
