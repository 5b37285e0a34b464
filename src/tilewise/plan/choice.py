"""What an indexer's query tokens choose among: each the keys of its sequence up to its own place.

A key's score is Σ_h weight_h · relu(q_h · key); a token takes the `topk` best. Tokens that see no more keys than that
take them all, and nobody scores them. The others are listed as tiles: neighbours of one sequence, which meet the same
keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]
Longs = npt.NDArray[np.int64]


class ChoiceTiles(NamedTuple):
    """Rows that are dealt with together, which keep `kept` · `width` scores.

    tiles: (n, 5) int32: the sequence's number in the plan, the first of the tile's rows, how many there are, the place
    of the first in its sequence, and where its scores are kept. rows: (m, 4) int32: a row, its sequence's number, its
    place, and where its scores are kept, −1 if it takes all it sees.
    """

    tiles: Ints
    rows: Ints
    kept: int
    width: int


@dataclass(frozen=True, eq=False)
class ChoicePlan:
    """The last `counts[n]` tokens of `seqs[n]`, which has `lengths[n]`, in this order, as rows; made by plan_choice().

    pages: (sequences, most pages of any) int32, filled up with −1. topk: keys that a token takes.
    """

    seqs: tuple[int, ...]
    counts: Longs
    lengths: Longs
    pages: Ints
    page_size: int
    topk: int
    cache_serial: int

    @cached_property
    def starts(self) -> Ints:
        """(sequences + 1,): the first row of each sequence, and their number."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def tokens(self) -> int:
        """Query tokens, which are the rows."""
        return int(self.starts[-1])

    def tiles(self, rows_each: int, at_once: int) -> Iterator[ChoiceTiles]:
        """All rows, in groups that keep about `at_once` scores; tiles have up to `rows_each` rows."""
        first = self.lengths - self.counts  # the place of a sequence's first row
        whole, long = (np.flatnonzero(x) for x in (self.lengths <= self.topk, self.lengths > self.topk))
        each = -(-self.counts[long] // rows_each)  # tiles
        n = np.repeat(long, each)
        done = (np.arange(len(n)) - np.repeat(np.cumsum(each) - each, each)) * rows_each
        rows = np.minimum(rows_each, self.counts[n] - done)
        tiles = np.stack([n, self.starts[n] + done, rows, first[n] + done, np.cumsum(rows) - rows], 1).astype(np.int32)
        widths = first[n] + done + rows
        takes_all = np.stack([whole, self.starts[whole], self.counts[whole], first[whole], whole], 1)
        listed = [_rows_of(takes_all, kept=False)]
        for begin, end in _cuts(rows, widths, at_once):
            some = tiles[begin:end]
            some[:, 4] -= some[0, 4]
            listed.append(_rows_of(some))
            kept = int(rows[begin:end].sum())
            yield ChoiceTiles(some, np.concatenate(listed), kept, int(widths[begin:end].max()))
            listed = []
        if listed and len(listed[0]):
            yield ChoiceTiles(tiles, listed[0], 0, 0)


@dataclass(eq=False)
class StandingChoice:
    """The choice of tokens of up to `rows` sequences of up to max_length tokens, which come, go and grow; made by
    plan_choice(..., rows=, max_length=) and brought up to date by renew_plan().

    A sequence has tokens_per_seq query tokens; those past the last sequence are idle. now: of the present sequences.
    """

    rows: int
    max_length: int
    tokens_per_seq: int
    topk: int
    page_size: int
    cache_serial: int
    now: ChoicePlan

    @property
    def tokens(self) -> int:
        """Query tokens, idle ones too."""
        return self.rows * self.tokens_per_seq

    @property
    def most_pages(self) -> int:
        """Of a sequence."""
        return -(-self.max_length // self.page_size)


def _cuts(rows: Longs, widths: Longs, at_once: int) -> Iterator[tuple[int, int]]:
    """Neighbouring tiles that fit together, each at least one: as many rows as they have in all, as wide as the widest
    of them is."""
    if len(rows) and int(rows.sum()) * int(widths.max()) <= at_once:
        yield 0, len(rows)
        return
    begin = kept = width = 0
    for end, (more, wide) in enumerate(zip(rows.tolist(), widths.tolist(), strict=True)):
        if end > begin and (kept + more) * max(width, wide) > at_once:
            yield begin, end
            begin, kept, width = end, 0, 0
        kept, width = kept + more, max(width, wide)
    if len(rows):
        yield begin, len(rows)


def _rows_of(tiles: Ints, *, kept: bool = True) -> Ints:
    """ChoiceTiles.rows of tiles; kept: their scores are."""
    counts = tiles[:, 2]
    at = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.empty((len(at), 4), np.int32)
    for to, of, more in ((0, 1, at), (1, 0, 0), (2, 3, at), (3, 4, at)):
        found[:, to] = np.repeat(tiles[:, of], counts) + more
    if not kept:
        found[:, 3] = -1
    return found
