"""A block schedule as work: rows of key blocks that have the same shape run as one batch.

Blocks that the band hides wholly are dropped. Where there is a mask function, a row is cut in two: the blocks in which
every pair is seen, and those in which somebody has to be asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tilewise.plan.schedule import BlockSchedule
from tilewise.plan.schedule_bits import unpack
from tilewise.plan.tiles import Band, BlockTiles, Ints

Bools = npt.NDArray[np.bool_]
TALL = 1024  # rows from which on torch's kernel gains nothing from more
WORTH_A_STATE = 256  # keys that are worth a state of their own, which has to be merged


class Stretch(NamedTuple):
    """`copies` sequences of the same lengths, one after the other: where the first starts in the packed count."""

    row: int
    key: int
    seqlen_q: int
    seqlen_k: int
    copies: int = 1

    def only(self, b: int) -> Stretch:
        """Sequence b of them."""
        return self._replace(row=self.row + b * self.seqlen_q, key=self.key + b * self.seqlen_k, copies=1)


@dataclass(frozen=True)
class Kinds:
    """What is seen of each block, by a mask function and by the schedule beside it.

    kinds: int8 (batch or 1, heads or 1, num_q_blocks, num_k_blocks): 0 nothing, 1 what the function says, 2 all of it.
    lengths_q, lengths_k: as a schedule has them. Blocks may be of any size.
    """

    kinds: npt.NDArray[np.int8]
    block_q: int
    block_k: int
    lengths_q: torch.Tensor | None = None
    lengths_k: torch.Tensor | None = None


def cut_schedule(
    schedule: BlockSchedule | Kinds, band: Band, where: Stretch, heads_q: int, entry: int | None = None
) -> tuple[list[BlockTiles], bool]:
    """The schedule's rows as batches of equal tiles, and whether no row is in two of them.

    A schedule of a batch has a pattern for each of `where`'s sequences; entry: this one of them is it.
    """
    shape = schedule.kinds.shape if isinstance(schedule, Kinds) else schedule.bits.shape
    (batch, heads), lengths = shape[:2], (schedule.lengths_q, schedule.lengths_k)
    work: list[BlockTiles] = []
    exclusive = True
    for b in range(batch) if entry is None else [entry]:
        one = where.only(b) if batch > 1 and entry is None else where
        length_q, length_k = (None if x is None else x[min(b, len(x) - 1)].numpy() for x in lengths)
        rows = _valid(schedule.block_q, one.seqlen_q, length_q)
        seen, cut = _under(band, schedule, one, rows, length_k)
        for head in range(heads):
            of = None if heads == 1 else (head * heads_q // heads, (head + 1) * heads_q // heads)
            like = _Common(schedule.block_q, schedule.block_k, one, band, length_k, of, length_q is None)
            if isinstance(schedule, BlockSchedule):
                kept = unpack(schedule.bits[min(b, shape[0] - 1), head].numpy(), schedule.num_k_blocks) & seen
                work += _batches(kept, rows, cut, like)
                continue
            kinds = schedule.kinds[min(b, shape[0] - 1), head]
            tiles, alone = _asked_apart((kinds > 0) & seen, (kinds == 2) & seen & ~cut, rows, cut, like)
            exclusive = exclusive and alone
            work += tiles
    return work, exclusive


def _valid(block: int, seqlen: int, lengths: Ints | None) -> Ints:
    """(blocks,): how many rows, or keys, of each block there are."""
    sizes = np.minimum(block, seqlen - np.arange(0, seqlen, block, dtype=np.int64)).astype(np.int32)
    return sizes if lengths is None else np.clip(lengths, 0, sizes)


def _under(
    band: Band, schedule: BlockSchedule | Kinds, where: Stretch, rows: Ints, lengths: Ints | None
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


def _asked_apart(kept: Bools, whole: Bools, rows: Ints, cut: Bools, like: _Common) -> tuple[list[BlockTiles], bool]:
    """One head's blocks: those of which all is seen, in tiles as tall as they have them in common, and the others.

    Also: is no row in two tiles?
    """
    work: list[BlockTiles] = []
    asked, times = kept.copy(), np.zeros(len(kept), np.int64)
    count = TALL // like.block_q if like.whole_rows else 1
    while count:
        # (groups of `count` rows of blocks, num_k_blocks): what all of a group see; the last may have fewer rows
        starts = np.arange(0, len(kept), count)
        common = np.logical_and.reduceat(whole & asked, starts, axis=0)
        common &= (common.sum(1) * like.block_k >= WORTH_A_STATE)[:, None]
        if common.any():
            work += _batches(common, np.add.reduceat(rows, starts), np.zeros_like(common), like.taller(count))
            taken = np.repeat(common, count, axis=0)[: len(kept)]
            asked &= ~taken
            times += taken.any(1)
        count //= 2
    unsure = (asked & ~whole).any(1, keepdims=True)  # rows that have somebody to ask
    work += _batches(asked & ~unsure, rows, cut, like) + _batches(asked & unsure, rows, cut, like, True)
    return work, bool((times + asked.any(1) <= 1).all())


class _Common(NamedTuple):
    """What all tiles of one head have in common; lengths and heads as BlockTiles has them."""

    block_q: int
    block_k: int
    where: Stretch
    band: Band
    lengths: Ints | None
    heads: tuple[int, int] | None
    whole_rows: bool  # but for the last one, all blocks of queries have block_q rows

    def taller(self, count: int) -> _Common:
        return self._replace(block_q=count * self.block_q)


def _batches(kept: Bools, rows: Ints, cut: Bools, like: _Common, partial: bool = False) -> list[BlockTiles]:
    """One head's blocks, kept (num_q_blocks, num_k_blocks): the rows that have the same shape together."""
    where = like.where
    full_blocks, tail = divmod(where.seqlen_k, like.block_k)
    masked, tails = np.any(kept & cut, axis=1), np.any(kept[:, full_blocks:], axis=1)
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
            count=where.copies,
            row_step=where.seqlen_q,
            key_step=where.seqlen_k,
        )
        for (count, width, has_tail, is_masked), tiles in batches.items()
    ]


def kept_blocks(schedule: BlockSchedule, plane: torch.Tensor | None = None) -> torch.Tensor:
    """bool (batch or 1, heads or 1, num_q_blocks, num_k_blocks), of a schedule on the CPU; plane: its bits if None."""
    words = schedule.bits if plane is None else plane
    kept = torch.from_numpy(unpack(words.flatten(0, 2).numpy(), schedule.num_k_blocks))
    return kept.view(*words.shape[:3], schedule.num_k_blocks)
