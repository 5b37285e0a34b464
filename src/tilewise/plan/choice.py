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
    def rows(self) -> int:
        """Query tokens."""
        return int(self.starts[-1])

    def tiles(self, rows_each: int, at_once: int) -> Iterator[ChoiceTiles]:
        """All rows, in groups that keep about `at_once` scores; tiles have up to `rows_each` rows."""
        takes_all = [
            self._rows_of(n, 0, int(self.counts[n])) for n in np.flatnonzero(self.lengths <= self.topk).tolist()
        ]
        tiles: list[tuple[int, ...]] = []
        rows, kept, width = takes_all, 0, 0
        for n in np.flatnonzero(self.lengths > self.topk).tolist():
            count, first = int(self.counts[n]), int(self.lengths[n] - self.counts[n])
            for done in range(0, count, rows_each):
                more = min(rows_each, count - done)
                wide = max(width, first + done + more)
                if tiles and (kept + more) * wide > at_once:
                    yield ChoiceTiles(np.array(tiles, np.int32), np.concatenate(rows), kept, width)
                    tiles, rows, kept, wide = [], [], 0, first + done + more
                tiles.append((n, int(self.starts[n]) + done, more, first + done, kept))
                rows.append(self._rows_of(n, done, more, kept))
                kept, width = kept + more, wide
        if rows:
            yield ChoiceTiles(np.array(tiles, np.int32).reshape(-1, 5), np.concatenate(rows), kept, width)

    def _rows_of(self, n: int, done: int, count: int, kept: int | None = None) -> Ints:
        """Of ChoiceTiles.rows those of `count` rows of a sequence, `done` of its rows further on."""
        at = np.arange(done, done + count)
        found = np.empty((count, 4), np.int32)
        found[:, 0], found[:, 1], found[:, 2] = self.starts[n] + at, n, self.lengths[n] - self.counts[n] + at
        found[:, 3] = -1 if kept is None else kept + at - done
        return found
