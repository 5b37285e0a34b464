"""The CPU backend: walks a Plan with PyTorch ops.

The inner tile (tiles.py) is torch's own flash kernel, which also returns the LSE. ALiBi goes through it as a mask that
is one line in memory (lines.py). It knows neither soft-capping nor score functions: those run as float32 products
(products.py). Nothing here is ever as large as all scores: MASK_VALUES and SCORES_PER_TILE bound what is held of them.
blocks.py runs block-sparse tiles, scoring.py says what happens to scores.

What this backend learned the hard way: fresh buffers of megabytes cost more than the copies into them (page faults),
so gathers reuse one workspace; a view costs nothing, so runs of consecutive pages and batches of equal tiles are
strided views; with few rows the query heads of a KV head are folded into rows, so K and V are read once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tilewise.cpu.blocks import run_blocks
from tilewise.cpu.lines import line_state
from tilewise.cpu.scoring import Scoring, View, count_up
from tilewise.cpu.tiles import KV as KV
from tilewise.cpu.tiles import repeated, tile_state
from tilewise.plan.step import ChunkPlan
from tilewise.plan.tiles import OPEN, Band, BlockTiles, DecodePlan, PagedTiles, Plan, Tiles, page_step
from tilewise.state import Accumulator

if TYPE_CHECKING:
    from tilewise.kvcache import PagedKVCache

LOAD_BYTES = 32 << 20  # K (and as much V) turned to float32 at once from a paged cache of another format


def run(plan: Plan, q: torch.Tensor, sources: Sequence[KV], scoring: Scoring, out: torch.Tensor | None = None) -> KV:
    """Run a dense, packed, sparse or shared-prefix plan: o (in `out` if given), lse (rows, heads) float32.

    q (B, Nq, Hq, D) or (rows, Hq, D); each source k (B, Nk, Hkv, D) or (keys, Hkv, D), v the same with Dv -> o as q is,
    with Dv.
    """
    whole = plan.work[0] if len(plan.work) == 1 else None
    if isinstance(whole, Tiles) and q.dim() == 4 and (whole.rows, whole.count) == (q.shape[1], q.shape[0]):
        o, lse = _regular_state(whole, q, *sources[whole.source], scoring)  # every row in one item: nothing to collect
        if out is None and o.shape[-1] != q.shape[-1]:
            o = o.contiguous()  # a part of wider rows
        return o if out is None else out.copy_(o), lse.reshape(plan.rows, plan.heads_q)
    states = _accumulator(plan, q, out)
    for item in plan.work:
        if isinstance(item, Tiles):
            o, lse = _regular_state(item, q, *sources[item.source], scoring)
            into_o = repeated(states.o, item.row, item.rows, item.count, item.row_step)
            into_lse = repeated(states.lse[:, :, None], item.row, item.rows, item.count, item.row_step)[..., 0]
            states.put(into_o, into_lse, o, lse)
        elif isinstance(item, BlockTiles):
            run_blocks(item, q, *sources[0], scoring, states)
        else:
            raise TypeError(f"a plan over tensors holds no {type(item).__name__}")
    return _finish(states, q, out)


def run_paged(
    plan: DecodePlan | ChunkPlan,
    q: torch.Tensor,
    cache: PagedKVCache,
    layer: int,
    scoring: Scoring,
) -> KV:
    """Run a plan over pages: q (rows, Hq, D) in the plan's order -> o (rows, Hq, Dv), lse (rows, Hq) float32."""
    stored = cache.format.dtype  # None for a quantised format
    compute = q.dtype if stored == q.dtype else torch.float32
    queries = q.to(compute)
    # Tokens that may be copied at once; consecutive pages of the right dtype are read where they lie, however many.
    at_once = max(1, LOAD_BYTES // (compute.itemsize * cache.num_kv_heads * cache.head_dim))
    pieces = [(item, at_once if stored != compute or page_step(item.pages) is None else None) for item in _paged(plan)]
    split = any(limit is not None and item.stop - item.start > limit for item, limit in pieces)
    states = _accumulator(plan, q, None, exclusive=plan.exclusive and not split)
    for item, limit in pieces:
        keys = item.stop - item.start
        tokens = keys if limit is None else min(keys, limit)
        tiles = len(item.pages) if limit is None else max(1, limit // keys)
        for n in range(0, len(item.pages), tiles):
            table = item.pages[n : n + tiles]
            first = item.row + n * item.rows
            rows = slice(first, first + len(table) * item.rows)
            tile_q = queries[rows].unflatten(0, (len(table), item.rows))
            into = [x[rows].unflatten(0, (len(table), item.rows)) for x in (states.o, states.lse)]
            offset = item.start % cache.page_size
            for start in range(0, keys, tokens):
                stop = min(keys, start + tokens)
                k, v = cache.load(layer, table, offset + start, offset + stop, compute)
                band = item.band.shifted(-start).opened(item.rows, stop - start)
                states.put(into[0], into[1], *tile_state(tile_q, k, v, scoring, band))
    return _finish(states, q, None)


def run_tree(
    q: torch.Tensor, cache: PagedKVCache, layer: int, seqs: Sequence[int], scoring: Scoring, tree: torch.Tensor
) -> KV:
    """Decode with a mask over the query tokens: q (n, T, Hq, D), tree (n, T, T) bool -> o like q, lse (n, Hq, T).

    Sequence by sequence in float32: trees of speculated tokens are small, and a CPU is not where they pay.
    """
    tokens, heads = q.shape[1:3]
    states = []
    for n, seq in enumerate(seqs):
        k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in cache.gather(layer, seq))
        s = scoring.cap(torch.einsum("thd,khd->htk", q[n].float(), k) * scoring.scale)
        hidden = torch.zeros(tokens, max(len(k), tokens), dtype=torch.bool)
        hidden[:, hidden.shape[1] - tokens + 1 :] = ~tree[n, :, 1:]
        s.masked_fill_(hidden[:, hidden.shape[1] - len(k) :], -torch.inf)
        lse = torch.logsumexp(s, -1) if len(k) else s.new_full(s.shape[:2], -torch.inf)
        weights = torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
        states.append((torch.einsum("htk,khd->thd", weights, v).to(q.dtype), lse))
    if not states:
        return torch.empty_like(q), q.new_empty((0, heads, tokens), dtype=torch.float32)
    return torch.stack([o for o, _ in states]), torch.stack([lse for _, lse in states])


def run_selected(
    q: torch.Tensor, cache: PagedKVCache, layer: int, plan: DecodePlan, scoring: Scoring, bits: torch.Tensor
) -> KV:
    """Decode over selected pages: q (n, T, Hq, D) in the order of plan.seqs -> o like q, lse (n, Hq, T).

    bits: int32 (n or 1, Hkv or 1, words), of which the first plan.pages_per_seq count. The pages that some head of a
    sequence reads are brought together once, and each head takes its own of them.
    """
    tokens, heads = q.shape[1], bits.shape[1]
    group = q.shape[2] // heads
    compute = q.dtype if cache.format.dtype == q.dtype else torch.float32
    selected = (bits[..., None] >> count_up(0, 32) & 1).flatten(2)
    selected = (selected.bool() & (selected.cumsum(-1) <= plan.pages_per_seq)).expand(len(q), -1, -1)
    o = torch.zeros_like(q)
    lse = torch.full((len(q), q.shape[2], tokens), -torch.inf, device="cpu")
    for n, seq in enumerate(plan.seqs):
        length, size = cache.length(seq), cache.page_size
        read = selected[n].repeat_interleave(size, 1)[:, :length]  # (heads, length)
        held = read.any(0).nonzero()[:, 0]  # the tokens that are brought together
        pages = cache.page_list(seq)[(held[held % size == 0] // size).numpy()]
        k, v = cache.load(layer, pages, 0, len(held), compute)
        view = View(count_up(0, tokens)[None], held[None].int(), Band(None, length - tokens))
        for h in range(heads):
            its = read[h, held].nonzero()[:, 0]
            if not len(its):
                continue
            queries, kv_heads = slice(h * group, (h + 1) * group), slice(h, h + 1) if heads > 1 else slice(None)
            tile_q = q[n : n + 1, :, queries].to(compute)
            seen = None if tokens == 1 else replace(view, keys=view.keys[:, its])
            state = tile_state(tile_q, k[None, its, kv_heads], v[None, its, kv_heads], scoring, view=seen)
            o[n, :, queries], lse[n, queries] = state[0][0], state[1][0].transpose(0, 1)
    return o, lse


def _paged(plan: Plan) -> list[PagedTiles]:
    return [item for item in plan.work if isinstance(item, PagedTiles)]


def _accumulator(plan: Plan, q: torch.Tensor, out: torch.Tensor | None, exclusive: bool | None = None) -> Accumulator:
    """States for the plan's rows; they lie in `out` itself where nothing has to be merged or converted."""
    packed = (plan.rows, plan.heads_q, plan.out_dim)
    exclusive = plan.exclusive if exclusive is None else exclusive
    o = out.view(packed) if exclusive and out is not None and out.is_contiguous() else None
    return Accumulator(packed, q.dtype if exclusive else torch.float32, exclusive=exclusive, o=o)


def _finish(states: Accumulator, q: torch.Tensor, out: torch.Tensor | None) -> KV:
    o = states.finish()
    o = o.view(*q.shape[:-1], o.shape[-1])
    if out is None:
        return o.to(q.dtype), states.lse
    if out.data_ptr() != o.data_ptr():
        out.copy_(o)
    return out, states.lse


def _sound(k: torch.Tensor) -> bool:
    """Are there no NaN and no infinities? Added to −inf, those of hidden keys would reach rows that do not see them."""
    return bool(k.sum(dtype=torch.float32).isfinite())


def _regular_state(item: Tiles, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> KV:
    """The state of a regular item: o (count, rows, heads, D), lse (count, rows, heads)."""
    if q.dim() == 4 and item.rows > q.shape[1]:  # rows of several sequences over one prefix: packed in the batch
        q = q.flatten(0, 1)
    tile_q = repeated(q, item.row, item.rows, item.count, item.row_step)
    tile_k, tile_v = (repeated(x, item.key, item.keys, item.count, item.key_step) for x in (k, v))
    if scoring.sequences is None:
        return tile_state(tile_q, tile_k, tile_v, scoring, item.band)
    starts = scoring.sequences
    members = [starts.of(item.row + n * item.row_step) for n in range(item.count)]
    rows = [item.row + n * item.row_step - starts.row_starts[b] for n, b in enumerate(members)]
    keys = [item.key + n * item.key_step - starts.key_starts[b] for n, b in enumerate(members)]
    # Of all: copies of a tile differ in sequence or run down one diagonal.
    if scoring.slopes is not None and not scoring.changes and (item.band == OPEN or _sound(tile_k)):
        origin = rows[0] + starts.diagonals[members[0]] - keys[0]
        slopes = scoring.slopes[members if len(set(members)) > 1 else members[:1]]
        return line_state(tile_q, tile_k, tile_v, scoring, slopes, origin, item.band)
    view = View(
        torch.tensor(rows, dtype=torch.int32, device="cpu")[:, None] + count_up(0, item.rows),
        torch.tensor(keys, dtype=torch.int32, device="cpu")[:, None] + count_up(0, item.keys),
        item.band.shifted(keys[0] - rows[0]),
        sequences=torch.tensor(members, dtype=torch.int32, device="cpu"),
        heads=count_up(0, q.shape[-2]),
        steady=True,
    )
    return tile_state(tile_q, tile_k, tile_v, scoring, view=view)
