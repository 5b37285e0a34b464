"""A block schedule as work: rows of key blocks that have the same shape run as one batch.

Blocks that the band hides wholly are dropped. Where a mask function lies beside the schedule, a row is cut in two: the
blocks in which every pair is seen, and those in which somebody has to be asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tilewise.plan.schedule_bits import unpack
from tilewise.plan.tiles import Band, BlockTiles, Ints

if TYPE_CHECKING:
    from tilewise.plan.schedule import BlockSchedule

Bools = npt.NDArray[np.bool_]


class Stretch(NamedTuple):
    """`count` sequences of the same lengths, one after the other: where the first starts in the packed count."""

    row: int
    key: int
    seqlen_q: int
    seqlen_k: int
    count: int = 1

    def only(self, b: int) -> Stretch:
        """Sequence b of them."""
        return self._replace(row=self.row + b * self.seqlen_q, key=self.key + b * self.seqlen_k, count=1)


def cut_schedule(
    schedule: BlockSchedule, band: Band, where: Stretch, heads_q: int, *, entry: int | None = None, mask: bool = False
) -> list[BlockTiles]:
    """The schedule's rows as batches of equal tiles.

    A schedule of a batch has a pattern for each of `where`'s sequences; entry: this one of them is it. mask: a mask
    function lies beside the schedule, which need not be asked in the blocks of its `whole` plane.
    """
    heads = schedule.heads or 1
    planes = (schedule.bits, schedule.bits if schedule.whole is None else schedule.whole)
    lengths = (schedule.lengths_q, schedule.lengths_k)
    batch = max(len(x) for x in (*planes, *lengths) if x is not None)
    work: list[BlockTiles] = []
    for b in range(batch) if entry is None else [entry]:
        one = where.only(b) if batch > 1 and entry is None else where
        length_q, length_k = (None if x is None else x[min(b, len(x) - 1)].numpy() for x in lengths)
        rows = _valid(schedule.block_q, one.seqlen_q, length_q)
        seen, cut = _under(band, schedule, one, rows, length_k)
        for head in range(heads):
            kept, whole = (unpack(x[min(b, len(x) - 1), head].numpy(), schedule.num_k_blocks) for x in planes)
            kept, whole = kept & seen, whole & ~cut
            of = None if heads == 1 else (head * heads_q // heads, (head + 1) * heads_q // heads)
            like = _Common(schedule.block_q, schedule.block_k, one, band, length_k, of)
            if mask:
                work += _batches(kept & whole, rows, cut, like) + _batches(kept & ~whole, rows, cut, like, True)
            else:
                work += _batches(kept, rows, cut, like)
    return work


def one_state_each(work: list[BlockTiles]) -> bool:
    """Is no row of a schedule's work in two items? Only a mask function cuts a row of blocks in two."""
    return len({item.partial for item in work}) < 2


def kept_blocks(schedule: BlockSchedule) -> torch.Tensor:
    """bool (batch or 1, heads or 1, num_q_blocks, num_k_blocks), of a schedule on the CPU."""
    bits = schedule.bits
    kept = unpack(bits.flatten(0, 2).numpy(), schedule.num_k_blocks)
    return torch.from_numpy(kept).view(*bits.shape[:3], schedule.num_k_blocks)


def _valid(block: int, seqlen: int, lengths: Ints | None) -> Ints:
    """(blocks,): how many rows, or keys, of each block there are."""
    sizes = np.minimum(block, seqlen - np.arange(0, seqlen, block, dtype=np.int64)).astype(np.int32)
    return sizes if lengths is None else np.clip(lengths, 0, sizes)


def _under(
    band: Band, schedule: BlockSchedule, where: Stretch, rows: Ints, lengths: Ints | None
) -> tuple[Bools, Bools]:
    """(num_q_blocks, num_k_blocks) each: the blocks in which a pair may be seen, and those in which one is hidden."""
    first_row = np.arange(0, where.seqlen_q, schedule.block_q, dtype=np.int64)[:, None]
    first_key = np.arange(0, where.seqlen_k, schedule.block_k, dtype=np.int64)
    keys = _valid(schedule.block_k, where.seqlen_k, lengths)
    last_row, last_key = first_row + rows[:, None] - 1, first_key + keys - 1
    seen = (rows[:, None] > 0) & (keys > 0)
    cut = np.zeros_like(seen) | (keys < _valid(schedule.block_k, where.seqlen_k, None))
    if band.low is not None:
        seen &= last_key >= first_row + band.low
        cut |= first_key < last_row + band.low
    if band.high is not None:
        seen &= first_key <= last_row + band.high
        cut |= last_key > first_row + band.high
    return seen, cut


class _Common(NamedTuple):
    """What all tiles of one head have in common; lengths and heads as BlockTiles has them."""

    block_q: int
    block_k: int
    where: Stretch
    band: Band
    lengths: Ints | None
    heads: tuple[int, int] | None


def _batches(kept: Bools, rows: Ints, cut: Bools, like: _Common, partial: bool = False) -> list[BlockTiles]:
    """One head's blocks, kept (num_q_blocks, num_k_blocks): the rows that have the same shape together."""
    where = like.where
    full_blocks, tail = divmod(where.seqlen_k, like.block_k)
    masked, tails = (kept & cut).any(1), kept[:, full_blocks:].any(1)
    widths = kept[:, :full_blocks].sum(1)
    blocks, ends = np.nonzero(kept[:, :full_blocks])[1].astype(np.int32), widths.cumsum()
    batches: dict[tuple[int, int, bool, bool], list[int]] = {}
    for tile in np.flatnonzero((widths > 0) | tails).tolist():
        shape = (int(rows[tile]), int(widths[tile]), bool(tails[tile]), bool(masked[tile]))
        batches.setdefault(shape, []).append(tile)
    return [
        BlockTiles(
            rows_at=np.array(tiles, np.int32) * like.block_q,
            rows=count,
            blocks=np.stack([blocks[ends[tile] - width : ends[tile]] for tile in tiles]),
            block=like.block_k,
            tail=tail if has_tail else 0,
            seqlen_k=where.seqlen_k,
            masked=is_masked,
            band=like.band,
            partial=partial,
            lengths=like.lengths,
            heads=like.heads,
            row=where.row,
            key=where.key,
            count=where.count,
            row_step=where.seqlen_q,
            key_step=where.seqlen_k,
        )
        for (count, width, has_tail, is_masked), tiles in batches.items()
    ]
