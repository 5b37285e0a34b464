"""The calls of DeepSeek's FlashMLA, decode and prefill: same names, arguments, defaults and shapes.

    from tilewise.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata  # was: from flash_mla import …
    from tilewise.compat.flash_mla import flash_mla_sparse_fwd

They attend over latent rows, `docs/guides/mla.md`: one KV head whose rows are keys, and whose first head_dim_v channels
are values. Sequences whose heads have keys and values of their own are flash_mla_varlen.py's. What differs:

- any number of heads and query tokens, pages of up to 256 tokens, head dimensions up to 576, float32 and float16 as
  well as bfloat16 are taken; `indices` go with plain rows too, and an FP8 cache without `indices`;
- an FP8 cache has rows of 656 bytes at (576, 512), or of the same kind at other sizes. DeepSeek-V4's rows of 584 bytes
  are not served;
- a plan of the work is made in the first call that is given a `FlashMLASchedMeta`, and kept in it for further layers
  with the same block_table and cache_seqlens. On a GPU that first call waits to read both;
- calls with `indices` wait for nothing. After a first one with as many query tokens, heads and indices, which makes a
  list of the work that further ones share, they can be captured in CUDA graphs;
- sequences whose block tables begin with the same pages share the reading of these;
- `flash_mla_sparse_fwd` computes `max_logits` when they are read.

A row with no visible key gives output 0 and, as in FlashMLA, an LSE of +inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewise import api, checks, graphs, state
from tilewise.api.rows import attend_rows, beyond, largest_logits
from tilewise.kvcache import PagedKVCache
from tilewise.kvcache.foreign import Names, check_shared, foreign_format, over_other_pages, take_pages
from tilewise.plan import DecodePlan

from .flash_mla_varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .flash_options import as_flash_attn
from .later import Later

NAMES = Names("k_cache", "block_table", "cache_seqlens", "head_dim_v")
__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


@dataclass(frozen=True)
class Config:
    """What calls that share a FlashMLASchedMeta have in common."""

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool
    is_fp8_kvcache: bool
    topk: int | None
    extra_page_block_size: int | None
    extra_topk: int | None


@dataclass
class FlashMLASchedMeta:
    """The plan of a decode step, empty until the first call that it is given to. Further calls with it are for layers
    of the same step: of the same shapes and options, lengths and block table."""

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None  # there; None here
    num_splits: torch.Tensor | None = None
    planned: Planned | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Planned:
    """A cache, a plan of it, and what both were made of."""

    cache: PagedKVCache
    plan: DecodePlan
    given: tuple[torch.Tensor, ...]
    versions: tuple[Any, ...]

    def holds(self, given: tuple[torch.Tensor, ...], k_cache: torch.Tensor) -> bool:
        same = len(given) == len(self.given) and all(x is y for x, y in zip(given, self.given, strict=True))
        return same and self.versions == _versions(given, k_cache)


def _versions(given: tuple[torch.Tensor, ...], k_cache: torch.Tensor) -> tuple[Any, ...]:
    return (*_written(given), tuple(k_cache.shape), k_cache.dtype)


def _written(given: Sequence[torch.Tensor | None]) -> tuple[int | None, ...]:
    """How often each was written. Of inference tensors, whose changes nobody counts, it is the caller's word that they
    are as they were."""
    return tuple(None if x is None or x.is_inference() else x._version for x in given)


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty FlashMLASchedMeta, and None. Arguments, which older versions had, are taken and left unread."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens, already in the cache, over latent rows.

    q: (batch, seqlen_q, heads, head_dim). k_cache: (blocks, page_size, 1, head_dim); with is_fp8_kvcache rows of bytes,
    (blocks, page_size, 1, 656) float8_e4m3fn or uint8. block_table: (batch, blocks a sequence) int32; cache_seqlens:
    (batch,) int32, both None with `indices`. head_dim_v: the channels of a row that are values.
    tile_scheduler_metadata: of `get_mla_metadata`; num_splits: None. softmax_scale: `head_dim ** -0.5` if None.
    causal: the queries are a sequence's last tokens, and each sees those up to itself; else all of them.
    indices: (batch, seqlen_q, n) int32, the rows that each query sees, as block · page_size + row in the block, −1 for
    none. extra_k_cache, extra_indices_in_kvcache: a second cache, and the rows of it that are seen as well.
    topk_length, extra_topk_length: (batch,), how many of a sequence's indices count; more than there are is all of
    them, and less than 0 none. attn_sink: (heads,) float32, a
    logit that joins the softmax's denominator of the output, not of the LSE.

    Returns out (batch, seqlen_q, heads, head_dim_v) and the LSE (batch, heads, seqlen_q) float32.
    """
    meta = tile_scheduler_metadata
    if not isinstance(meta, FlashMLASchedMeta):
        raise TypeError(f"tile_scheduler_metadata must come from get_mla_metadata, got {type(meta).__name__}")
    if num_splits is not None:
        raise ValueError(f"num_splits must be None, as get_mla_metadata gives it, got {num_splits!r}")
    checks.tensor("q", q, shape=("batch", "seqlen", "heads", "head_dim"), dtypes=checks.FLOATS)
    for name, size in zip(("seqlen of q", "heads of q"), q.shape[1:3], strict=True):
        checks.integer(name, size, 1)
    _check_rows("k_cache", k_cache, q, checks.flag("is_fp8_kvcache", is_fp8_kvcache))
    sparse = (attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length)
    if indices is None:
        _check_dense(sparse, block_table, cache_seqlens)
    elif checks.flag("causal", causal):
        raise ValueError("causal must be False with indices: they alone say what is seen")
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        raise ValueError("extra_k_cache and extra_indices_in_kvcache go together, got only one of them")
    if extra_k_cache is not None:
        _check_rows("extra_k_cache", extra_k_cache, q, is_fp8_kvcache)
    if attn_sink is not None:
        checks.tensor("attn_sink", attn_sink, shape=(q.shape[2],), dtypes=(torch.float32,), device=q.device)
    batch, tokens, heads = q.shape[:3]
    config = Config(
        batch, tokens, heads, k_cache.shape[1], k_cache.shape[2], causal, is_fp8_kvcache, _last(indices),
        None if extra_k_cache is None else extra_k_cache.shape[1], _last(extra_indices_in_kvcache),
    )  # fmt: skip
    if meta.config not in (None, config):
        raise ValueError(f"tile_scheduler_metadata was first given to a call of {meta.config}, got {config}")

    if indices is None:
        assert block_table is not None
        assert cache_seqlens is not None
        o, lse = _dense(q, k_cache, (block_table, cache_seqlens), head_dim_v, meta, softmax_scale, causal)
    else:
        o, lse = _listed(q, "", k_cache, indices, topk_length, head_dim_v, softmax_scale)
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            its = (q, "extra_", extra_k_cache, extra_indices_in_kvcache, extra_topk_length, head_dim_v, softmax_scale)
            o, lse = state.merge(o.float(), lse, *(x.float() for x in _listed(*its)))
        if attn_sink is not None:
            o, _ = state.add_sinks(o, lse, attn_sink)
        o = o.to(q.dtype)
    meta.have_initialized, meta.config = True, config
    return o, as_flash_attn(lse)


def _dense(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    given: tuple[torch.Tensor, torch.Tensor],
    value_dim: int,
    meta: FlashMLASchedMeta,
    scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (batch, tokens, heads, value_dim) and LSE (batch, heads, tokens) over the pages that a table names."""
    batch, tokens, heads, head_dim = q.shape
    if not causal:  # queries that see the same keys are no more than further heads
        q = q.reshape(batch, 1, tokens * heads, head_dim)
    known = meta.planned
    if known is None or not known.holds(given, k_cache) or known.cache.value_dim != value_dim:
        cache = _cache(k_cache, *given, value_dim, head_dim)
        plan = api.plan_decode(cache, list(range(batch)), num_heads=q.shape[2], tokens_per_seq=q.shape[1])
        known = Planned(cache, plan, given, _versions(given, k_cache))
    cache = over_other_pages(known.cache, k_cache)
    o, lse = api.decode(q, cache, 0, known.plan, scale=scale, return_lse=True)
    meta.planned = known
    if not causal:
        o = o.view(batch, tokens, heads, value_dim)
        lse = lse.view(batch, tokens, heads).transpose(1, 2)
    return o, lse


def _listed(
    q: torch.Tensor,
    kind: str,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor | None,
    value_dim: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over the rows that `indices` names, in blocks that follow each other. kind: "extra_" for the second
    cache, whose arguments' names begin so."""
    batch, tokens, heads, head_dim = q.shape
    cache_name, name = f"{kind}k_cache", "extra_indices_in_kvcache" if kind else "indices"
    checks.tensor("q", q, unit_last_stride=True)
    checks.tensor(cache_name, k_cache, unit_last_stride=True)
    checks.tensor(name, indices, shape=(batch, tokens, "n"), dtypes=(torch.int32,), device=q.device)
    form = foreign_format(cache_name, k_cache, checks.integer("head_dim_v", value_dim, 1), value_name="head_dim_v")
    check_shared(1, form.head_dim, value_dim, form.name, "head_dim_v")
    _check_width(cache_name, form.head_dim, head_dim, value_dim)
    try:
        rows = k_cache.view(-1, k_cache.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{cache_name} must have its tokens one after another in memory, got strides {k_cache.stride()} for shape "
            f"{tuple(k_cache.shape)}; use {cache_name}.contiguous()"
        ) from None
    if counts is not None:
        checks.tensor(f"{kind}topk_length", counts, shape=(batch,), dtypes=checks.INTEGERS, device=q.device)
        counts = counts[:, None].expand(batch, tokens)
    if indices.device.type == "cpu":
        its = indices if counts is None else indices.masked_fill(beyond(indices, counts), -1)
        wrong = ((its < -1) | (its >= len(rows))).nonzero()
        if len(wrong):
            at = wrong[0].tolist()
            raise ValueError(
                f"{name} must be positions of {len(rows)} rows, or -1 for none, got {int(indices[tuple(at)])} at {at}"
            )
    o, lse = attend_rows(
        q.flatten(0, 1), rows, form, indices.flatten(0, 1), None if counts is None else counts.flatten(),
        value_dim=value_dim, scale=scale,
    )  # fmt: skip
    return o.view(batch, tokens, heads, value_dim), lse.view(batch, tokens, heads).transpose(1, 2)


@graphs.outside
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of query tokens over the latent rows that each of them names: sparse prefill, absorbed.

    q: (s_q, h_q, d_qk). kv: (s_kv, 1, d_qk) like q. indices: (s_q, 1, topk) int32, the rows that each query token sees,
    in any order; a negative one and one of s_kv or more name none, and a row that is named twice counts twice. They
    alone say what is seen: causality is theirs. sm_scale: what scores are multiplied with. d_v: the channels of a row
    that are values. attn_sink: (h_q,) float32, a logit that joins the softmax's denominator of the output, not of
    max_logits and the LSE. topk_length: (s_q,) integers: of token i the first topk_length[i] indices count.

    Returns out (s_q, h_q, d_v) like q, max_logits and the LSE, both (s_q, h_q) float32: the largest scaled score of a
    row, and the natural log of the sum of their exponentials. A row that sees nothing has 0, −inf and +inf.

    max_logits is a tensor that is computed when it is first read, by torch's own products, and holds q, kv, indices and
    topk_length until then; if one of them was written in the meantime, reading it raises RuntimeError. Servers drop it,
    and the kernel does not know it: weights are taken against references that are near the largest score, so that
    most blocks need no maximum.

    On a GPU the lists of few tokens are cut among several multiprocessors. With more of them, one multiprocessor takes
    the list of a token and 64 heads, and its result has the same bits whatever s_q is.
    """
    checks.tensor("q", q, shape=("s_q", "h_q", "d_qk"), dtypes=checks.FLOATS, unit_last_stride=True)
    s_q, h_q, d_qk = q.shape
    checks.head_dim("d_qk", d_qk)
    row = ("s_kv", 1, d_qk)
    checks.tensor("kv", kv, shape=row, dtypes=(q.dtype,), device=q.device, unit_last_stride=True, like="q")
    checks.tensor("indices", indices, shape=(s_q, 1, "topk"), dtypes=(torch.int32,), device=q.device)
    checks.number("sm_scale", sm_scale)
    checks.integer("d_v", d_v, 1, d_qk)
    if attn_sink is not None:
        checks.tensor("attn_sink", attn_sink, shape=(h_q,), dtypes=(torch.float32,), device=q.device)
    if topk_length is not None:
        checks.tensor("topk_length", topk_length, shape=(s_q,), dtypes=checks.INTEGERS, device=q.device)
    rows, its, form = kv[:, 0], indices[:, 0], foreign_format("kv", kv[None], d_v)
    out, lse = attend_rows(q, rows, form, its, topk_length, value_dim=d_v, scale=sm_scale, folds=False)
    if attn_sink is not None:
        out *= state.beside_sinks(lse, attn_sink)[..., None]
    given = (q, kv, indices, topk_length)
    then = _written(given)

    def largest() -> torch.Tensor:
        if _written(given) != then:
            raise RuntimeError("max_logits must be read before q, kv, indices or topk_length are written again")
        return largest_logits(q.detach(), rows.detach(), its, topk_length, sm_scale)

    return out, Later(largest, (s_q, h_q), torch.float32, q.device), as_flash_attn(lse)


def _cache(
    k_cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, value_dim: int, head_dim: int
) -> PagedKVCache:
    cache = PagedKVCache.__new__(PagedKVCache)
    take_pages(cache, k_cache, None, table, lengths, checks.integer("head_dim_v", value_dim, 1), names=NAMES)
    _check_width("k_cache", cache.head_dim, head_dim, value_dim)
    return cache


def _check_width(name: str, row: int, head_dim: int, value_dim: int) -> None:
    if row != head_dim:
        raise ValueError(
            f"q must have the {row} channels that the rows of {name} have with head_dim_v {value_dim}, got {head_dim}"
        )


def _check_rows(name: str, x: Any, q: torch.Tensor, fp8: bool) -> None:
    bytes_ = (torch.float8_e4m3fn, torch.uint8)
    dtypes = bytes_ if fp8 else checks.FLOATS
    shape = ("blocks", "page_size", 1, "row" if fp8 else q.shape[-1])
    checks.tensor(name, x, shape=shape, dtypes=dtypes, device=q.device)
    if fp8 and x.shape[-1] == 584 and q.shape[-1] != 540:  # which has such rows by our own layout
        raise NotImplementedError(
            f"{name} has DeepSeek-V4's rows of 584 bytes, which are not served; use a bfloat16 cache"
        )


def _check_dense(sparse: tuple[Any, ...], block_table: Any, cache_seqlens: Any) -> None:
    names = ("attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
    for name, given in zip(names, sparse, strict=True):
        if given is not None:
            raise ValueError(f"{name} goes with indices, got none")
    for name, given in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if given is None:
            raise ValueError(f"{name} must be given without indices, got None")
        checks.tensor(name, given, dtypes=(torch.int32,))


def _last(indices: Any) -> int | None:
    return None if indices is None else checks.tensor("indices", indices).shape[-1]
