"""Runs: the same sequences, step after step, get a token each. What such a step needs is known from the one before.

A run begins with the second step in a row over the same sequences and ends when anything else becomes of any sequence.
Within it every sequence has its last page to itself, and each needs a new one every page_size steps: so which do in a
step is looked up, and places and lengths are those of the last step plus one.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from tilewise.kvcache.pool import Ints
from tilewise.plan.standing import Grown

if TYPE_CHECKING:
    from tilewise.kvcache.paged import PagedKVCache

_numbers = itertools.count(1)


class Run:
    """Sequences that grow by a token each per step.

    rows (n,): theirs. lengths (n,), index (n,): their tokens, and where the last one is, page · page_size + offset; new
    arrays in each step. longest: of the lengths. grown: what the last step brought; None before the first one.
    """

    def __init__(self, cache: PagedKVCache, seqs: tuple[int, ...], rows: Ints) -> None:
        """Begin with sequences that all got a token in the last step, since when nothing became of any sequence."""
        sequences, size = cache.sequences, cache.page_size
        self.seqs, self.rows, self.changes, self.counts = seqs, rows, sequences.changes, (1,) * len(seqs)
        self.ones = np.ones(len(seqs), np.int64)
        self.lengths = sequences.lengths[rows]
        self.longest = int(self.lengths.max(initial=0))
        offsets = (self.lengths - 1) % size
        self.index = sequences.last[rows] * size + offsets
        self.grown: Grown | None = None
        self._step = 0
        cache._written.clear_after(self.index)
        cache.pool.fill_up(None, self.index, size)
        # Who needs a page in the step after next has one place left now.
        due = size - 1 - offsets
        by = due.argsort(kind="stable")
        cuts = np.searchsorted(due[by], np.arange(1, size))
        self._at = np.split(by, cuts)
        self._rows = [rows[at] for at in self._at]

    @property
    def pages(self) -> int:
        """How many the next step takes."""
        return len(self._at[self._step % len(self._at)])

    def step(self, cache: PagedKVCache) -> None:
        """A token more for each; so many pages are free."""
        sequences, pool, size = cache.sequences, cache.pool, cache.page_size
        phase = self._step % size
        at = self._at[phase]
        index = self.index + 1
        self.longest += 1
        full = None
        if len(at):
            rows = self._rows[phase]
            full, before = sequences.last[rows], sequences.counts[rows]
            pages = pool.take_next(full)
            sequences.add_pages(rows, before, pages)
            cache._written.clear_pages(pages, pool.losses)
            index[at] = pages * size
            self.grown = Grown(next(_numbers), self.grown.number if self.grown else 0, at, before, pages)
        else:
            self.grown = Grown(next(_numbers), self.grown.number if self.grown else 0, at, at, at)
        self.index, self.lengths = index, self.lengths + 1
        pool.fill_up(full, index, size)
        sequences.lengths[self.rows] = self.lengths
        self._step += 1
