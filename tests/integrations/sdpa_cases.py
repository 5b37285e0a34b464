"""Calls of scaled_dot_product_attention, and the check of one against torch and the float64 oracle."""

from __future__ import annotations

import math

import torch
from oracle import randn

from tilewise import reference
from tilewise.integrations import sdpa as module
from tilewise.integrations.sdpa import explain, sdpa, torch_sdpa


def make(query, key=None, value=None, *, dtype=torch.float32, device="cpu"):
    """Tensors of these shapes; key like query, value like key if None."""
    key = query if key is None else key
    shapes = (query, key, key if value is None else value)
    return [randn(*shape, dtype=dtype, seed=n).to(device) for n, shape in enumerate(shapes)]


def check(query, key, value, attn_mask=None, *, is_causal=False, scale=None, enable_gqa=False, by="tilewise"):
    """sdpa, judged by the tolerance rule; its shape and dtype are torch's, and `by` serves it, as explain says."""
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    told = explain(query, key, value, attn_mask, **options)
    assert told.backend == by, str(told)
    got = sdpa(query, key, value, attn_mask, **options)
    if not got.numel():  # torch 2.11 gives None for some of these on a GPU
        assert got.shape == (*query.shape[:-1], value.shape[-1])
        return got
    like = torch_sdpa(query, key, value, attn_mask, **options)
    assert got.shape == like.shape
    assert (got.dtype, got.device) == (like.dtype, like.device)

    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value)]
    if not enable_gqa:
        heads = [max(heads)] * 3
    q, k, v = (
        x.expand(*lead, n, *x.shape[-2:]).reshape(math.prod(lead), n, *x.shape[-2:]).transpose(1, 2).cpu()
        for x, n in zip((query, key, value), heads, strict=True)
    )
    rows, keys = query.shape[-2], key.shape[-2]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if attn_mask is not None:
        shape = (*lead, heads[0], rows, keys)
        seen = seen & attn_mask.cpu().expand(shape).reshape(-1, *shape[-3:])
    exact, lse = reference.attention(q, k, v, mask=seen, scale=scale)
    honest = reference.baseline(q, k, v, mask=seen, scale=scale)[0]
    by_rows = got.cpu().reshape(-1, heads[0], rows, value.shape[-1]).transpose(1, 2)
    verdict = reference.judge(by_rows, exact, honest, lse=lse)
    assert verdict.ok, verdict.reason
    return got


SHAPES = [
    ((5, 8), (6, 8), (6, 8)),
    ((3, 5, 8), (3, 6, 8), (3, 6, 8)),
    ((3, 5, 8), (1, 6, 8), (1, 6, 8)),
    ((2, 3, 5, 8), (3, 6, 8), (3, 6, 8)),
    ((3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    ((2, 3, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
    ((2, 1, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    ((2, 3, 5, 8), (2, 1, 6, 8), (2, 3, 6, 8)),
    ((1, 3, 5, 8), (4, 3, 6, 8), (1, 3, 6, 8)),
    ((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8)),
    ((2, 1, 4, 5, 8), (3, 1, 6, 8), (1, 1, 3, 4, 6, 8)),
    ((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 4)),
    ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 8)),
    ((2, 3, 5, 1), (2, 3, 6, 1), (2, 3, 6, 1)),
]


def padding(*lengths, left=False):
    seen = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return (seen.flip(1) if left else seen)[:, None, None]


def serves(monkeypatch) -> list[str]:
    """Who has served since: a list that grows."""
    served: list[str] = []
    attention = module.api.attention
    monkeypatch.setattr(module, "torch_sdpa", lambda *a, **k: (served.append("torch"), torch_sdpa(*a, **k))[1])
    monkeypatch.setattr(module.api, "attention", lambda *a, **k: (served.append("tilewise"), attention(*a, **k))[1])
    return served
