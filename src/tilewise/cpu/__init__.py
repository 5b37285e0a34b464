"""The CPU backend: walks a Plan with PyTorch ops.

The inner tile is torch's own flash kernel, which also returns the LSE; it knows neither soft-capping nor ALiBi, so
those run as float32 matmul tiles. Nothing here is ever larger than a tile's scores: SCORES_PER_TILE bounds them.

What this backend learned the hard way: fresh buffers of megabytes cost more than the copies into them (page faults),
so gathers reuse one workspace; a view costs nothing, so runs of consecutive pages and batches of equal tiles are
strided views; with few rows the query heads of a KV head are folded into rows, so K and V are read once for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tilewise.cpu.scoring import Places, Scoring, bias_and_mask, counted
from tilewise.plan.tiles import OPEN, Band, BlockTiles, DecodePlan, PagedTiles, Plan, Tiles, page_step
from tilewise.state import Accumulator

if TYPE_CHECKING:
    from tilewise.kvcache import PagedKVCache

SCORES_PER_TILE = 1 << 22  # float32 scores held at once by the matmul path, and mask values by the other: 16 MiB
FOLDED_ROWS = 256  # up to this many rows an item's query heads are folded into rows
GATHER_BYTES = 3 << 20  # K (and as much V) gathered at once for sparse tiles: stays in the caches
LOAD_BYTES = 32 << 20  # K (and as much V) turned to float32 at once from a paged cache of another format

KV = tuple[torch.Tensor, torch.Tensor]


def run(plan: Plan, q: torch.Tensor, sources: Sequence[KV], scoring: Scoring, out: torch.Tensor | None = None) -> KV:
    """Run a dense, packed, sparse or shared-prefix plan: o like q (in `out` if given), lse (rows, heads) float32.

    q (B, Nq, Hq, D) or (rows, Hq, D); each source k, v (B, Nk, Hkv, D) or (keys, Hkv, D).
    """
    whole = plan.work[0] if len(plan.work) == 1 else None
    if isinstance(whole, Tiles) and q.dim() == 4 and (whole.rows, whole.count) == (q.shape[1], q.shape[0]):
        o, lse = _regular_state(whole, q, *sources[whole.source], scoring)  # every row in one item: nothing to collect
        return o if out is None else out.copy_(o), lse.reshape(plan.rows, plan.heads_q)
    states = _accumulator(plan, q, out)
    for item in plan.work:
        if isinstance(item, Tiles):
            o, lse = _regular_state(item, q, *sources[item.source], scoring)
            into_o = _repeated(states.o, item.row, item.rows, item.count, item.row_step)
            into_lse = _repeated(states.lse[:, :, None], item.row, item.rows, item.count, item.row_step)[..., 0]
            states.put(into_o, into_lse, o, lse)
        elif isinstance(item, BlockTiles):
            _run_blocks(item, q, *sources[0], scoring, states)
        else:
            raise TypeError(f"a plan over tensors holds no {type(item).__name__}")
    return _finish(states, q, out)


def run_paged(
    plan: DecodePlan,
    q: torch.Tensor,
    cache: PagedKVCache,
    layer: int,
    scoring: Scoring,
) -> KV:
    """Run a decode plan: q (rows, Hq, D) in the plan's order -> o like q, lse (rows, Hq) float32."""
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
    o, lse = torch.zeros_like(q), torch.full((len(q), q.shape[2], tokens), -math.inf, device="cpu")
    rows = torch.arange(tokens, device="cpu")[None]
    selected = (bits[..., None] >> torch.arange(32, device="cpu") & 1).flatten(2)
    selected = (selected.bool() & (selected.cumsum(-1) <= plan.pages_per_seq)).expand(len(q), -1, -1)
    for n, seq in enumerate(plan.seqs):
        length = cache.length(seq)
        page = torch.arange(length, device="cpu") // cache.page_size  # of each token
        some = selected[n].any(0)
        held = some[page].nonzero()[:, 0]  # the positions of the tokens that are brought together
        pages = cache.page_list(seq)[some[: -(-length // cache.page_size)].numpy()]
        k, v = cache.load(layer, pages, 0, len(held), compute)
        band = OPEN if tokens == 1 else Band(None, length - tokens)
        for h in range(heads):
            its = selected[n, h, page[held]].nonzero()[:, 0]
            if not len(its):
                continue
            queries, kv_heads = slice(h * group, (h + 1) * group), slice(h, h + 1) if heads > 1 else slice(None)
            tile_q, tile_k, tile_v = q[n, :, queries].to(compute), k[its, kv_heads], v[its, kv_heads]
            places = Places(rows, held[None, its])
            state = tile_state(tile_q[None], tile_k[None], tile_v[None], scoring, band, places)
            o[n, :, queries], lse[n, queries] = state[0][0], state[1][0].transpose(0, 1)
    return o, lse


def _paged(plan: DecodePlan) -> list[PagedTiles]:
    return [item for item in plan.work if isinstance(item, PagedTiles)]


def _accumulator(plan: Plan, q: torch.Tensor, out: torch.Tensor | None, exclusive: bool | None = None) -> Accumulator:
    """States for the plan's rows; they lie in `out` itself where nothing has to be merged or converted."""
    packed = (plan.rows, plan.heads_q, plan.head_dim)
    exclusive = plan.exclusive if exclusive is None else exclusive
    o = out.view(packed) if exclusive and out is not None and out.is_contiguous() else None
    return Accumulator(packed, q.dtype if exclusive else torch.float32, exclusive=exclusive, o=o)


def _finish(states: Accumulator, q: torch.Tensor, out: torch.Tensor | None) -> KV:
    o = states.finish().view(q.shape)
    if out is None:
        return o.to(q.dtype), states.lse
    if out.data_ptr() != o.data_ptr():
        out.copy_(o)
    return out, states.lse


def _repeated(x: torch.Tensor, begin: int, rows: int, count: int, step: int) -> torch.Tensor:
    """`count` runs of `rows` packed rows, each `step` after the last, as a view (count, rows, heads, D).

    x (B, N, heads, D) with any strides, whose packed row is b · N + i, or (rows, heads, D). A run stays inside one
    sequence of a 4-D x, and a step either stays inside it too or is a whole number of sequences.
    """
    if x.dim() == 3:
        row_stride, head_stride, unit = x.stride()
        offset, step_stride = begin * row_stride, step * row_stride
    else:
        batch_stride, row_stride, head_stride, unit = x.stride()
        length = max(1, x.shape[1])
        offset = begin // length * batch_stride + begin % length * row_stride
        step_stride = step // length * batch_stride if step % length == 0 else step * row_stride
    size, stride = (count, rows, *x.shape[-2:]), (step_stride, row_stride, head_stride, unit)
    return x.as_strided(size, stride, x.storage_offset() + offset)


def _regular_state(item: Tiles, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> KV:
    """The state of a regular item: o (count, rows, heads, D), lse (count, rows, heads)."""
    if q.dim() == 4 and item.rows > q.shape[1]:  # rows of several sequences over one prefix: packed in the batch
        q = q.flatten(0, 1)
    tile_q = _repeated(q, item.row, item.rows, item.count, item.row_step)
    tile_k, tile_v = (_repeated(x, item.key, item.keys, item.count, item.key_step) for x in (k, v))
    places = None
    if scoring.alibi is not None:
        alibi = scoring.alibi
        members = [alibi.sequence(item.row + n * item.row_step) for n in range(item.count)]
        # Copies of a tile differ in sequence or run down one diagonal, so they all have the same distances.
        b = members[0]
        diagonal = (item.row - alibi.row_starts[b]) + alibi.diagonals[b] - (item.key - alibi.key_starts[b])
        places = counted(item.rows, item.keys, diagonal, alibi.slopes[members])
    return tile_state(tile_q, tile_k, tile_v, scoring, item.band, places)


def _run_blocks(
    item: BlockTiles, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, states: Accumulator
) -> None:
    """Gather each tile's key blocks into a small workspace and run them as a batch, one KV head at a time."""
    heads_q, heads_kv, head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
    group = heads_q // heads_kv
    tiles, width = item.blocks.shape
    keys = width * item.block + item.tail
    at_once = max(1, min(tiles, GATHER_BYTES // max(1, keys * head_dim * k.element_size())))
    work_k, work_v = (torch.empty(at_once, keys, head_dim, dtype=k.dtype, device="cpu") for _ in range(2))
    blocks, rows_at = torch.from_numpy(item.blocks).long(), torch.from_numpy(item.rows_at).long()
    band = item.band if item.masked else OPEN
    placed = item.masked or scoring.alibi is not None  # otherwise nobody asks where the keys stand

    kv_heads = range(heads_kv) if item.head is None else [item.head // group]
    for n in range(item.count):
        row, key = item.row + n * item.row_step, item.key + n * item.key_step
        one_k, one_v = (_repeated(x, key, item.seqlen_k, 1, 0)[0] for x in (k, v))  # (seqlen_k, heads_kv, D)
        seqlen_q = max(int(rows_at.max()) + item.rows, 1)
        one_q = _repeated(q, row, seqlen_q, 1, 0)[0]
        for kv_head in kv_heads:
            heads = slice(kv_head * group, (kv_head + 1) * group)
            if item.head is not None:
                heads = slice(item.head, item.head + 1)
            slopes, diagonal = None, 0
            if scoring.alibi is not None:
                b = scoring.alibi.sequence(row)
                slopes, diagonal = scoring.alibi.slopes[b : b + 1, heads], scoring.alibi.diagonals[b]
            for start in range(0, tiles, at_once):
                chunk = slice(start, min(start + at_once, tiles))
                size = chunk.stop - start
                tile_k, tile_v = work_k[:size], work_v[:size]
                _gather(one_k[:, kv_head], blocks[chunk], item, into=tile_k)
                _gather(one_v[:, kv_head], blocks[chunk], item, into=tile_v)
                tile_q = _tiles(one_q[:, heads], item, chunk)
                places = _block_places(item, blocks[chunk], rows_at[chunk], diagonal, slopes) if placed else None
                o, lse = tile_state(tile_q, tile_k[:, :, None], tile_v[:, :, None], scoring, band, places)
                _put_tiles(states.o[row : row + seqlen_q, heads], o, item, chunk)
                _put_tiles(states.lse[row : row + seqlen_q, heads], lse, item, chunk)


def _block_places(
    item: BlockTiles, blocks: torch.Tensor, rows_at: torch.Tensor, diagonal: int, slopes: torch.Tensor | None
) -> Places:
    """Where the rows and the gathered keys of some tiles stand in their sequence."""
    keys = (blocks[:, :, None] * item.block + torch.arange(item.block, device="cpu")).flatten(1)
    if item.tail:
        tail = torch.arange(item.seqlen_k - item.tail, item.seqlen_k, device="cpu").expand(len(keys), item.tail)
        keys = torch.cat((keys, tail), dim=1)
    return Places(rows_at[:, None] + torch.arange(item.rows, device="cpu"), keys, diagonal, slopes)


def _tiles(x: torch.Tensor, item: BlockTiles, chunk: slice) -> torch.Tensor:
    """The item's row tiles of one sequence's x (seqlen_q, heads, …) as (n, rows, heads, …): a view if they adjoin."""
    at = item.rows_at[chunk]
    if at[-1] - at[0] == (len(at) - 1) * item.rows:
        run: torch.Tensor = x[at[0] : at[-1] + item.rows].unflatten(0, (len(at), item.rows))
        return run
    # Several tiles are whole ones, so each starts at a multiple of its rows.
    whole: torch.Tensor = x[: x.shape[0] // item.rows * item.rows].unflatten(0, (-1, item.rows))
    return whole.index_select(0, torch.from_numpy(at // item.rows))


def _put_tiles(x: torch.Tensor, tiles: torch.Tensor, item: BlockTiles, chunk: slice) -> None:
    """The reverse of `_tiles`: write (n, rows, heads, …) to where the item's rows stand in x (seqlen_q, heads, …)."""
    at = item.rows_at[chunk]
    if at[-1] - at[0] == (len(at) - 1) * item.rows:
        x[at[0] : at[-1] + item.rows].unflatten(0, (len(at), item.rows)).copy_(tiles)
        return
    for start, tile in zip(at.tolist(), tiles, strict=True):
        x[start : start + item.rows] = tile


def _gather(x: torch.Tensor, blocks: torch.Tensor, item: BlockTiles, into: torch.Tensor) -> None:
    """Copy the blocks (n, c) of x (seqlen_k, D), and the tail if the item has one, into (n, c · block + tail, D)."""
    count = item.seqlen_k // item.block
    whole: torch.Tensor = x[: count * item.block].unflatten(0, (count, item.block))
    if not item.tail:
        torch.index_select(whole, 0, blocks.flatten(), out=into.view(-1, item.block, x.shape[1]))
        return
    into[:, : -item.tail] = whole[blocks].flatten(1, 2)
    into[:, -item.tail :] = x[-item.tail :]


def tile_state(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scoring: Scoring,
    band: Band = OPEN,
    places: Places | None = None,
) -> KV:
    """The state of n tiles: q (n, rows, Hq, D) over k, v (n, keys, Hkv, D) -> o (n, rows, Hq, D), lse (n, rows, Hq)."""
    n, rows, heads_q, _ = q.shape
    keys, heads_kv = k.shape[1:3]
    if scoring.needs_matmul:
        return _matmul_state(q, k, v, scoring, band, places or counted(rows, keys))
    group = heads_q // heads_kv
    fold = group > 1 and rows <= FOLDED_ROWS
    # The kernel hides before it scales, so only a positive scale leaves its triangle hidden.
    triangle = band == (None, 0) and places is None and scoring.scale > 0
    fold = fold and not triangle  # a triangle lets no NaN of a hidden key through; a mask would
    if band != OPEN and not triangle:
        places = places or counted(rows, keys)
        at_once = max(1, SCORES_PER_TILE // (places.rows.shape[0] * keys * (group if fold else 1)))
        if rows > at_once:  # too many mask values: row by row block
            parts = []
            for start in range(0, rows, at_once):
                part = Places(places.rows[:, start : start + at_once], places.keys)
                parts.append(tile_state(q[:, start : start + at_once], k, v, scoring, band, part))
            return torch.cat([o for o, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=1)
        seen = places.seen(band)
    else:
        seen = None

    if fold:
        # Rows (i, g) of a KV head: its K and V are read once for the whole group.
        folded = q.unflatten(2, (heads_kv, group)).transpose(1, 2).reshape(n, heads_kv, rows * group, -1)
        o, lse = _flash(folded, k, v, scoring, False, None if seen is None else seen.repeat_interleave(group, dim=1))
        o = o.unflatten(2, (rows, group)).transpose(1, 2).flatten(2, 3)
        return o, lse.unflatten(2, (rows, group)).transpose(1, 2).flatten(2, 3)
    if group == 1:
        o, lse = _flash(q.transpose(1, 2), k, v, scoring, triangle, seen)
        return o.transpose(1, 2), lse.transpose(1, 2)
    o_all, lse_all = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device="cpu")
    for g in range(group):
        o, lse = _flash(q[:, :, g::group].transpose(1, 2), k, v, scoring, triangle, seen)
        o_all[:, :, g::group], lse_all[:, :, g::group] = o.transpose(1, 2), lse.transpose(1, 2)
    return o_all, lse_all


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, triangle: bool, seen: torch.Tensor | None
) -> KV:
    """torch's CPU flash kernel: q (n, heads, rows, D), k and v (n, keys, heads, D) -> o (n, heads, rows, D), lse."""
    mask = None
    if seen is not None:
        mask = torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, -math.inf)[:, None]
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k.transpose(1, 2), v.transpose(1, 2), 0.0, triangle, attn_mask=mask, scale=scoring.scale
    )
    if seen is not None:  # the kernel leaves 0 as the LSE of a row with no visible key
        lse = lse.masked_fill(~seen.any(-1)[:, None], -math.inf)
    if (lse == 0).any():  # rare: the same where every score has overflowed to −inf
        lse = _empty_rows(q, k, o, lse, scoring, triangle, seen)
    return o, lse


def _empty_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    scoring: Scoring,
    triangle: bool,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    """lse with −inf where a row's visible scores are all −inf, which the kernel reports as o = 0, LSE = 0."""
    lse = lse.clone()
    for n, head, row in ((lse == 0) & (o == 0).all(-1)).nonzero().tolist():
        scores = k[n, :, head].float() @ q[n, head, row].float() * scoring.scale
        visible = scores[: row + 1] if triangle else scores if seen is None else scores[seen[n % len(seen), row]]
        if (visible == -math.inf).all():
            lse[n, head, row] = -math.inf
    return lse


def _matmul_state(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, band: Band, places: Places
) -> KV:
    """The same as `tile_state` by float32 matmuls, tile by tile, with soft-capping and ALiBi."""
    n, rows, heads_q, head_dim = q.shape
    keys, heads_kv = k.shape[1:3]
    tile_rows = min(rows, 128)
    tile_keys = max(1, min(keys, SCORES_PER_TILE // (heads_q * tile_rows)))
    o = torch.empty_like(q, dtype=torch.float32)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="cpu")
    for b in range(n):
        for i in range(0, rows, tile_rows):
            these = slice(i, min(i + tile_rows, rows))
            # (rows, heads, D) -> (kv heads, group · rows, D): one product a KV head
            q_i = q[b, these].float().unflatten(1, (heads_kv, -1)).permute(1, 2, 0, 3).flatten(1, 2)
            states = Accumulator((these.stop - i, heads_q, head_dim), torch.float32, exclusive=False)
            for j in range(0, keys, tile_keys):
                those = slice(j, min(j + tile_keys, keys))
                where = places.tile(b, these, those)
                cut = where.cut(band)
                if cut is None:  # the band hides all of it
                    continue
                k_j, v_j = (x[b, those].float().transpose(0, 1) for x in (k, v))
                s = (q_i @ k_j.mT).mul_(scoring.scale).view(heads_q, these.stop - i, -1)
                bias_and_mask(s, scoring, cut, where)
                top = s.amax(-1, keepdim=True)
                s.sub_(torch.where(top == -math.inf, 0.0, top)).exp_()
                total = s.sum(-1, keepdim=True)
                o_ij = (s.view(heads_kv, -1, s.shape[-1]) @ v_j).view(heads_q, -1, head_dim)
                o_ij /= torch.where(total == 0, 1.0, total)
                lse_ij = (top + total.log())[..., 0]
                states.put(states.o, states.lse, o_ij.transpose(0, 1), lse_ij.transpose(0, 1))
            o[b, these], lse[b, these] = states.o, states.lse
    return o.to(q.dtype), lse
