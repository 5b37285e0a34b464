"""FlashAttention-3's flash_attn_with_kvcache and the metadata that may come with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewise import checks
from tilewise.gpu.abi import FP8

from .caches import (
    Tokens,
    attend_cache,
    check_cache,
    check_lengths,
    check_new,
    check_rotary,
    check_served,
    check_starts,
)
from .flash_options import NO_WINDOW, asked_of, check_tuning, more_asked_of, rows, rows_of_qv

TABLE = "page_table"
CacheResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


# More than 80 lines: FlashAttention-3 has given it thirty arguments.
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> CacheResult:
    """Attention of new tokens over a KV cache, which first takes in their keys and values if they are given.

    q: (batch, seqlen_q, heads, head_dim), or with cu_seqlens_q (batch + 1,) packed (total_q, heads, head_dim). qv: as q
    with v's head_dim. k_cache: (sequences, capacity, heads_k, head_dim), or with page_table (batch, pages per sequence)
    int32 the pages (pages, page_size, heads_k, head_dim) of any size; v_cache: the same with value_dim.
    k, v: (batch, seqlen_new, heads_k, …), or with cu_seqlens_k_new (batch + 1,) packed (total_new, heads_k, …), written
    into the caches *in place* from position cache_seqlens on.
    cache_seqlens: the tokens in the cache before the call, an int or (batch,) int32 or int64; None for all of it.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2), with k and v: k turns by its positions rotary_seqlens,
    rotary_seqlens + 1, …; q by the same if causal, windowed or chunked, else all of it by rotary_seqlens.
    rotary_seqlens: (batch,), cache_seqlens if None. rotary_interleaved: pairs of channels are 2i and 2i + 1, else i and
    i + rotary_dim / 2. cache_batch_idx: (batch,), the sequences of the cache, or the rows of page_table, that these
    are. cache_leftpad: (batch,), rows of the cache before a sequence's first key; positions count from row 0.
    max_seqlen_q: accepted, and not needed. The other arguments as in `flash_attn_func`.

    On a GPU the values of tensors are not looked at. Entries of page_table beyond a sequence's length may be anything.
    Where capacity is not a multiple of 16, or with cache_leftpad, the cache is read row by row, which is slower.
    There is no backward pass.

    Returns out (batch, seqlen_q, heads, value_dim) or (total_q, heads, value_dim); with return_softmax_lse a tuple of
    out, the LSE (batch, heads, seqlen_q) or (heads, total_q), and two empty tensors: the partial results of splits that
    are returned there are nobody's to see here.
    """
    asked = asked_of(softmax_scale, causal, window_size, softcap)
    check_tuning(num_splits, pack_gqa, sm_margin)
    checks.flag("rotary_interleaved", rotary_interleaved)
    checks.flag("return_softmax_lse", return_softmax_lse)
    queries = _queries(q, cu_seqlens_q, max_seqlen_q)
    batch, device = queries.batch, queries.x.device
    dtypes = (*checks.FLOATS, FP8)
    cache = check_cache(queries, k_cache, v_cache, cache_batch_idx, cache_leftpad, page_table, TABLE, dtypes)
    if cu_seqlens_k_new is not None and k is None:
        raise ValueError("cu_seqlens_k_new goes with k and v, got no k")
    new = check_new(k, v, queries, cache, cu_seqlens_k_new)
    more = more_asked_of(queries.x, attention_chunk, (q_descale, k_descale, v_descale))
    given = (k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin)
    check_served("flash_attn_with_kvcache", queries.x, v_cache, given)
    for name in ("q_descale", "k_descale", "v_descale"):
        if more.get(name) is not None:
            shape = (batch, cache.k.shape[2])
            checks.tensor(name, more[name], shape=shape, dtypes=(torch.float32,), device=device)
    others = {"qv": rows_of_qv(qv, queries.x, cache.v)}
    if scheduler_metadata is not None:
        checks.tensor("scheduler_metadata", scheduler_metadata, dtypes=(torch.int32,), device=device)
    lengths = check_lengths(cache_seqlens, cache, batch, new, TABLE)
    first = lengths
    if rotary_seqlens is not None:
        first = checks.tensor("rotary_seqlens", rotary_seqlens, shape=(batch,), dtypes=checks.INTEGERS, device=device)
    tables = (rotary_cos, rotary_sin, rotary_interleaved)
    rotary = check_rotary(*tables, queries, new, first, 0 if page_table is None else cache.capacity)
    o, lse = attend_cache(queries, cache, new, lengths, rotary, asked, return_softmax_lse, others, **more)
    if lse is None:
        return o
    none = torch.empty(0, device=device)
    return o, lse.contiguous(), none, none


def _queries(q: Any, starts: torch.Tensor | None, longest: Any) -> Tokens:
    if starts is None:
        return Tokens(rows("q", q, ("batch", "seqlen", "heads", "head_dim")))
    q = rows("q", q, ("total", "heads", "head_dim"))
    check_starts("cu_seqlens_q", starts, None, q, "q")
    if longest is not None and not isinstance(longest, torch.Tensor):
        checks.integer("max_seqlen_q", longest, 0)
    return Tokens(q, starts)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """What `flash_attn_with_kvcache` takes as scheduler_metadata: an empty int32 tensor where cache_seqlens is.

    FlashAttention-3 cuts the work of a batch beforehand and hands the result to every layer. Here each call's kernel
    finds its work by itself from the lengths on the device, so there is nothing to hand on.
    """
    checks.tensor("cache_seqlens", cache_seqlens, shape=(batch_size,), dtypes=checks.INTEGERS)
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
