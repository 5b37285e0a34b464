"""ALiBi on the CPU, by torch's flash kernel: what it adds to the scores of a tile, as a line that strides make a mask.

What ALiBi adds depends on key − row alone, and so does what a band hides. Along a tile of R rows and K keys that is one
line of R + K − 1 values, of which every row sees a piece. With the last key first the piece of each row begins one
value after that of the row before it: the line with strides (1, 1) is the whole mask, and no matrix is ever made.
Under a causal mask that order also brings near keys first. In the other one, sums over far keys would be made small by
every nearer block until float32 has too few bits for them, and such products take many times as long.
"""

from __future__ import annotations

import math

import torch

from tilewise.cpu.scoring import Scoring, count_up
from tilewise.cpu.tiles import KV, Hidden, evened, flash
from tilewise.plan.tiles import OPEN, Band, seen_keys

STRIP = 256  # rows under a band that go over their keys together: as many as torch's kernel takes at once


def line_state(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scoring: Scoring,
    slopes: torch.Tensor,
    origin: int,
    band: Band,
) -> KV:
    """The state of n tiles: q (n, rows, Hq, D) over k, v (n, keys, Hkv, D) -> o (n, rows, Hq, D), lse (n, rows, Hq).

    v and o may have another head dimension. Rows and keys count from 0 under the band; row 0 stands at key `origin`.
    slopes: (n or 1, Hq) float32.
    """
    (rows, heads_q), (keys, heads_kv) = q.shape[1:3], k.shape[1:3]
    band = band.opened(rows, keys)
    height, group = rows if band == OPEN else STRIP, heads_q // heads_kv
    value_dim = v.shape[-1]
    q, k, v = evened(q, k.flip(1), v.flip(1))
    o_all, lse_all = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device="cpu")
    for first in range(0, rows, max(1, height)):
        strip = slice(first, min(first + height, rows))
        count = strip.stop - first
        start, stop = seen_keys(count, keys, band.shifted(first))
        if start == stop:
            o_all[:, strip], lse_all[:, strip] = 0.0, -math.inf
            continue
        these_k, these_v = k[:, keys - stop : keys - start], v[:, keys - stop : keys - start]
        for g in range(group):
            these = slice(g, None, group)
            hidden = _line(slopes[:, these], origin + first - start, band.shifted(first - start), count, stop - start)
            o, lse = flash(q[:, strip, these].transpose(1, 2), these_k, these_v, scoring, False, hidden)
            o_all[:, strip, these], lse_all[:, strip, these] = o.transpose(1, 2), lse.transpose(1, 2)
    return o_all[..., :value_dim], lse_all


def _line(slopes: torch.Tensor, origin: int, band: Band, rows: int, keys: int) -> Hidden:
    """What is added to the scores of a tile whose last key comes first, and which of its rows see no key."""
    length = rows + keys - 1
    offset = count_up(1 - rows, keys).flip(0)  # key − row
    line = slopes[..., None] * -(offset - origin).abs()
    line = torch.where(band.allows(offset), line, -math.inf).contiguous()
    bias = line.as_strided((*slopes.shape, rows, keys), (slopes.shape[1] * length, length, 1, 1))
    row = count_up(0, rows)
    first = 0 if band.low is None else (row + band.low).clamp(min=0)
    last = keys - 1 if band.high is None else (row + band.high).clamp(max=keys - 1)
    return Hidden(bias, (row * 0 + first > last)[None, None])
