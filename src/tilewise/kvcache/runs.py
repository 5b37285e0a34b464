"""Runs: step after step, the same sequences get a token each, or most of them. What such a step needs is known from
the one before.

A run begins with the second step in a row over a batch. Sequences that take the places of others in it are looked at
when they join. The run ends where one that stays grows otherwise, or comes to share its last page: within it every
sequence has its last page to itself, so that places and lengths are those of the last step plus one.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from tilewise.kvcache.pool import Ints
from tilewise.kvcache.sequences import NOWHERE, Batch
from tilewise.plan.standing import Grown

if TYPE_CHECKING:
    from tilewise.kvcache.paged import PagedKVCache

QUIET = 4  # steps without anybody who joins, after which it is worked out who needs a page when
_numbers = itertools.count(1)


class Run:
    """Sequences that grow by a token each per step.

    rows (n,): theirs. lengths (n,), index (n,): their tokens, and where the last one is, page · page_size + offset; new
    arrays in each step. longest: what no length is above. grown: what the last step brought; None before the first one.
    changes: of the cache's sequences, when all that became of them was known here.
    """

    def __init__(self, cache: PagedKVCache, rows: Ints) -> None:
        """Begin with sequences each of which has a last page to itself."""
        sequences, size = cache.sequences, cache.page_size
        self.rows, self.changes, self.counts = rows, sequences.changes, (1,) * len(rows)
        self.ones = np.ones(len(rows), np.int64)
        self.lengths = sequences.lengths[rows]
        self.longest = int(self.lengths.max(initial=0))
        self._offsets = (self.lengths - 1) % size
        self.index = sequences.last[rows] * size + self._offsets
        self.grown: Grown | None = None
        self._size, self._quiet = size, 0
        self._in_turn: list[Ints] = []  # of each of page_size steps, who needs a page; none before it is worked out
        self._due: Ints | None = None  # who needs one in the next step; None before somebody asks

    @property
    def pages(self) -> int:
        """How many the next step takes."""
        if self._due is None:
            if self._in_turn:
                self._due = self._in_turn[self._quiet % self._size]
            else:
                (self._due,) = (self._offsets == self._size - 1).nonzero()
        return len(self._due)

    def follow(self, cache: PagedKVCache, batch: Batch, at: Ints) -> bool:
        """Go on with a batch that has other sequences than the run at the places `at`; False if it cannot."""
        sequences, size, rows = cache.sequences, self._size, batch.rows
        moved = sequences.moved[rows]
        moved[at] = False
        if np.count_nonzero(moved):
            return False
        if len(at):
            joining = rows[at]
            if not have_own_pages(cache, joining):
                return False
            lengths = sequences.lengths[joining]
            offsets = (lengths - 1) % size
            index = sequences.last[joining] * size + offsets
            self.lengths, self.index, self._offsets = self.lengths.copy(), self.index.copy(), self._now()
            self.lengths[at], self.index[at], self._offsets[at] = lengths, index, offsets
            self.longest = max(self.longest, *lengths.tolist())
            self.rows, self._quiet, self._in_turn, self._due = rows, 0, [], None
        sequences.moved[:] = False
        self.changes = sequences.changes
        return True

    def step(self, cache: PagedKVCache) -> None:
        """A token more for each; so many pages are free."""
        sequences, pool, size = cache.sequences, cache.pool, self._size
        assert self._due is not None, "pages comes first"
        at, self._due = self._due, None
        index = self.index + 1
        self.longest += 1
        before = pages = NOWHERE
        if len(at):
            rows = self.rows[at]
            before, pages = sequences.counts[rows], pool.take_next(sequences.last[rows])
            sequences.add_pages(rows, before, pages)
            cache._written.clear_pages(pages, pool.losses)
            index[at] = pages * size
        self.grown = Grown(next(_numbers), self.grown.number if self.grown else 0, at, before, pages)
        self.index, self.lengths = index, self.lengths + 1
        pool.reserve(index, size)
        sequences.lengths[self.rows] = self.lengths
        self._quiet += 1
        if self._in_turn:
            return
        self._offsets += 1
        self._offsets[at] = 0
        if self._quiet >= QUIET:  # who needs a page in the step after next has one place left now
            due = size - 1 - self._offsets
            by = due.argsort(kind="stable")
            self._in_turn = np.split(by, np.searchsorted(due[by], np.arange(1, size)))
            self._quiet = 0

    def _now(self) -> Ints:
        """Where the last tokens are in their pages."""
        return self.index % self._size if self._in_turn else self._offsets


def have_own_pages(cache: PagedKVCache, rows: Ints) -> bool:
    """Whether each of these sequences has a last page, and that to itself."""
    last = cache.sequences.last[rows]
    return -1 not in last.tolist() and cache.pool.refs[last].tolist().count(1) == len(last)
