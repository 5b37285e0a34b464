"""The backward pass on the CPU: walks the plan that the forward walked, five products per tile instead of two.

With P = exp(S − LSE), O and the LSE from the forward, and delta = rowsum(dO ∘ O) − dLSE:

    dV += Pᵀ dO        dP = dO Vᵀ        dS = P ∘ (dP − delta)        dQ += dS K        dK += dSᵀ Q

dS goes through what was done to the scores. With dropout by the factors F: dV += (P ∘ F)ᵀ dO, dP = F ∘ dO Vᵀ. States
that were merged need nothing of their own: P is taken against the LSE of the whole row, so every tile gives its share.
Sums are float32. Tiles whose scores nothing changes go through torch's own flash backward, which takes the row's O and
LSE as they are, in float32; the others are float32 products over strips that stay in the caches. Nothing here is ever
as large as all scores. Every sum has its order: the same inputs give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from tilewise.cpu.blocks import blocks_view
from tilewise.cpu.products import Space
from tilewise.cpu.scoring import ALL, Scoring, View, count_up, counted
from tilewise.cpu.tiles import KV, MASK_VALUES, evened, far_apart
from tilewise.plan.tiles import OPEN, Band, BlockTiles, Plan, Tiles

FLASH_ROWS = 64  # fewer rows of a tile are worth no call of torch's flash backward per query head of a group


class Rows(NamedTuple):
    """Of some query rows, (rows, Hq, D), of o and dO (rows, Hq, Dv), or (rows, Hq): all that the backward needs."""

    q: torch.Tensor
    o: torch.Tensor
    d_o: torch.Tensor
    lse: torch.Tensor  # +inf in place of −inf: a row that sees no key has weights of 0
    d_lse: torch.Tensor | None
    d_q: torch.Tensor | None = None  # float32, added to

    @classmethod
    def of(
        cls, q: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, d_o: torch.Tensor | None, d_lse: torch.Tensor | None
    ) -> Rows:
        """q (rows, Hq, D); o, d_o (rows, Hq, Dv); lse, d_lse (rows, Hq) float32. A row that sees no key has none."""
        empty = lse == -math.inf
        d_o = torch.zeros_like(o) if d_o is None else d_o
        d_lse = None if d_lse is None else d_lse.masked_fill(empty, 0.0)
        return cls(q, o, d_o, lse.masked_fill(empty, math.inf), d_lse)

    @property
    def delta(self) -> torch.Tensor:
        """(rows, Hq) float32: what is taken from dP, the sum of P ∘ dP of a row, less the gradient of its LSE."""
        found = (self.d_o.float() * self.o.float()).sum(-1)
        return found if self.d_lse is None else found.sub_(self.d_lse)

    def part(self, rows: slice, heads: slice = ALL) -> Rows:
        q, o, d_o, lse = (x[rows, heads] for x in self[:4])
        d_lse, d_q = (None if x is None else x[rows, heads] for x in self[4:])
        return Rows(q, o, d_o, lse, d_lse, d_q)

    def with_d_q(self) -> Rows:
        """With zeros to add to."""
        return self._replace(d_q=torch.zeros(self.q.shape, dtype=torch.float32, device=self.q.device))

    def added(self) -> torch.Tensor:
        """d_q, which whoever walks a plan has made."""
        assert self.d_q is not None
        return self.d_q


class Keys(NamedTuple):
    """Some keys: K (keys, Hkv, D), V (keys, Hkv, Dv), and float32 sums of their gradients."""

    k: torch.Tensor
    v: torch.Tensor
    d_k: torch.Tensor
    d_v: torch.Tensor

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> Keys:
        return cls(k, v, *(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)))

    def part(self, keys: slice, heads: slice = ALL) -> Keys:
        return Keys(*(x[keys, heads] for x in self))


def tile_gradients(at: Rows, over: Keys, scoring: Scoring, band: Band = OPEN, view: View | None = None) -> None:
    """Add the gradients of one tile: rows `at` over the keys `over`, under the band or as `view` says."""
    rows, keys = len(at.q), len(over.k)
    triangle = is_triangle(band, scoring) and view is None
    if view is None and band != OPEN and not triangle:
        view = counted(rows, keys, band)
    if by_flash(at, scoring) and rows >= FLASH_ROWS and (view is None or view.pairs <= MASK_VALUES):
        bias = None if view is None or not view.hides else view.bias
        given = [x.transpose(0, 1)[None] for x in (at.q, over.k, over.v, at.o, at.d_o, at.lse)]
        d_q, d_k, d_v = (x[0].transpose(0, 1) for x in _flash_gradients(given, scoring.scale, triangle, bias))
        at.added().add_(d_q)
        over.d_k.add_(d_k)
        over.d_v.add_(d_v)
        return
    if triangle:
        view = counted(rows, keys, band)
    product_gradients(at, over, scoring, view)


def by_flash(at: Rows, scoring: Scoring) -> bool:
    """Does torch's flash backward know all that is asked for? It knows no gradient of the LSE, and one head
    dimension."""
    return at.d_lse is None and not scoring.needs_products and not far_apart(at.q.shape[-1], at.o.shape[-1])


def is_triangle(band: Band, scoring: Scoring) -> bool:
    """Is it what torch's kernel calls causal? That goes wrong with a negative scale."""
    return band == (None, 0) and scoring.scale > 0


def _flash_gradients(
    tensors: Sequence[torch.Tensor], scale: float, triangle: bool, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK, dV of q, k, v in float32, by one call of torch's CPU kernel.

    tensors: q (n, Hq, rows, D), k (n, Hkv, keys, D), v (n, Hkv, keys, Dv), o, d_o (n, Hq, rows, Dv), lse (n, Hq, rows).
    The kernel gets float32 whatever they are: of 16 bits it takes 2.5 times as long on a CPU that multiplies float32.
    """
    head_dim, value_dim = tensors[0].shape[-1], tensors[2].shape[-1]
    q, k, v, o, d_o = evened(*(x.float() for x in tensors[:5]))
    lse = tensors[5].float()
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_o, q, k, v, o, lse.contiguous(), 0.0, triangle, attn_mask=bias, scale=scale
    )
    if group > 1:
        d_k, d_v = (x.unflatten(1, (heads, group)).sum(2) for x in (d_k, d_v))
    return d_q[..., :head_dim], d_k[..., :head_dim], d_v[..., :value_dim]


def product_gradients(at: Rows, over: Keys, scoring: Scoring, view: View | None) -> None:
    """Add the gradients of one tile by float32 products over strips of rows and keys, on any device."""
    rows, heads_q, _ = at.q.shape
    heads_kv = over.k.shape[1]
    group = heads_q // heads_kv
    space = Space.of(
        rows, group, (over.k if at.q.shape[-1] > over.v.shape[-1] else over.v)[None], scoring.scored, kept=False
    )
    for head, row in product(range(0, heads_kv, space.heads), range(0, rows, space.rows)):
        kv = slice(head, min(head + space.heads, heads_kv))
        heads, strip = slice(kv.start * group, kv.stop * group), slice(row, min(row + space.rows, rows))
        here = None if view is None else view.part(ALL, strip, ALL, heads)
        _strip_gradients(at.part(strip, heads), over.part(ALL, kv), scoring, here, space)


def _strip_gradients(at: Rows, over: Keys, scoring: Scoring, view: View | None, space: Space) -> None:
    rows, heads, _ = at.q.shape
    kv_heads = over.k.shape[1]

    def by_kv_head(x: torch.Tensor) -> torch.Tensor:
        """(rows, heads, …) -> (KV heads, group · rows, …): one product per KV head."""
        wide: torch.Tensor = x.float().unflatten(1, (kv_heads, -1))
        return wide.movedim(0, 2).flatten(1, 2)

    q, d_o = by_kv_head(at.q), by_kv_head(at.d_o)
    lse, delta = (x.transpose(0, 1)[..., None] for x in (at.lse, at.delta))  # (heads, rows, 1)
    d_q = torch.zeros_like(q)
    keys = slice(0, len(over.k)) if view is None else view.span()
    for j in range(keys.start, keys.stop, space.keys):
        those = slice(j, min(j + space.keys, keys.stop))
        here = None if view is None else view.part(ALL, keys=those).cut()
        if view is not None and here is None:  # the band hides all of it
            continue
        part = over.part(those)
        k, v = (x.float().transpose(0, 1) for x in part[:2])  # (KV heads, keys, D)
        s = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=scoring.alpha)
        scored, chain = scoring.with_derivative(s.view(heads, rows, -1), here)
        if here is not None and here.hides:
            here.hide(scored)
        p = scored.sub_(lse).exp_()
        d_p = (d_o @ v.mT).view(p.shape)
        dropped = p
        if scoring.dropout is not None and here is not None:
            factors = scoring.dropout.factors(*here.indices())
            dropped = p * factors
            d_p.mul_(factors)
        part.d_v.add_((dropped.view(s.shape).mT @ d_o).transpose(0, 1))
        d_s = chain(d_p.sub_(delta).mul_(p)).view(s.shape)
        d_q.baddbmm_(d_s, k, alpha=scoring.scale)
        part.d_k.add_((d_s.mT @ q).transpose(0, 1), alpha=scoring.scale)
    at.added().add_(d_q.unflatten(1, (-1, rows)).movedim(2, 0).flatten(1, 2))


def of_sinks(sinks: torch.Tensor | None, rows: Rows) -> torch.Tensor | None:
    """(Hq,) float32. A sink is one more key of every row, whose value is 0: dP = 0."""
    return None if sinks is None else -(torch.exp(sinks.float() - rows.lse) * rows.delta).sum(0)


def by_rows(given: Any) -> Any:
    """o and lse, or their gradients, dense or packed, as (rows, Hq, Dv) and (rows, Hq)."""
    o, lse = given
    if o is not None:
        o = o.reshape(-1, *o.shape[-2:])
    if lse is not None:
        lse = lse.transpose(-1, -2).reshape(-1, lse.shape[-2])
    return o, lse


# ---- plans -----------------------------------------------------------------------------------------------------------


def gradients(plan: Plan, at: Rows, sources: Sequence[KV], scoring: Scoring) -> tuple[torch.Tensor, list[KV]]:
    """Walk a dense, packed, sparse or shared-prefix plan: dQ (rows, Hq, D), and (dK, dV) of each source, float32.

    at: the plan's rows, packed. Each source k, v (B, Nk, Hkv, D or Dv) or (keys, Hkv, D or Dv); dK, dV are like them.
    """
    if by_flash(at, scoring) and (batch := _one_batch(plan, sources, scoring)):
        k, v = sources[0]
        given = [x.reshape(batch, -1, *x.shape[-2:]).transpose(1, 2) for x in (at.q, k, v, at.o, at.d_o)]
        given.append(at.lse.view(batch, -1, at.lse.shape[1]).transpose(1, 2))
        triangle = plan.work[0].band != OPEN
        d_q, d_k, d_v = (x.transpose(1, 2) for x in _flash_gradients(given, scoring.scale, triangle))
        return d_q.reshape(at.q.shape), [(d_k.reshape(k.shape), d_v.reshape(v.shape))]
    at = at.with_d_q()
    every = [Keys.of(*(x.reshape(-1, *x.shape[-2:]) for x in source)) for source in sources]
    for item in plan.work:
        if isinstance(item, Tiles):
            for n in range(item.count):
                row, key = item.row + n * item.row_step, item.key + n * item.key_step
                over = every[item.source].part(slice(key, key + item.keys))
                view = _regular_view(item, row, key, scoring, plan.heads_q)
                tile_gradients(at.part(slice(row, row + item.rows)), over, scoring, item.band, view)
        elif isinstance(item, BlockTiles):
            _block_gradients(item, at, every[0], scoring)
        else:
            raise TypeError(f"a plan over tensors holds no {type(item).__name__}")
    of_sources = zip(every, sources, strict=True)
    return at.added(), [(keys.d_k.view(k.shape), keys.d_v.view(v.shape)) for keys, (k, v) in of_sources]


def _one_batch(plan: Plan, sources: Sequence[KV], scoring: Scoring) -> int:
    """How many equal tiles the plan is if they cover all rows and all keys once, and torch's kernel knows their band;
    otherwise 0."""
    item = plan.work[0] if len(plan.work) == len(sources) == 1 else None
    if not isinstance(item, Tiles) or not (item.band == OPEN or is_triangle(item.band, scoring)):
        return 0
    steps = item.count == 1 or (item.row_step, item.key_step) == (item.rows, item.keys)
    keys = math.prod(sources[0][0].shape[:-2])
    covers = (item.row, item.key, item.rows * item.count, item.keys * item.count) == (0, 0, plan.rows, keys)
    return item.count if steps and covers and item.rows >= FLASH_ROWS else 0


def _regular_view(item: Tiles, row: int, key: int, scoring: Scoring, heads: int) -> View | None:
    """Where the rows and keys of a regular tile stand in their sequence; None if nobody asks."""
    starts = scoring.sequences
    if starts is None or not scoring.asks_places:
        return None
    b = starts.of(row)
    row, key = row - starts.row_starts[b], key - starts.key_starts[b]
    return View(
        count_up(row, row + item.rows)[None],
        count_up(key, key + item.keys)[None],
        item.band.shifted(key - row),
        sequences=torch.tensor([b], dtype=torch.int32),
        heads=count_up(0, heads),
        steady=True,
    )


def _block_gradients(item: BlockTiles, at: Rows, over: Keys, scoring: Scoring) -> None:
    """Tile by tile, over keys that are gathered and whose gradients are added back."""
    group = at.q.shape[1] // over.k.shape[1]
    first, end = item.heads or (0, at.q.shape[1])
    # Heads of a KV head that have other blocks are another item's: then one KV head at a time.
    whole = first % group == 0 and end % group == 0
    shares = [slice(first // group, -(-end // group))]
    if not whole:
        shares = [slice(h, h + 1) for h in range(shares[0].start, shares[0].stop)]
    for n, tile in product(range(item.count), range(len(item.blocks))):
        row, key = item.row + n * item.row_step, item.key + n * item.key_step
        index = key + _block_keys(item, tile)
        view = blocks_view(item, slice(tile, tile + 1), row, first, end, scoring)
        start = row + int(item.rows_at[tile])
        for share in shares:
            heads = slice(max(first, share.start * group), min(end, share.stop * group))
            keys = Keys.of(over.k[index, share], over.v[index, share])
            here = None if view is None else view.part(ALL, heads=slice(heads.start - first, heads.stop - first))
            tile_gradients(at.part(slice(start, start + item.rows), heads), keys, scoring, OPEN, here)
            over.d_k[:, share].index_add_(0, index, keys.d_k)
            over.d_v[:, share].index_add_(0, index, keys.d_v)


def _block_keys(item: BlockTiles, tile: int) -> torch.Tensor:
    """The keys of a tile, counted in its sequence."""
    blocks = torch.from_numpy(item.blocks[tile]).long()
    keys = (blocks[:, None] * item.block + torch.arange(item.block)).flatten()
    return torch.cat([keys, torch.arange(item.seqlen_k - item.tail, item.seqlen_k)])
