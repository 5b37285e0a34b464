"""flash_attn_with_kvcache: append to a cache, turn by rotary tables, attend over each sequence's own length.

On a GPU nothing here waits for it, so the call can be captured in a CUDA graph: lengths and tables are made on the
device. A contiguous cache is read in place, as pages: the rows of all its sequences lie at one distance, so that a page
is a run of them, and the page table says where a sequence's runs begin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tilewise import arguments, checks
from tilewise.gpu import calls

from .flash_options import NO_WINDOW, as_flash_attn, asked_of, check_sink, rows
from .inputs import Inputs, attend
from .rotary import check_positions, check_tables, turn

LARGEST_PAGE = 128  # of a contiguous cache: as many keys as the longest tile

Lengths = int | torch.Tensor


class Cache(NamedTuple):
    """Where the keys and values are.

    k, v: (sequences, capacity, heads_k, head_dim), or with block_table (batch, blocks a sequence) the pages
    (blocks, page_size, heads_k, head_dim). batch_idx: (batch,), which sequences of k and v; None for the first ones.
    leftpad: (batch,), rows before a sequence's first key, or None.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor | None
    batch_idx: torch.Tensor | None
    leftpad: torch.Tensor | None

    @property
    def capacity(self) -> int:
        """Of a sequence, in tokens."""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    def put(self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
        """Write k, v (batch, new, heads_k, head_dim) at positions (batch, new)."""
        if self.block_table is None:
            at, row = self.sequences(positions.shape[0])[:, None], positions
        else:
            page_size = self.k.shape[1]
            at, row = self.block_table.long().gather(1, positions // page_size), positions % page_size
            # Indexing counts negative ones from the end: a table's −1 must fail, and not write into the last page.
            at = torch.where(at < 0, self.k.shape[0], at)
        self.k[at, row] = k
        self.v[at, row] = v

    def sequences(self, batch: int) -> torch.Tensor:
        """(batch,) int64: which of a contiguous cache."""
        return torch.arange(batch, device=self.k.device) if self.batch_idx is None else self.batch_idx.long()


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
    before a sequence's first key; positions count from row 0. Neither goes with a block_table.
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
    q = rows("q", q, ("batch", "seqlen", "heads", "head_dim"))
    cache = _check_cache(q, k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table)
    k, v = _check_new(k, v, q, cache)
    _check_served(q, (k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes, learnable_sink))
    arguments.check_slopes(alibi_slopes, q.shape[0], q.shape[2], q.device)
    check_sink(learnable_sink, q)
    lengths = _check_lengths(cache_seqlens, cache, q.shape[0], k)
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together, got only one of them")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos and rotary_sin go with k and v, got no k")

    if k is not None and v is not None:
        new = _positions(lengths, q, k.shape[1])
        if rotary_cos is not None and rotary_sin is not None:
            check_tables("rotary_cos", rotary_cos, "rotary_sin", rotary_sin, q)
            checks.integer("rows of rotary_cos", len(rotary_cos), cache.capacity)
            positions = _positions(lengths, q, q.shape[1] if asked["causal"] or asked["window"] is not None else 1)
            check_positions("rotary_cos", rotary_cos, positions)
            q = turn(q, rotary_cos[positions], rotary_sin[positions], rotary_interleaved)
            k = turn(k, rotary_cos[new], rotary_sin[new], rotary_interleaved)
        cache.put(k, v, new)
        lengths = lengths + k.shape[1]
    inputs = _inputs(q, cache, lengths)._replace(slopes=alibi_slopes, sinks=learnable_sink)
    o, lse = attend(inputs, asked, return_softmax_lse)
    if lse is None:
        return o.view(q.shape)
    if inputs.starts_q is not None:
        lse = lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1)
    return o.view(q.shape), as_flash_attn(lse)


def _positions(lengths: Lengths, q: torch.Tensor, count: int) -> torch.Tensor:
    """(batch, count) int64: each sequence's next positions."""
    steps = torch.arange(count, device=q.device)
    starts = lengths.long()[:, None] if isinstance(lengths, torch.Tensor) else lengths
    return (starts + steps).expand(q.shape[0], count)


def _inputs(q: torch.Tensor, cache: Cache, lengths: Lengths) -> Inputs:
    """The call that reads rows leftpad to lengths of each sequence: dense if they are all alike, else packed."""
    batch, seqlen_q = q.shape[:2]
    if isinstance(lengths, int) and cache.block_table is cache.batch_idx is cache.leftpad is None:
        return Inputs(q, cache.k[:batch, :lengths], cache.v[:batch, :lengths])
    if isinstance(lengths, int):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    if cache.leftpad is not None:
        lengths = lengths - cache.leftpad
    k, v, table = (cache.k, cache.v, cache.block_table) if cache.block_table is not None else _as_pages(cache, batch)
    starts_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    starts_k = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return Inputs(q.flatten(0, 1), k, v, starts_q=starts_q, starts_k=starts_k, page_table=table)


def _as_pages(cache: Cache, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A contiguous cache as pages of k and of v, views of its memory, and the table of them."""
    k, v = cache.k, cache.v
    if k.stride() != v.stride() or k.stride(1) == 0 or k.stride(0) % k.stride(1):
        k, v = k.contiguous(), v.contiguous()
    sequences, capacity, heads, head_dim = k.shape
    apart = k.stride(0) // k.stride(1)  # rows from one sequence's first to the next one's
    size = math.gcd(LARGEST_PAGE, apart, capacity) if cache.leftpad is None else 1
    pages = ((sequences - 1) * apart + capacity) // size
    shape, strides = (pages, size, heads, head_dim), (size * k.stride(1), *k.stride()[1:])
    first = cache.sequences(batch) * (apart // size)
    if cache.leftpad is not None:
        first = first + cache.leftpad
    table = first[:, None] + torch.arange(capacity // size, device=k.device)
    return k.as_strided(shape, strides), v.as_strided(shape, strides), table.int()


def _check_cache(q: torch.Tensor, k_cache: Any, v_cache: Any, batch_idx: Any, leftpad: Any, block_table: Any) -> Cache:
    batch, _, heads, head_dim = q.shape
    checks.not_float64("q", q)
    checks.tensor("q", q, dtypes=checks.FLOATS)
    lead = ("sequences", "capacity") if block_table is None else ("blocks", "page_size")
    same: dict[str, Any] = {"dtypes": (q.dtype,), "device": q.device, "unit_last_stride": True, "like": "q"}
    k_cache = checks.tensor("k_cache", k_cache, shape=(*lead, "heads", head_dim), **same)
    v_cache = checks.tensor("v_cache", v_cache, shape=tuple(k_cache.shape), **same)
    heads_k = checks.integer("heads of k_cache", k_cache.shape[2], 1)
    if heads == 0 or heads % heads_k:
        raise ValueError(f"q must have a multiple of k_cache's {heads_k} heads, got {heads}")
    checks.integer(f"{lead[1]} of k_cache", k_cache.shape[1], 1)
    if block_table is not None:
        for name, given in (("cache_batch_idx", batch_idx), ("cache_leftpad", leftpad)):
            if given is not None:
                raise NotImplementedError(
                    f"{name} does not go with a block_table; let the rows of block_table name the blocks of what is "
                    "wanted"
                )
        block_table = rows("block_table", block_table, (batch, "blocks a sequence"))
        checks.tensor("block_table", block_table, dtypes=(torch.int32,), device=q.device)
    for name, given in (("cache_batch_idx", batch_idx), ("cache_leftpad", leftpad)):
        if given is not None:
            checks.tensor(name, given, shape=(batch,), dtypes=checks.INTEGERS, device=q.device)
    if batch_idx is not None:
        _check_values("cache_batch_idx", batch_idx, 0, k_cache.shape[0] - 1)
    elif block_table is None:
        checks.integer("sequences of k_cache", k_cache.shape[0], batch)
    return Cache(k_cache, v_cache, block_table, batch_idx, leftpad)


def _check_new(k: Any, v: Any, q: torch.Tensor, cache: Cache) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, got only one of them")
    if k is None:
        return None, None
    k = rows("k", k, (q.shape[0], "seqlen_new", *cache.k.shape[2:]))
    v = rows("v", v, tuple(k.shape))
    for name, x in (("k", k), ("v", v)):
        checks.tensor(name, x, dtypes=(q.dtype,), device=q.device, like="q")
    return k, v


def _check_served(q: torch.Tensor, others: Sequence[Any]) -> None:
    """Refuse what the kernels do not serve now: later the cache would already be changed."""
    tensors = [x for x in others if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, *tensors)):
        raise NotImplementedError(
            "flash_attn_with_kvcache has no backward pass, and an input requires gradients; call it under "
            "torch.no_grad(), or use flash_attn_func or flash_attn_varlen_func for training"
        )
    where = arguments.check_backend("auto", q, tensors)
    checks.head_dim("head_dim of q", q.shape[-1])
    if where != "cpu":
        calls.check_served(q, where)


def _check_lengths(given: Any, cache: Cache, batch: int, k: torch.Tensor | None) -> Lengths:
    """The tokens in the cache before k comes to them: an int for all sequences alike, or (batch,)."""
    new = 0 if k is None else k.shape[1]
    room = cache.capacity - new
    if room < 0:
        raise ValueError(f"k must have at most as many tokens as the cache has room for, {cache.capacity}, got {new}")
    if given is None and k is not None:
        raise ValueError("cache_seqlens must tell where k and v go in the cache, got None")
    lengths: Lengths
    if isinstance(given, torch.Tensor):
        lengths = checks.tensor("cache_seqlens", given, shape=(batch,), dtypes=checks.INTEGERS, device=cache.k.device)
        _check_values("cache_seqlens", lengths, 0, room)
    else:
        lengths = cache.capacity if given is None else checks.integer("cache_seqlens", given, 0, room)
    if cache.k.device.type == "cpu":
        values = lengths.tolist() if isinstance(lengths, torch.Tensor) else [lengths] * batch
        _check_blocks(cache, [n + new for n in values])
        if cache.leftpad is not None:
            for pad, n in zip(cache.leftpad.tolist(), values, strict=True):
                checks.integer("cache_leftpad", pad, 0, n)
    return lengths


def _check_blocks(cache: Cache, ends: Sequence[int]) -> None:
    """The blocks that hold each sequence's tokens, old and new, are there."""
    if cache.block_table is not None:
        blocks, page_size = cache.k.shape[:2]
        for b, end in enumerate(ends):
            for block in cache.block_table[b, : -(-end // page_size)].tolist():
                checks.integer(f"block_table[{b}]", block, 0, blocks - 1)


def _check_values(name: str, x: torch.Tensor, low: int, high: int) -> None:
    """On the CPU, where looking costs nothing."""
    if x.device.type == "cpu":
        for value in x.tolist():
            checks.integer(name, value, low, high)
