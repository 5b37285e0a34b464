"""Decode over lists of tokens: each query reads the keys that it names, and no others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewise.cpu.scoring import Scoring
from tilewise.cpu.tiles import KV, tile_state


def run_listed(
    q: torch.Tensor,
    load: Callable[[int, torch.Tensor], KV],
    scoring: Scoring,
    indices: torch.Tensor,
    *,
    value_dim: int,
    compute: torch.dtype,
) -> KV:
    """q (n, T, Hq, D), indices (n, T, k) int32, −1 for none -> o (n, T, Hq, Dv), lse (n, Hq, T).

    load(n, positions): k and v (m, Hkv, D) in the dtype `compute`, those that the queries of q[n] know by `positions`
    (m,) int64. A query at a time: the tokens that it names are one tile for all its heads.
    """
    tokens, heads = q.shape[1:3]
    o = q.new_zeros((*q.shape[:3], value_dim))
    lse = torch.full((len(q), heads, tokens), -torch.inf, dtype=torch.float32, device="cpu")
    for n in range(len(q)):
        for t in range(tokens):
            its = indices[n, t]
            its = its[its >= 0].long()
            if len(its):
                k, v = load(n, its)
                state = tile_state(q[n : n + 1, t : t + 1].to(compute), k[None], v[None], scoring)
                o[n, t], lse[n, :, t] = state[0][0, 0], state[1][0, 0]
    return o, lse
