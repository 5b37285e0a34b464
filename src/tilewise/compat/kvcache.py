"""flash_attn_with_kvcache: append to a cache, turn by rotary tables, attend over each sequence's own length."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewise import arguments, checks

from .caches import Tokens, attend_cache, check_cache, check_lengths, check_new, check_rotary, check_served
from .flash_options import NO_WINDOW, as_flash_attn, asked_of, check_sink, rows

TABLE = "block_table"


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | torch.Tensor = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens over a KV cache, which first takes in their keys and values if they are given.

    q: (batch, seqlen_q, heads, head_dim). k_cache, v_cache: (sequences, capacity, heads_k, head_dim), or with
    block_table (batch, blocks a sequence) int32 the pages (blocks, page_size, heads_k, head_dim) of any size.
    k, v: (batch, seqlen_new, heads_k, head_dim), written into the caches *in place* from position cache_seqlens on.
    cache_seqlens: the tokens in the cache before the call, an int or (batch,) int32 or int64; None for all of it.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2), rotary_dim up to head_dim, with k and v: k turns by its
    positions cache_seqlens, cache_seqlens + 1, …; q by the same if causal or windowed, else all of it by cache_seqlens.
    rotary_interleaved: pairs of channels are 2i and 2i + 1, else i and i + rotary_dim / 2.
    cache_batch_idx: (batch,), the sequences of the cache that these are. cache_leftpad: (batch,), rows of the cache
    before a sequence's first key; positions count from row 0.
    num_splits: accepted; how the work is cut is Tilewise's matter. The other arguments as in `flash_attn_func`.

    On a GPU the values of tensors are not looked at. Rows of block_table beyond a sequence's length may be anything.
    Where capacity is not a multiple of 16, or with cache_leftpad, the cache is read row by row, which is slower.
    There is no backward pass.

    Returns out (batch, seqlen_q, heads, head_dim), with return_softmax_lse also the LSE (batch, heads, seqlen_q).
    """
    asked = asked_of(softmax_scale, causal, window_size, softcap)
    checks.flag("rotary_interleaved", rotary_interleaved)
    checks.flag("return_softmax_lse", return_softmax_lse)
    checks.integer("num_splits", num_splits, 0)
    queries = Tokens(rows("q", q, ("batch", "seqlen", "heads", "head_dim")))
    q = queries.x
    cache = check_cache(queries, k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table, TABLE)
    new = check_new(k, v, queries, cache)
    given = (k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes, learnable_sink)
    check_served("flash_attn_with_kvcache", q, v_cache, given)
    arguments.check_slopes(alibi_slopes, q.shape[0], q.shape[2], q.device)
    check_sink(learnable_sink, q)
    lengths = check_lengths(cache_seqlens, cache, q.shape[0], new, TABLE)
    tables = (rotary_cos, rotary_sin, rotary_interleaved)
    rotary = check_rotary(*tables, queries, new, lengths, cache.capacity)
    others = {"slopes": alibi_slopes, "sinks": learnable_sink}
    o, lse = attend_cache(queries, cache, new, lengths, rotary, asked, return_softmax_lse, others)
    return o if lse is None else (o, as_flash_attn(lse))
