"""Decode over lists of tokens: each query reads the keys that it names, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tilewise.cpu.scoring import Scoring
from tilewise.cpu.tiles import KV, tile_state

if TYPE_CHECKING:
    from tilewise.kvcache import PagedKVCache


def run_listed(
    q: torch.Tensor, cache: PagedKVCache, layer: int, seqs: Sequence[int], scoring: Scoring, indices: torch.Tensor
) -> KV:
    """q (n, T, Hq, D), indices (n, T, k) int32 -> o (n, T, Hq, Dv), lse (n, Hq, T).

    A query at a time: the tokens that it names, decoded if need be, are one tile for all its heads.
    """
    tokens, heads = q.shape[1:3]
    compute = q.dtype if cache.format.dtype == q.dtype else torch.float32
    o = q.new_zeros((*q.shape[:3], cache.value_dim))
    lse = torch.full((len(q), heads, tokens), -torch.inf, dtype=torch.float32, device="cpu")
    for n, seq in enumerate(seqs):
        for t in range(tokens):
            its = indices[n, t]
            its = its[its >= 0].long()
            if len(its):
                k, v = cache.load_tokens(layer, seq, its, compute)
                state = tile_state(q[n : n + 1, t : t + 1].to(compute), k[None], v[None], scoring)
                o[n, t], lse[n, :, t] = state[0][0, 0], state[1][0, 0]
    return o, lse
