"""The float64 oracle: what every call means, written to be read, never for speed.

Each function takes the arguments of the public call of its name and returns `(o, lse)` in float64. They form the
whole score matrix, so use small problems. At the end stands the tolerance rule that judges every kernel, and the
tiled loop that is the first rung of the teaching ladder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewise import functions
from tilewise.cpu.dropout import Dropout
from tilewise.plan.schedule import BlockSchedule

from .kvcache import PagedKVCache, PrefixCache

Window = tuple[int | None, int | None]
State = tuple[torch.Tensor, torch.Tensor]


def visible(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    chunk: int | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Which key each query sees: bool (seqlen_q, seqlen_k), aligned bottom-right (the last query sees the last key).

    chunk: blocks of so many positions, of which a query sees its own alone.
    """
    key = torch.arange(seqlen_k, device=device)
    query = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q  # the query's position among the keys
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    left, right = window if window is not None else (None, None)
    if causal:
        seen &= key <= query
    if left is not None:
        seen &= key >= query - left
    if right is not None:
        seen &= key <= query + right
    if chunk is not None:
        seen &= key // chunk == query // chunk  # of a query before the first key: rounded down, no key's block
    return seen


def _scheduled(schedule: BlockSchedule, sequences: slice, heads_q: int) -> torch.Tensor:
    """The pairs in a schedule's blocks: bool, broadcastable to (sequences, Hq, Nq, Nk)."""
    seen = schedule.to_mask()  # (Nq, Nk), (heads, Nq, Nk) or (B, heads or 1, Nq, Nk); heads: query heads or KV heads
    if seen.dim() == 4 and seen.shape[0] > 1:
        seen = seen[sequences]
    if seen.dim() > 2 and seen.shape[-3] > 1:
        seen = seen.repeat_interleave(heads_q // seen.shape[-3], dim=-3)
    return seen


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    qv: torch.Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    schedule: BlockSchedule | None = None,
    mask: torch.Tensor | Callable[..., Any] | None = None,
    score: Callable[..., Any] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    fp8_weights: bool = False,
    first: int = 0,
) -> State:
    """softmax(q kᵀ · scale) v. q (B, Nq, Hq, D), k (B, Nk, Hkv, D), v (B, Nk, Hkv, Dv) -> o (B, Nq, Hq, Dv),
    lse (B, Hq, Nq).

    `qv` (B, Nq, Hq, Dv): scores are (q kᵀ + qv vᵀ) · scale. `mask`: a function (b, h, q, k) -> bool, or bools,
    broadcastable to (B, Hq, Nq, Nk): True = visible, on top of the other rules. `score`: a function (s, b, h, q, k) ->
    the score. `first`: the b of the first sequence. `dtype` is what the arithmetic runs in: float64 for the oracle, the
    inputs' own for `baseline`. `fp8_weights`: the softmax's weights are rounded to e4m3, 256 standing for 1.
    """
    batch, nq, hq, head_dim = q.shape
    nk, hkv = k.shape[1], k.shape[2]
    count = partial(torch.arange, device=q.device)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k, v = k.repeat_interleave(hq // hkv, dim=2), v.repeat_interleave(hq // hkv, dim=2)

    products = torch.einsum("bihd,bjhd->bhij", q, k)
    if qv is not None:
        head_dim += qv.shape[-1]
        products = products + torch.einsum("bihd,bjhd->bhij", qv.to(dtype), v)
    scores = products * (head_dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = (count(nq)[:, None] + nk - nq - count(nk)).abs()
        slopes = alibi_slopes.expand(batch, hq)[:, :, None, None]
        scores = scores - (slopes.to(dtype) * distance.to(dtype))

    # Functions are evaluated as they were traced, over all pairs: called with tensors, t[h][k] would be another thing.
    function = functions.of(mask if callable(mask) else None, score) if callable(mask) or score is not None else None
    b, h = first + count(batch)[:, None, None, None], count(hq)[:, None, None]
    pairs = (b, h, count(nq)[:, None], count(nk))
    if function is not None and function.score is not None:
        scores = function.scored(scores, *pairs).expand_as(scores)

    seen = visible(nq, nk, causal=causal, window=window, chunk=chunk, device=q.device)
    if schedule is not None:
        seen = seen & _scheduled(schedule, slice(first, first + batch), hq).to(seen.device)
    if isinstance(mask, torch.Tensor):
        seen = seen & mask
    if function is not None and function.mask is not None:
        seen = seen & function.seen(*pairs)
    scores = scores.masked_fill(~seen, -math.inf)

    if sinks is not None:  # one more column, whose value is zero
        column = sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
        v = torch.cat((v, torch.zeros_like(v[:, :1])), dim=1) if nk else v.new_zeros(v.shape[0], 1, *v.shape[2:])
    # A row that sees no key has the empty state, and gradients of 0: neither is left to a softmax of −inf alone.
    empty = (scores == -math.inf).all(-1)
    scores = scores.masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_zeros(scores.shape[:3])
    lse = lse.masked_fill(empty, -math.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(empty[..., None], 0.0)
    if dropout_p and dropout_seed is not None and nk:
        kept = Dropout(dropout_p, int(dropout_seed)).kept(*pairs)
        weights = torch.cat((weights[..., :nk] * kept / (1 - dropout_p), weights[..., nk:]), dim=-1)
    if fp8_weights:
        weights = (weights * 256).float().to(torch.float8_e4m3fn).to(dtype) / 256
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def baseline(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> State:
    """PyTorch's own mathematics in the inputs' own precision: the honest measure of how large an error may be.

    torch multiplies no FP8 in einsum: there the weights are rounded to it, and the output to bfloat16.
    """
    if q.dtype == torch.float8_e4m3fn:
        o, lse = attention(q, k, v, dtype=torch.float32, fp8_weights=True, **options)
        return o.bfloat16(), lse
    return attention(q, k, v, dtype=q.dtype, **options)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    qv: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    schedule: BlockSchedule | Sequence[BlockSchedule | None] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> State:
    """Each packed sequence alone: q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv) -> o (total_q, Hq, Dv),
    lse (Hq, total_q)."""
    o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=dtype)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        one = schedule[b] if isinstance(schedule, Sequence) else schedule
        given = {"alibi_slopes": slopes, "schedule": one, "first": b, "dtype": dtype, **options}
        given["qv"] = None if qv is None else qv[None, rows]
        state = attention(q[None, rows], k[None, keys], v[None, keys], **given)
        o[rows], lse[:, rows] = state[0][0], state[1][0]
    return o, lse


def merge_states(o: torch.Tensor, lse: torch.Tensor) -> State:
    """States (n, ..., rows, heads, D) and (n, ..., heads, rows) over disjoint keys: add the unnormalised sums."""
    o, lse = o.double(), lse.double()
    top = lse.amax(0).clamp_min(torch.finfo(torch.float64).min)  # finite, so an empty row is exp(−inf) = 0
    denominators = torch.exp(lse - top)
    numerators = o.nan_to_num() * denominators.transpose(-1, -2)[..., None]
    total = denominators.sum(0)
    merged = numerators.sum(0) / total.clamp_min(torch.finfo(torch.float64).tiny).transpose(-1, -2)[..., None]
    return merged, top + torch.log(total)


def decode(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    seqs: Sequence[int],
    *,
    window: Window | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> State:
    """Each sequence alone over its own gathered keys. q (n, T, Hq, D) -> o (n, T, Hq, Dv), lse (n, Hq, T).

    tree_mask: (n, T, T) bool, which of the last T tokens each query sees, the first of them being seen by all.
    selected: bool, broadcastable to (n, Hkv, pages), which pages of its list a sequence and KV head reads.
    indices: (n, T, k), the positions that each query reads and no others, −1 for none.
    """
    if indices is not None:
        return _decode_listed(q, cache, layer, seqs, indices, scale=scale, softcap=softcap, sinks=sinks, dtype=dtype)
    pages = cache.cache if isinstance(cache, PrefixCache) else cache
    states = []
    for row, seq in enumerate(seqs):
        k, v = pages.gather(layer, seq)
        tokens = q.shape[1]
        seen = torch.ones(tokens, len(k), dtype=torch.bool)
        if tree_mask is not None:
            padded = torch.ones(tokens, max(len(k), tokens), dtype=torch.bool)
            padded[:, padded.shape[1] - tokens + 1 :] = tree_mask[row, :, 1:]
            seen = padded[:, padded.shape[1] - len(k) :]  # a sequence may have fewer than T
        if selected is not None:
            read = selected.expand(len(seqs), k.shape[1], -1)[row].repeat_interleave(pages.page_size, dim=-1)
            seen = seen & read[:, None, : len(k)].repeat_interleave(q.shape[2] // k.shape[1], dim=0)
        states.append(
            attention(
                q[row : row + 1],
                k[None],
                v[None],
                causal=tree_mask is None,
                window=window,
                chunk=chunk,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                mask=seen,
                dtype=dtype,
            )
        )
    return torch.cat([o for o, _ in states]), torch.cat([lse for _, lse in states])


def _decode_listed(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    seqs: Sequence[int],
    indices: torch.Tensor,
    **options: Any,
) -> State:
    """Each query alone over the keys that it names, as often as it names them."""
    pages = cache.cache if isinstance(cache, PrefixCache) else cache
    states = []
    for row, seq in enumerate(seqs):
        k, v = pages.gather(layer, seq)
        for t, its in enumerate(indices[row].long()):
            named = its[its >= 0]
            states.append(attention(q[row : row + 1, t : t + 1], k[None, named], v[None, named], **options))
    o, lse = torch.cat([o for o, _ in states]), torch.cat([lse for _, lse in states])
    tokens = q.shape[1]
    return o.view(len(seqs), tokens, *o.shape[2:]), lse.view(len(seqs), tokens, -1).transpose(1, 2)


def shared_prefix_attention(
    q: torch.Tensor,
    levels: Sequence[tuple[torch.Tensor, ...]],
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    lengths: Sequence[int] | torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> State:
    """Every sequence over its own copy of its prefixes and of its own keys.

    q (B, Nq, Hq, D), values with Dv -> o (B, Nq, Hq, Dv), lse (B, Hq, Nq). Prefixes are in full view of every query;
    the causal rule lies over the sequence's own keys alone, bottom-right.
    """
    batch, nq = q.shape[:2]
    states = []
    for b in range(batch):
        keys, values = [], []
        for level in (*levels, (k, v) if lengths is None else (k, v, lengths)):
            member = b // (batch // level[0].shape[0])
            valid = int(level[2][member]) if len(level) == 3 else level[0].shape[1]
            keys.append(level[0][member, :valid])
            values.append(level[1][member, :valid])
        own = visible(nq, keys[-1].shape[0], causal=causal)
        prefix = torch.ones(nq, sum(x.shape[0] for x in keys[:-1]), dtype=torch.bool)
        one_k, one_v, seen = torch.cat(keys)[None], torch.cat(values)[None], torch.cat((prefix, own), dim=1)
        states.append(
            attention(q[b : b + 1], one_k, one_v, mask=seen, scale=scale, softcap=softcap, sinks=sinks, dtype=dtype)
        )
    return torch.cat([o for o, _ in states]), torch.cat([lse for _, lse in states])


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    tile_q: int = 16,
    tile_kv: int = 16,
) -> State:
    """The Flash Attention loop in plain PyTorch, float32: the first rung of the ladder.

    q (B, Nq, H, D), k and v (B, Nk, H, D or Dv), any lengths -> o (B, Nq, H, Dv), lse (B, H, Nq). Four things in this
    loop are easily got wrong, and each was once: the probabilities P and the running sum l are two things; the old
    maximum is taken inside the loop over key tiles, before the new one; O is divided by l once, at the end; the
    log-sum-exp is m + log l, not l.
    """
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))  # (B, H, N, D)
    nq, nk = q.shape[2], k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    o, lse = torch.zeros(*q.shape[:3], v.shape[3]), torch.full(q.shape[:3], -math.inf)
    for i in range(0, nq, tile_q):
        q_i = q[:, :, i : i + tile_q]  # the last tile may be shorter
        o_i = torch.zeros(*q_i.shape[:3], v.shape[3])
        l_i = torch.zeros(*q_i.shape[:3], 1)
        m_i = torch.full_like(l_i, -math.inf)
        for j in range(0, nk, tile_kv):
            k_j, v_j = k[:, :, j : j + tile_kv], v[:, :, j : j + tile_kv]
            s_ij = scale * (q_i @ k_j.mT)
            if causal:
                s_ij = s_ij.masked_fill(~visible(nq, nk, causal=True)[i : i + tile_q, j : j + tile_kv], -math.inf)
            m_new = torch.maximum(m_i, s_ij.amax(-1, keepdim=True))
            reference = torch.where(m_new == -math.inf, 0.0, m_new)  # nothing visible yet: exp(−inf − 0) = 0
            p_ij = torch.exp(s_ij - reference)
            correction = torch.exp(m_i - reference)
            l_i = correction * l_i + p_ij.sum(-1, keepdim=True)
            o_i = correction * o_i + p_ij @ v_j
            m_i = m_new
        o[:, :, i : i + tile_q] = o_i / torch.where(l_i == 0, 1.0, l_i)
        lse[:, :, i : i + tile_q] = (m_i + torch.log(l_i))[..., 0]
    return o.transpose(1, 2), lse


@dataclass(frozen=True)
class Verdict:
    """The tolerance rule's judgement: `ok`, the largest error, the largest error allowed, and why not when not ok."""

    ok: bool
    error: float
    allowed: float
    reason: str = ""


def judge(
    result: torch.Tensor, exact: torch.Tensor, honest: torch.Tensor, *, lse: torch.Tensor | None = None
) -> Verdict:
    """Is `result` within twice the error that PyTorch's own mathematics in the same precision makes (`honest`)?

    Both are measured against the float64 `exact`, by the largest error of any element. On top comes what even a perfect
    kernel pays at the largest value: a score, a weight, a sum and an output rounded to float32, the result rounded to
    its dtype, and, for an o merged from states whose exact `lse` is given, weights known no better than a float32 LSE
    tells them. NaN and infinities must stand in the same places.
    """
    result, exact = result.detach(), exact.double()
    if result.shape != exact.shape:
        return Verdict(False, math.inf, 0.0, f"shape {tuple(result.shape)} instead of {tuple(exact.shape)}")
    got, base = result.double(), honest.double()
    finite = torch.isfinite(exact)
    if not torch.equal(torch.nan_to_num(got[~finite], nan=0.5), torch.nan_to_num(exact[~finite], nan=0.5)):
        return Verdict(False, math.inf, 0.0, "NaN or infinity where the oracle has another value")
    if not torch.isfinite(got[finite]).all():
        return Verdict(False, math.inf, 0.0, "NaN or infinity where the oracle is finite")
    if not finite.any():
        return Verdict(True, 0.0, 0.0)
    float32_rounding = torch.finfo(torch.float32).eps / 2
    unit = 4 * float32_rounding + torch.finfo(result.dtype).eps / 2
    if lse is not None:
        unit += float32_rounding * lse.double().nan_to_num(neginf=0.0).abs().max().item()
    rounding = unit * exact[finite].abs().max().item()
    baseline_error = (base[finite] - exact[finite]).abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
    error = (got[finite] - exact[finite]).abs().max().item()
    allowed = 2 * baseline_error + rounding
    reason = "" if error <= allowed else f"error {error:.3g} is over {allowed:.3g}, twice PyTorch's own"
    return Verdict(error <= allowed, error, allowed, reason)
