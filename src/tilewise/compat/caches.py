"""A KV cache as flash_attn's calls bring it: checked, written to in place, and read as pages.

On a GPU nothing here waits for it, so the calls can be captured in a CUDA graph: lengths and tables are made on the
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
from tilewise.scores import ScoreOptions

from .flash_options import rows
from .inputs import Inputs, attend, sequence_of
from .rotary import check_positions, check_tables, turn

LARGEST_PAGE = 128  # of a contiguous cache: as many keys as the longest tile

Lengths = int | torch.Tensor


class Tokens(NamedTuple):
    """x (batch, count, heads, head_dim), or packed (total, heads, head_dim) with starts (batch + 1,)."""

    x: torch.Tensor
    starts: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        return self.x.shape[0] if self.starts is None else len(self.starts) - 1

    def sequences(self) -> torch.Tensor:
        """(batch, 1) or (total,) int64: the sequence of each token."""
        if self.starts is None:
            return torch.arange(self.x.shape[0], device=self.x.device)[:, None]
        return sequence_of(self.starts, self.x.shape[0])

    def positions(self, first: Lengths, together: bool = False) -> torch.Tensor:
        """(batch, count) or (total,) int64: where a sequence's tokens are, from position `first`, an int or (batch,),
        on; all of them at that one if together."""
        sequence = self.sequences()
        begin = first.long()[sequence] if isinstance(first, torch.Tensor) else first
        if together:
            return (sequence * 0 + begin).expand(self.x.shape[:-2])
        token = torch.arange(self.x.shape[-3], device=self.x.device)
        if self.starts is not None:
            token = token - self.starts.long()[sequence]
        return (begin + token).expand(self.x.shape[:-2])

    def counts(self) -> Lengths:
        """How many there are of each sequence."""
        return self.x.shape[1] if self.starts is None else self.starts.diff()


class Rotary(NamedTuple):
    """Tables (positions, rotary_dim / 2), how channels are paired, and the position of a sequence's first new token."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    first: Lengths

    def turned(self, name: str, tokens: Tokens, together: bool = False) -> Tokens:
        positions = tokens.positions(self.first, together)
        check_positions(name, self.cos, positions)
        return tokens._replace(x=turn(tokens.x, self.cos[positions], self.sin[positions], self.interleaved))


class Cache(NamedTuple):
    """Where the keys and values are.

    k, v: (sequences, capacity, heads_k, head_dim), or with table (batch, pages per sequence) the pages
    (pages, page_size, heads_k, head_dim); v's head_dim may be another. batch_idx: (batch,), which sequences of a
    contiguous cache; None for the first ones. leftpad: (batch,), rows before a sequence's first key, or None.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None
    batch_idx: torch.Tensor | None
    leftpad: torch.Tensor | None

    @property
    def capacity(self) -> int:
        """Of a sequence, in tokens."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    def put(self, k: Tokens, v: Tokens, positions: torch.Tensor) -> None:
        """Write the tokens at their positions."""
        sequence = k.sequences()
        if self.table is None:
            at, row = self.sequences(k.batch)[sequence], positions
        else:
            page_size = self.k.shape[1]
            at, row = self.table.long()[sequence, positions // page_size], positions % page_size
            # Indexing counts negative ones from the end: a table's −1 must fail, and not write into the last page.
            at = torch.where(at < 0, self.k.shape[0], at)
        self.k[at, row] = k.x
        self.v[at, row] = v.x

    def sequences(self, batch: int) -> torch.Tensor:
        """(batch,) int64: which of a contiguous cache."""
        return torch.arange(batch, device=self.k.device) if self.batch_idx is None else self.batch_idx.long()

    def inputs(self, q: Tokens, lengths: Lengths) -> Inputs:
        """The call that reads rows leftpad to lengths of each sequence: dense if they are all alike, else packed."""
        whole = self.table is self.batch_idx is self.leftpad is None
        if whole and isinstance(lengths, int) and q.starts is None:
            return Inputs(q.x, self.k[: q.batch, :lengths], self.v[: q.batch, :lengths])
        device = q.x.device
        if isinstance(lengths, int):
            lengths = torch.full((q.batch,), lengths, dtype=torch.int32, device=device)
        if self.leftpad is not None:
            lengths = lengths - self.leftpad
        starts_k = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        x, starts_q = q
        if starts_q is None:
            starts_q = torch.arange(q.batch + 1, dtype=torch.int32, device=device) * x.shape[1]
            x = x.flatten(0, 1)
        k, v, table = self._as_pages(q.batch)
        return Inputs(x, k, v, starts_q=starts_q, starts_k=starts_k, page_table=table)

    def _as_pages(self, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pages of k and of v, views of the cache's memory, and the table of them from each sequence's first key on."""
        if self.table is not None and self.leftpad is None:
            return self.k, self.v, self.table
        k, v = self.k, self.v
        apart = _apart(k)  # rows from one sequence's, or page's, first to the next one's
        if apart is None or apart != _apart(v):
            k, v, apart = k.contiguous(), v.contiguous(), k.shape[1]
        entries, rows_each = k.shape[:2]
        size = math.gcd(LARGEST_PAGE, apart, rows_each) if self.leftpad is None else 1
        if self.table is None:
            first = self.sequences(batch) * (apart // size)
            if self.leftpad is not None:
                first = first + self.leftpad
            table = first[:, None] + torch.arange(rows_each // size, device=k.device)
        else:
            assert self.leftpad is not None
            position = self.leftpad.long()[:, None] + torch.arange(self.capacity, device=k.device)
            page = self.table.long().gather(1, (position // rows_each).clamp_max(self.table.shape[1] - 1))
            table = page * apart + position % rows_each
        pages = ((entries - 1) * apart + rows_each) // size
        k, v = (x.as_strided((pages, size, *x.shape[2:]), (size * x.stride(1), *x.stride()[1:])) for x in (k, v))
        return k, v, table.int()


def _apart(x: torch.Tensor) -> int | None:
    """How many rows lie between the first ones of two entries of x (entries, rows, …); None if no whole number."""
    one, row = x.stride()[:2]
    return one // row if row and one % row == 0 else None


def attend_cache(
    q: Tokens,
    cache: Cache,
    new: tuple[Tokens, Tokens] | None,
    lengths: Lengths,
    rotary: Rotary | None,
    asked: ScoreOptions,
    return_lse: bool,
    others: dict[str, Any],
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Take in the new keys and values, if any, and attend over what then is in the cache.

    lengths: the tokens that are there before. others: fields of Inputs; rest: options of the public calls. Returns o,
    shaped as q, and the LSE (batch, heads, seqlen_q), of packed queries (heads, total_q), or None.
    """
    if new is not None:
        k, v = new
        positions = k.positions(lengths)
        if rotary is not None:
            together = not (asked.get("causal") or rest.get("chunk")) and asked.get("window") is None
            q, k = rotary.turned("rotary_cos", q, together), rotary.turned("rotary_cos", k)
        cache.put(k, v, positions)
        lengths = lengths + k.counts()
    inputs = cache.inputs(q, lengths)._replace(**others)
    if inputs.qv is not None and inputs.q.dim() < inputs.qv.dim():  # the queries of all sequences were put end to end
        inputs = inputs._replace(qv=inputs.qv.flatten(0, 1))
    o, lse = attend(inputs, asked, return_lse, **rest)
    o = o.view(*q.x.shape[:-1], o.shape[-1])
    if lse is not None and q.starts is None and inputs.starts_q is not None:
        lse = lse.view(q.x.shape[2], *q.x.shape[:2]).transpose(0, 1)
    return o, lse


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_cache(
    q: Tokens,
    k_cache: Any,
    v_cache: Any,
    batch_idx: Any,
    leftpad: Any,
    table: Any,
    table_name: str,
    dtypes: Sequence[torch.dtype] = checks.FLOATS,
) -> Cache:
    """The cache, its sequences in q's order. table_name: what the page table is called in the call; dtypes: of q."""
    batch, (heads, head_dim) = q.batch, q.x.shape[-2:]
    checks.not_float64("q", q.x)
    checks.tensor("q", q.x, dtypes=dtypes)
    lead = ("sequences", "capacity") if table is None else ("blocks", "page_size")
    same: dict[str, Any] = {"dtypes": (q.x.dtype,), "device": q.x.device, "unit_last_stride": True, "like": "q"}
    k_cache = checks.tensor("k_cache", k_cache, shape=(*lead, "heads", head_dim), **same)
    v_cache = checks.tensor("v_cache", v_cache, shape=(*k_cache.shape[:3], "head_dim"), **same)
    heads_k = checks.integer("heads of k_cache", k_cache.shape[2], 1)
    if heads == 0 or heads % heads_k:
        raise ValueError(f"q must have a multiple of k_cache's {heads_k} heads, got {heads}")
    checks.integer(f"{lead[1]} of k_cache", k_cache.shape[1], 1)
    if table is not None:
        table = rows(table_name, table, (batch if batch_idx is None else "sequences", "pages a sequence"))
        checks.tensor(table_name, table, dtypes=(torch.int32,), device=q.x.device)
    for name, given in (("cache_batch_idx", batch_idx), ("cache_leftpad", leftpad)):
        if given is not None:
            checks.tensor(name, given, shape=(batch,), dtypes=checks.INTEGERS, device=q.x.device)
    if batch_idx is not None:
        _check_values("cache_batch_idx", batch_idx, 0, (k_cache if table is None else table).shape[0] - 1)
    elif table is None:
        checks.integer("sequences of k_cache", k_cache.shape[0], batch)
    if table is not None and batch_idx is not None:
        table, batch_idx = table.index_select(0, batch_idx), None
    return Cache(k_cache, v_cache, table, batch_idx, leftpad)


def check_new(
    k: Any, v: Any, q: Tokens, cache: Cache, starts: torch.Tensor | None = None
) -> tuple[Tokens, Tokens] | None:
    """The new keys and values; starts: of packed ones."""
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, got only one of them")
    if k is None:
        return None
    lead = (q.batch, "seqlen_new") if starts is None else ("total_new",)
    k = rows("k", k, (*lead, *cache.k.shape[2:]))
    v = rows("v", v, (*k.shape[:-2], *cache.v.shape[2:]))
    for name, x in (("k", k), ("v", v)):
        checks.tensor(name, x, dtypes=(q.x.dtype,), device=q.x.device, like="q")
    if starts is not None:
        check_starts("cu_seqlens_k_new", starts, q.batch, k, "k", exact=True)
    return Tokens(k, starts), Tokens(v, starts)


def check_starts(name: str, starts: Any, batch: int | None, x: torch.Tensor, packed: str, exact: bool = False) -> int:
    """How many sequences of x `starts` has; exact: the last one ends where x does, else rows after it are nobody's."""
    shape = ("batch + 1",) if batch is None else (batch + 1,)
    starts = checks.tensor(name, starts, shape=shape, dtypes=checks.INTEGERS, device=x.device)
    if not len(starts):
        raise ValueError(f"{name} must start with 0, got no entries")
    total = len(x)
    if starts.device.type == "cpu" and not exact:
        total = min(total, int(starts[-1]))
    arguments.check_starts(name, starts, total, packed)
    return len(starts) - 1


def check_rotary(
    cos: Any, sin: Any, interleaved: bool, q: Tokens, new: tuple[Tokens, Tokens] | None, first: Lengths, least: int
) -> Rotary | None:
    """The tables, of at least so many positions; first: the position of a sequence's first new token."""
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together, got only one of them")
    if cos is None:
        return None
    if new is None:
        raise ValueError("rotary_cos and rotary_sin go with k and v, got no k")
    check_tables("rotary_cos", cos, "rotary_sin", sin, q.x)
    checks.integer("rows of rotary_cos", len(cos), least)
    return Rotary(cos, sin, interleaved, first)


def check_served(call: str, q: torch.Tensor, v: torch.Tensor, others: Sequence[Any]) -> None:
    """Refuse what the kernels do not serve now: later the cache would already be changed."""
    tensors = [x for x in others if isinstance(x, torch.Tensor)]
    if arguments.wants_gradients(q, *tensors):
        raise NotImplementedError(
            f"{call} has no backward pass, and an input requires gradients; call it under "
            "torch.no_grad(), or use flash_attn_func or flash_attn_varlen_func for training"
        )
    where = arguments.check_backend("auto", q, tensors)
    checks.head_dim("head_dim of q", q.shape[-1])
    if where != "cpu":
        calls.check_served(q, where, v)


def check_lengths(given: Any, cache: Cache, batch: int, new: tuple[Tokens, Tokens] | None, table_name: str) -> Lengths:
    """The tokens in the cache before new ones come to them: an int for all sequences alike, or (batch,)."""
    added = 0 if new is None else new[0].counts()
    on_cpu = cache.k.device.type == "cpu"
    counts = [added] * batch if isinstance(added, int) else added.tolist() if on_cpu else []
    room = cache.capacity - max(counts, default=0)
    if room < 0:
        raise ValueError(
            f"k must have at most as many tokens as the cache has room for, {cache.capacity}, got {max(counts)}"
        )
    if given is None and new is not None:
        raise ValueError("cache_seqlens must tell where k and v go in the cache, got None")
    hint = "" if cache.table is None else f"{table_name} has room for {cache.capacity} tokens of a sequence"
    lengths: Lengths
    if isinstance(given, torch.Tensor):
        lengths = checks.tensor("cache_seqlens", given, shape=(batch,), dtypes=checks.INTEGERS, device=cache.k.device)
    else:
        lengths = cache.capacity if given is None else checks.integer("cache_seqlens", given, 0, room, hint)
    if on_cpu:
        values = lengths.tolist() if isinstance(lengths, torch.Tensor) else [lengths] * batch
        for value, count in zip(values, counts, strict=True):
            checks.integer("cache_seqlens", value, 0, cache.capacity - count, hint)
        _check_pages(cache, [n + count for n, count in zip(values, counts, strict=True)], table_name)
        if cache.leftpad is not None:
            for pad, n in zip(cache.leftpad.tolist(), values, strict=True):
                checks.integer("cache_leftpad", pad, 0, n)
    return lengths


def _check_pages(cache: Cache, ends: Sequence[int], table_name: str) -> None:
    """The pages that hold each sequence's tokens, old and new, are there."""
    if cache.table is not None:
        pages, page_size = cache.k.shape[:2]
        for b, end in enumerate(ends):
            for page in cache.table[b, : -(-end // page_size)].tolist():
                checks.integer(f"{table_name}[{b}]", page, 0, pages - 1)


def _check_values(name: str, x: torch.Tensor, low: int, high: int) -> None:
    """On the CPU, where looking costs nothing."""
    if x.device.type == "cpu":
        for value in x.tolist():
            checks.integer(name, value, low, high)
