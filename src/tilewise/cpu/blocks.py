"""Block-sparse tiles on the CPU: batches of equal ones, over keys that are read where they lie or gathered first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from tilewise.cpu.scoring import Scoring, View, count_up
from tilewise.cpu.tiles import KV, repeated, tile_state
from tilewise.plan.tiles import OPEN, BlockTiles, Ints
from tilewise.state import Accumulator

GATHER_BYTES = 3 << 20  # K (and as much V) gathered at once for sparse tiles: stays in the caches
WIDE = 256  # keys of a tile that are worth a call of their own, if that leaves them where they lie


class Batch(NamedTuple):
    """Some of an item's tiles, run in one call over the query heads [first, end) and the KV heads that they read.

    step: the keys of a tile lie side by side, so many after those of the last one; None: they have to be gathered.
    """

    tiles: slice
    heads: slice
    kv_heads: slice
    step: int | None


def run_blocks(
    item: BlockTiles, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, states: Accumulator
) -> None:
    """Put the item's states into `states`; q, k and v as `cpu.run` takes them."""
    batches = list(_batches(item, q.shape[-2], k.shape[-2], q.shape[-1] * k.element_size()))
    most = max((b.tiles.stop - b.tiles.start for b in batches if b.step is None), default=0)
    keys = item.blocks.shape[1] * item.block + item.tail
    # One KV head's keys and values of as many tiles as are gathered at once.
    space = [torch.empty(most, keys, q.shape[-1], dtype=k.dtype, device="cpu") for _ in range(2)]
    for n in range(item.count):
        row, key = item.row + n * item.row_step, item.key + n * item.key_step
        for batch in batches:
            at = item.rows_at[batch.tiles] + row
            if batch.step is None:
                tile_k, tile_v = (_gathered(x, key, item, batch, into) for x, into in zip((k, v), space, strict=True))
            else:
                first = key + _first_key(item, batch.tiles.start)
                tile_k, tile_v = (repeated(x, first, keys, len(at), batch.step)[:, :, batch.kv_heads] for x in (k, v))
            view = _view(item, batch, row, scoring)
            tile_q = _rows(q[..., batch.heads, :], at, item.rows)
            _put(states, at, batch.heads, *tile_state(tile_q, tile_k, tile_v, scoring, view=view))


def _batches(item: BlockTiles, heads_q: int, heads_kv: int, row_bytes: int) -> Iterator[Batch]:
    """The item cut into calls: all heads at once where keys stay where they lie, else one KV head at a time."""
    group = heads_q // heads_kv
    first, end = item.heads or (0, heads_q)
    kv_heads = range(first // group, -(-end // group))
    tiles, width = item.blocks.shape
    keys = width * item.block + item.tail
    at_once = max(1, min(tiles, GATHER_BYTES // max(1, keys * row_bytes)))
    runs = _side_by_side(item)
    if runs and (keys >= WIDE or len(runs) <= len(kv_heads) * -(-tiles // at_once)):
        for these, step in runs:
            yield Batch(these, slice(first, end), slice(kv_heads.start, kv_heads.stop), step)
        return
    for kv_head in kv_heads:
        heads = slice(max(first, kv_head * group), min(end, (kv_head + 1) * group))
        for start in range(0, tiles, at_once):
            yield Batch(slice(start, min(start + at_once, tiles)), heads, slice(kv_head, kv_head + 1), None)


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


def _view(item: BlockTiles, batch: Batch, row: int, scoring: Scoring) -> View | None:
    """Where the batch's rows and keys stand, and what they see; None if nobody asks."""
    if not (item.masked or item.partial or (scoring.needs_matmul and scoring.sequences is not None)):
        return None
    rows = torch.from_numpy(item.rows_at[batch.tiles])[:, None] + count_up(0, item.rows)
    blocks = torch.from_numpy(item.blocks[batch.tiles])
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
        count_up(batch.heads.start, batch.heads.stop),
    )


def _gathered(x: torch.Tensor, key: int, item: BlockTiles, batch: Batch, space: torch.Tensor) -> torch.Tensor:
    """The batch's key blocks, and the tail if the item has one, copied: (n, keys, 1, D), of one KV head."""
    one = repeated(x, key, item.seqlen_k, 1, 0)[0, :, batch.kv_heads.start]  # (seqlen_k, D)
    blocks = torch.from_numpy(item.blocks[batch.tiles]).long()
    into = space[: len(blocks)]
    count = item.seqlen_k // item.block
    whole: torch.Tensor = one[: count * item.block].unflatten(0, (count, item.block))
    if item.tail:
        into[:, : -item.tail] = whole[blocks].flatten(1, 2)
        into[:, -item.tail :] = one[-item.tail :]
    else:
        torch.index_select(whole, 0, blocks.flatten(), out=into.view(-1, item.block, one.shape[1]))
    return into[:, :, None]


def _step(at: Ints) -> int | None:
    """From each of these rows to the next, if that is always the same."""
    steps = np.diff(at)
    return 0 if not len(steps) else int(steps[0]) if (steps == steps[0]).all() else None


def _rows(q: torch.Tensor, at: Ints, rows: int) -> torch.Tensor:
    """Tiles of `rows` packed rows of q, from each of `at` on, as (n, rows, heads, D): a view if the steps are equal."""
    step = _step(at)
    if step is not None:
        return repeated(q, int(at[0]), rows, len(at), step)
    if q.dim() == 4:  # an item's rows are those of one sequence
        sequence = int(at[0]) // q.shape[1]
        q, at = q[sequence], at - sequence * q.shape[1]
    return q[torch.from_numpy(at).long()[:, None] + torch.arange(rows, device="cpu")]


def _put(states: Accumulator, at: Ints, heads: slice, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Add the states o (n, rows, heads, D), lse (n, rows, heads) to those of the packed rows from each of `at` on."""
    into_o, into_lse, rows, step = states.o[:, heads], states.lse[:, heads, None], o.shape[1], _step(at)
    if step is not None:
        places = (int(at[0]), rows, len(at), step)
        states.put(repeated(into_o, *places), repeated(into_lse, *places)[..., 0], o, lse)
        return
    for n, row in enumerate(at.tolist()):
        these = slice(row, row + rows)
        states.put(into_o[these], into_lse[these, :, 0], o[n], lse[n])
