"""Who shares how many pages with whom: the order of the living sequences in which relatives are neighbours.

In a *tree order*, the sequences that have their first n pages in common stand side by side, for every n. So the tree of
shared pages under a batch is read off the order and the number of leading pages that neighbours have in common: the
two of any pair have in common the least number between them. Sorting the page lists gives such an order. Here one is
kept up to date instead: a fork stands beside its parent, whoever ends leaves, and pages that sequences get at their end
are nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tilewise.kvcache.paged import PagedKVCache
from tilewise.kvcache.pool import Ints
from tilewise.kvcache.sequences import Sequences

Places = npt.NDArray[np.int32]
EMPTY = -1


class Lineage:
    """The tree order of a batch of sequences of `cache`, step by step.

    The first one of a cache sorts the page lists of all its sequences, and from then on the cache keeps their order.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        if not isinstance(cache, PagedKVCache):
            raise TypeError(f"cache must be a PagedKVCache, got {type(cache).__name__}")
        self._sequences = cache.sequences
        if self._sequences.kinship is None:
            self._sequences.kinship = Kinship(self._sequences)
        self._rows = np.empty(0, np.int64)  # of the last batch
        self._version = -1  # of the kinship then
        self._found: tuple[Places, Ints] = np.empty(0, np.int32), np.empty(0, np.int64)

    def update(self, seqs: Sequence[int], rows: Ints | None = None) -> tuple[Places, Ints]:
        """(order, common) of the sequences as they are now, living ones that are named once each.

        rows: those that the cache's sequences have for them, where they are known. order (n,) int32: places in `seqs`,
        in a tree order. common (n - 1,) int64: how many leading pages each has in
        common with the next. Both are read-only, and the very arrays of the last call if nothing changed since but
        that sequences grew.
        """
        if rows is None:
            rows = self._sequences.batch(seqs)[1]
        kinship = self._sequences.kinship
        assert kinship is not None
        if kinship.version == self._version and (rows is self._rows or np.array_equal(rows, self._rows)):
            return self._found
        places = np.empty(len(self._sequences.lengths) + 1, np.int32)  # one more: of a place that is empty
        places.fill(-1)
        places[rows] = np.arange(len(rows), dtype=np.int32)
        order = places[kinship.order]
        (at,) = (order >= 0).nonzero()
        if len(at) < len(order):
            order = order[at]
        common = np.minimum.reduceat(kinship.common, at)[:-1] if len(at) else np.empty(0, np.int64)
        order.flags.writeable = common.flags.writeable = False
        self._rows, self._version, self._found = rows, kinship.version, (order, common)
        return self._found


class Kinship:
    """The tree order of all living sequences, which Sequences tells of every change.

    order (n,): rows, and EMPTY where one has ended, as long as few have. common (n,): how many leading pages each has,
    or had, in common with the next; 0 for the last. version: another number after every change of either, but that
    places became empty.
    """

    def __init__(self, sequences: Sequences) -> None:
        self.version, self._empty = 0, 0
        self._sequences = sequences
        self._at = np.empty(0, np.int64)  # the place of a row in the order
        rows = np.fromiter(sequences.rows.values(), np.int64, len(sequences.rows))
        lists = sequences.padded(rows, -1)  # which no page is: a list stands apart from those that go on after it
        width = lists.shape[1]
        if not len(rows) or not width:
            self._place(rows, np.zeros(len(rows), np.int64))
            return
        by = lists.view(np.dtype((np.void, 4 * width)))[:, 0].argsort(kind="stable")
        rows, lists = rows[by], lists[by]
        differs = np.ones((len(rows), width + 1), bool)
        np.not_equal(lists[:-1], lists[1:], out=differs[:-1, :-1])
        common = differs.argmax(1)
        common[:-1] = np.minimum(common[:-1], np.minimum(sequences.counts[rows[:-1]], sequences.counts[rows[1:]]))
        common[-1] = 0
        self._place(rows, common)

    def _place(self, order: Ints, common: Ints) -> None:
        self.version += 1
        self.order, self.common = order, common
        if len(self._at) <= len(self._sequences.lengths):
            self._at = np.zeros(len(self._sequences.lengths) + 1, np.int64)  # the last one: of EMPTY
        self._at[order] = np.arange(len(order))

    def shared_by(self, rows: Ints) -> int:
        """How many leading pages all of them have in common."""
        at = self._at[rows].tolist()
        first, last = min(at), max(at)
        if first == last:
            return int(self._sequences.counts[self.order[first]])
        return int(np.minimum.reduce(self.common[first:last]))

    def append(self, rows: Ints) -> None:
        """New sequences without pages."""
        self._place(np.concatenate([self.order, rows]), np.concatenate([self.common, np.zeros(len(rows), np.int64)]))

    def fork(self, rows: Ints, parents: Ints) -> None:
        """New sequences with the pages of their parents, each of its own, or all of the one."""
        at = self._at[parents]
        shared = self._sequences.counts[parents]
        if len(at) == 1:
            self._insert_block(int(at[0]) + 1, rows, int(shared[0]))
            return
        by = at.argsort(kind="stable")
        at = at[by]
        total = len(self.order) + len(rows)
        new = at + np.arange(1, len(rows) + 1)
        old = np.zeros(total, bool)
        old[new] = True
        np.logical_not(old, out=old)
        order, common = np.empty(total, np.int64), np.empty(total, np.int64)
        order[new], order[old] = rows[by], self.order
        # A child has in common with what comes next what its parent had, and all its pages with what comes before.
        old[new], old[new - 1] = True, False
        common[new - 1], common[old] = shared[by], self.common
        self._place(order, common)

    def leave(self, rows: Ints) -> None:
        """Sequences that have ended."""
        self.order[self._at[rows]] = EMPTY
        self._empty += len(rows)
        if 2 * self._empty > len(self.order):
            self._close_up()

    def _close_up(self) -> None:
        """Leave out what is empty."""
        if self._empty:
            self._empty = 0
            (at,) = (self.order != EMPTY).nonzero()
            self._place(self.order[at], np.minimum.reduceat(self.common, at) if len(at) else self.common[:0])

    def join(self, row: int) -> None:
        """A new sequence with pages, some of which others may have, too."""
        self._close_up()
        at, shared = self._nearest(row)
        self._insert_block(self._end(at, shared) + 1 if shared else len(self.order), np.array([row]), shared)

    def replace(self, rows: Ints) -> None:
        """Sequences whose last page was replaced by one that is nobody else's."""
        at = self._at[rows]
        at.sort()
        shared = self._sequences.counts[self.order[at]] - 1
        # Blocks of neighbours that had the same page and kept the same number of them.
        new = np.ones(len(at), bool)
        new[1:] = (at[1:] != at[:-1] + 1) | (shared[1:] != shared[:-1]) | (self.common[at[:-1]] <= shared[1:])
        (blocks,) = new.nonzero()
        first, depth = at[blocks], shared[blocks]
        last = at[np.append(blocks[1:], len(at)) - 1]
        before = np.where(first > 0, self.common[first - 1], 0)
        inside = (before > depth) & (self.common[last] > depth)  # others on both sides still share that page
        common = self.common.copy()
        stay = ~inside[new.cumsum() - 1]
        common[at[stay]] = np.minimum(common[at[stay]], shared[stay])
        ahead = ~inside & (first > 0)
        common[first[ahead] - 1] = np.minimum(common[first[ahead] - 1], depth[ahead])
        moving = [self.order[a : b + 1] for a, b in zip(first[inside], last[inside], strict=True)]
        if moving or not np.array_equal(common, self.common):
            self._place(self.order, common)
        for block, kept in zip(moving, depth[inside].tolist(), strict=True):
            self._move(block, kept)

    def _move(self, block: Ints, shared: int) -> None:
        """Neighbours that have but `shared` pages in common with those around them, and each other: put them after the
        sequences that have more."""
        first, last = int(self._at[block[0]]), int(self._at[block[-1]])
        order, common = self.order, self.common.copy()
        end = self._end(last, shared)
        if end == last:  # others that were on the other side have moved
            common[first - 1 : last + 1] = np.minimum(common[first - 1 : last + 1], shared)
        else:
            order = np.concatenate([order[:first], order[last + 1 : end + 1], block, order[end + 1 :]])
            least = common[first - 1 : last + 1].min(keepdims=True)
            tail = np.full(len(block), shared, np.int64)
            common = np.concatenate([common[: first - 1], least, common[last + 1 : end], tail, common[end:]])
        self._place(order, common)

    def _insert_block(self, at: int, rows: Ints, shared: int) -> None:
        """Put rows before place `at` which have `shared` pages in common with what is before them and each other, and
        with what comes next what that has."""
        order = np.concatenate([self.order[:at], rows, self.order[at:]])
        if at:
            common = np.empty(len(order), np.int64)
            common[: at - 1], common[at - 1 + len(rows) :] = self.common[: at - 1], self.common[at - 1 :]
            common[at - 1 : at - 1 + len(rows)] = shared
        else:
            common = np.zeros(len(rows), np.int64)
        self._place(order, common)

    def _end(self, at: int, shared: int) -> int:
        """The last place from `at` on up to which all have more than `shared` pages in common."""
        return at + int((self.common[at:] <= shared).argmax())

    def _nearest(self, row: int) -> tuple[int, int]:
        """The place of a sequence that has as many leading pages in common with this one as any, and how many."""
        sequences, order = self._sequences, self.order
        count = int(sequences.counts[row])
        pages = sequences.table[row, :count]
        found, shared, low, high = 0, 0, 0, len(order)  # all that have more in common are in [low, high)
        while shared < count and low < high:
            (there,) = (sequences.table[order[low:high], shared] == pages[shared]).nonzero()
            there = there[sequences.counts[order[low + there]] > shared] + low
            if not len(there):
                break
            found = int(there[0])
            other = sequences.table[order[found], :count]
            differs = other != pages
            reach = min(count, int(sequences.counts[order[found]]))
            at = int(differs[:reach].argmax()) if reach else 0
            shared = at if reach and differs[at] else reach
            # Whoever has more in common with the pages has just these in common with the one found.
            below = (self.common[low:found] < shared).nonzero()[0]
            low = low + int(below[-1]) + 1 if len(below) else low
            high = min(high, found + 1 + int((self.common[found:] < shared).argmax()))
        return found, shared
