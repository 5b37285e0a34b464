"""Block-sparse tiles on the CPU: batches of equal ones, over keys that are read where they lie or gathered first."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from tilewise.cpu.scoring import Scoring, View, count_up
from tilewise.cpu.tiles import repeated, tile_state
from tilewise.plan.tiles import OPEN, BlockTiles, Ints
from tilewise.state import Accumulator

GATHER_BYTES = 3 << 20  # K (and as much V) gathered at once for sparse tiles: stays in the caches
WIDE = 256  # keys of a tile that are worth a call of their own, if that leaves them where they lie


def run_blocks(
    item: BlockTiles, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, states: Accumulator
) -> None:
    """Put the item's states into `states`; q, k and v as `cpu.run` takes them."""
    group = q.shape[-2] // k.shape[-2]
    first, end = item.heads or (0, q.shape[-2])
    kv_heads = slice(first // group, -(-end // group))
    tiles, width = item.blocks.shape
    keys = width * item.block + item.tail
    at_once = max(1, min(tiles, GATHER_BYTES // max(1, keys * q.shape[-1] * k.element_size())))
    runs = _side_by_side(item)
    calls = (kv_heads.stop - kv_heads.start) * -(-tiles // at_once)  # that gathering would take
    if runs and (keys >= WIDE or len(runs) <= calls):
        shares, space = [kv_heads], None
    else:  # one KV head at a time, so that what is gathered stays in the caches
        runs = [(slice(start, min(start + at_once, tiles)), 0) for start in range(0, tiles, at_once)]
        shares = [slice(head, head + 1) for head in range(kv_heads.start, kv_heads.stop)]
        space = [torch.empty(at_once, keys, x.shape[-1], dtype=x.dtype, device="cpu") for x in (k, v)]
    # A head's keys stay in the caches from one run to the next; what rows see serves all heads, and is worth more.
    hidden = item.masked or item.partial
    order = list(product(runs, shares)) if hidden else [(run, share) for share in shares for run in runs]
    for n, ((these, step), share) in product(range(item.count), order):
        row, key = item.row + n * item.row_step, item.key + n * item.key_step
        if not hidden or share is shares[0]:
            view = blocks_view(item, these, row, first, end, scoring)
        heads = slice(max(first, share.start * group), min(end, share.stop * group))
        kv = (x[..., share, :] for x in (k, v))
        if space is None:
            place = (key + _first_key(item, these.start), keys, these.stop - these.start, step)
            tile_k, tile_v = (repeated(x, *place) for x in kv)
        else:
            blocks = torch.from_numpy(item.blocks[these]).long()
            tile_k, tile_v = (_gathered(x, key, item, blocks, into) for x, into in zip(kv, space, strict=True))
        here = None if view is None else view.of_heads(slice(heads.start - first, heads.stop - first), scoring)
        at = Rows.of(item.rows_at[these] + row, item.rows)
        o, lse = tile_state(at.of_q(q[..., heads, :]), tile_k, tile_v, scoring, view=here)
        at.put(states, heads, o, lse)


def _side_by_side(item: BlockTiles) -> list[tuple[slice, int]]:
    """Runs of tiles at equal steps in rows and in keys, with the latter; none if a tile's keys have a gap."""
    width = item.blocks.shape[1]
    if width and (item.blocks[:, -1] - item.blocks[:, 0] != width - 1).any():
        return []
    if width and item.tail and (item.blocks[:, -1] != item.seqlen_k // item.block - 1).any():
        return []
    keys = [_first_key(item, tile) for tile in range(len(item.blocks))]
    steps = list(zip(np.diff(item.rows_at).tolist(), np.diff(keys).tolist(), strict=True))
    runs, start = [], 0
    for tile in range(1, len(keys) + 1):
        # A run goes on while its step does; a step back begins another one, a view has no such steps.
        if tile == len(keys) or steps[tile - 1][1] < 0 or (tile - start > 1 and steps[tile - 1] != steps[start]):
            runs.append((slice(start, tile), steps[start][1] if tile - start > 1 else 0))
            start = tile
    return runs


def _first_key(item: BlockTiles, tile: int) -> int:
    return int(item.blocks[tile, 0]) * item.block if item.blocks.shape[1] else item.seqlen_k - item.tail


def blocks_view(item: BlockTiles, tiles: slice, row: int, first: int, end: int, scoring: Scoring) -> View | None:
    """Where the tiles' rows and keys stand, and what the query heads [first, end) see there; None if nobody asks."""
    if not (item.masked or item.partial or (scoring.asks_places and scoring.sequences is not None)):
        return None
    rows = torch.from_numpy(item.rows_at[tiles])[:, None] + count_up(0, item.rows)
    blocks = torch.from_numpy(item.blocks[tiles])
    keys = (blocks[:, :, None] * item.block + count_up(0, item.block)).flatten(1)
    if item.tail:
        tail = count_up(item.seqlen_k - item.tail, item.seqlen_k).expand(len(keys), item.tail)
        keys = torch.cat((keys, tail), dim=1)
    there = None
    if item.masked and item.lengths is not None:
        there = keys % item.block < torch.from_numpy(item.lengths)[keys // item.block]
    return View(
        rows,
        keys,
        item.band if item.masked else OPEN,
        scoring.function if item.partial else None,
        there,
        torch.tensor([0 if scoring.sequences is None else scoring.sequences.of(row)], dtype=torch.int32, device="cpu"),
        count_up(first, end),
    )


def _gathered(x: torch.Tensor, key: int, item: BlockTiles, blocks: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Tiles' key blocks (n, c), and the tail if the item has one, of the one head of x, copied: (n, keys, 1, D)."""
    one = repeated(x, key, item.seqlen_k, 1, 0)[0, :, 0]  # (seqlen_k, D)
    into, count = into[: len(blocks)], item.seqlen_k // item.block
    whole: torch.Tensor = one[: count * item.block].unflatten(0, (count, item.block))
    if item.tail:
        into[:, : -item.tail] = whole[blocks].flatten(1, 2)
        into[:, -item.tail :] = one[-item.tail :]
    else:
        torch.index_select(whole, 0, blocks.flatten(), out=into.view(-1, item.block, one.shape[1]))
    return into[:, :, None]


class Rows(NamedTuple):
    """Tiles of `rows` packed rows, from each of `at` on; step: from each to the next, None if that differs."""

    at: Ints
    rows: int
    step: int | None

    @classmethod
    def of(cls, at: Ints, rows: int) -> Rows:
        steps = at[1:] - at[:-1]
        return cls(at, rows, 0 if not len(steps) else int(steps[0]) if (steps == steps[0]).all() else None)

    def of_q(self, q: torch.Tensor) -> torch.Tensor:
        """(n, rows, heads, D), a view if the steps are equal. q: as `cpu.run` takes it."""
        if self.step is not None:
            return repeated(q, int(self.at[0]), self.rows, len(self.at), self.step)
        at = self.at
        if q.dim() == 4:  # an item's rows are those of one sequence
            sequence = int(at[0]) // q.shape[1]
            q, at = q[sequence], at - sequence * q.shape[1]
        index = torch.from_numpy(at)[:, None] + count_up(0, self.rows)
        picked: torch.Tensor = q.index_select(0, index.flatten()).unflatten(0, index.shape)
        return picked

    def put(self, states: Accumulator, heads: slice, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Add the states o (n, rows, heads, D), lse (n, rows, heads) to those of these rows."""
        into_o, into_lse = states.o[:, heads], states.lse[:, heads, None]
        if self.step is not None:
            place = (int(self.at[0]), self.rows, len(self.at), self.step)
            states.put(repeated(into_o, *place), repeated(into_lse, *place)[..., 0], o, lse)
            return
        for n, row in enumerate(self.at.tolist()):
            these = slice(row, row + self.rows)
            states.put(into_o[these], into_lse[these, :, 0], o[n], lse[n])
