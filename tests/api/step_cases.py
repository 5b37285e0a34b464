"""Steps of chunks and decodes over random caches, and what the float64 oracle says about them."""

from __future__ import annotations

import torch
from decode_tree_cases import grow, make_cache
from oracle import assert_state, poison, randn

from tilewise import attend, plan_step, reference


def pages_of(cache):
    return getattr(cache, "cache", cache)


def mixed(**options):
    """A cache with three chunks and four decodes, two of each under a prefix of 40 tokens -> cache, prefill, decode."""
    cache = make_cache(**options)
    root = cache.allocate()
    grow(cache, [root], [40], seed=1)
    seqs = [root, *(cache.fork(root) for _ in range(3)), *(cache.allocate() for _ in range(3))]
    grow(cache, seqs, [9, 21, 3, 1, 33, 6, 70], seed=2)
    return cache, [(seqs[0], 7), (seqs[4], 33), (seqs[1], 21)], [seqs[2], seqs[5], seqs[3], seqs[6]]


def assert_step(cache, prefill, decode, *, heads=4, layer=0, dtype=torch.float32, share="auto", window=None, chunk=None,
                seed=5, backend="auto", cost=None, **options):  # fmt: skip
    """A step against the oracle, chunk by chunk and decode by decode; returns the plan, o and lse."""
    seen = {"window": window, "chunk": chunk}
    plan = plan_step(cache, prefill, decode, num_heads=heads, share_prefix=share, cost=cost, **seen)
    q = randn(plan.rows, heads, pages_of(cache).head_dim, dtype=dtype, seed=seed).to(pages_of(cache).device)
    out = poison(q.new_empty((*q.shape[:2], pages_of(cache).value_dim)))
    o, lse = attend(q, cache, layer, plan, return_lse=True, out=out, backend=backend, **options)
    judge_step(q, o, lse, cache, layer, plan, **seen, **options)
    return plan, o, lse


def judge_step(q, o, lse, cache, layer, plan, *, window=None, chunk=None, **options):
    """(o, lse) of a step's rows q, each sequence alone over its own gathered keys."""
    assert o.dtype == q.dtype
    assert lse.shape == (q.shape[1], len(q))
    parts = [] if plan.prefill is None else list(zip(plan.prefill.seqs, plan.prefill.tokens, strict=True))
    parts += [] if plan.decode is None else [(seq, plan.decode.tokens_per_seq) for seq in plan.decode.seqs]
    more = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    states = []
    row = 0
    for seq, tokens in parts:
        rows = slice(row, row + tokens)
        asked = (q[None, rows].cpu(), *(x[None].cpu() for x in pages_of(cache).gather(layer, seq)))
        got = (o[None, rows].cpu(), lse[None, :, rows].cpu())
        exact = reference.attention(*asked, causal=True, window=window, chunk=chunk, **more)
        honest = reference.attention(*asked, causal=True, window=window, chunk=chunk, dtype=q.dtype, **more)
        states.append((got, exact, honest))
        if q.dtype != torch.float32:  # a long sequence's output is small, and must not be excused by a short one's
            verdict = reference.judge(got[0], exact[0], honest[0], lse=exact[1])
            floor = torch.finfo(q.dtype).eps * exact[0].abs().amax().item()
            assert verdict.ok or verdict.error <= floor, f"o of sequence {seq}: {verdict.reason}"
        row += tokens
    assert row == len(q) == len(o)
    if states:
        assert_state(*(tuple(torch.cat(x, 1 + n) for n, x in enumerate(zip(*of, strict=True)))
                       for of in zip(*states, strict=True)))  # fmt: skip
