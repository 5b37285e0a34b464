"""The living sequences: one row of arrays per sequence, so that a step over hundreds is a few array operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import is_not
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tilewise import checks
from tilewise.kvcache.pool import Ints, Pages, ranges

if TYPE_CHECKING:
    from tilewise.kvcache.lineage import Kinship
    from tilewise.kvcache.runs import Run
    from tilewise.plan.standing import Grown

LARGE = 2**20  # entries of a table that is not copied as a whole
MANY = 2**40  # a count of tokens that no cache has room for
KNOWN = 4  # batches that are remembered: of those who decode, and a few of those whose prompts are computed
MOST_GONE = 4096  # sequences that ended, which are remembered
NOWHERE: Ints = np.zeros(0, np.int64)


class Batch:
    """Sequences that were asked for together. seqs, named: their numbers, as a list and as a tuple. rows (n,): theirs;
    with `before` (n,) from the last time and `at` (u,), the places that have another sequence since. members: the
    numbers as a set. gone: sequences that ended since."""

    __slots__ = ("at", "before", "gone", "members", "named", "rows", "seqs")

    def __init__(self, seqs: list[int], named: tuple[int, ...], rows: Ints, members: set[int]) -> None:
        self.seqs, self.named, self.rows, self.members = seqs, named, rows, members
        self.gone: set[int] = set()
        self.before, self.at = rows, NOWHERE


class Sequences:
    """Rows of living sequences by their number; a row is used again when its sequence has ended.

    lengths (rows,) int64: tokens, reserved ones included. counts (rows,) int64: pages. last (rows,) int64: the last
    page, -1 if there is none. table (rows, width) int32: the page lists, one per row, with zeros after them.

    stamps (rows,) int64 tell a copy of the table what became of a row: its stamp changes, to a number that no row had
    before, whenever the row is given to another sequence or a page that it lists is replaced by another. While a stamp
    stands still, the first `counts` pages of then are those of now: pages only came at the end.

    The arrays give way to larger ones as sequences come and grow, so they are looked up anew after every change.
    """

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.lengths, self.counts, self.last, self.stamps = (np.zeros(8, np.int64) for _ in range(4))
        self.table: Pages = np.zeros((8, 8), np.int32)
        self.kinship: Kinship | None = None  # who shares pages with whom, kept once somebody asks for it
        self.changes = 0  # counts what became of sequences; steps of `run` are none
        self.run: Run | None = None  # of the sequences that grow step by step; over when `changes` is not its own
        self.stepped: Ints | None = None  # the rows that got a token each in the last step that was not one of `run`
        # Rows of which something became since then that a step of a token each has to look at: they grew otherwise, or
        # others may share their last page.
        self.moved = np.zeros(8, bool)
        self._stamp = 0  # the last one given
        self._unused: list[int] = []
        # The batches asked for last, no two of the same size, the latest first: steps mostly go over the same ones,
        # or most of them.
        self._known: list[Batch] = []

    def add(self, seq: int, pages: Pages, length: int) -> None:
        """A sequence with this page list."""
        rows = self._new_rows([seq])
        self._widen(len(pages))
        self.table[rows, : len(pages)] = pages
        self.lengths[rows], self.counts[rows] = length, len(pages)
        self.last[rows] = pages[-1] if len(pages) else -1
        if self.kinship is not None:
            self.kinship.join(int(rows[0]))

    def add_empty(self, seqs: list[int]) -> None:
        rows = self._new_rows(seqs)
        self.lengths[rows] = self.counts[rows] = 0
        self.last[rows] = -1
        if self.kinship is not None:
            self.kinship.append(rows)

    def copy(self, seqs: list[int], sources: Ints) -> None:
        """New sequences with the page lists and lengths of the rows `sources`: one each, or all of the one row."""
        rows = self._new_rows(seqs)
        counts = self.counts[sources]
        width = max(counts.tolist(), default=0)
        self.table[rows, :width] = self.table[sources, :width]
        self.lengths[rows], self.counts[rows], self.last[rows] = self.lengths[sources], counts, self.last[sources]
        self.moved[sources] = True
        if self.kinship is not None:
            self.kinship.fork(rows, sources)

    def end(self, seqs: Sequence[int]) -> Ints:
        """The rows of sequences that live no longer. Their page lists stay until clear() is told of the rows."""
        self.changes += 1
        for batch in self._known:
            batch.gone.update(seqs)
            if len(batch.gone) > MOST_GONE:  # nobody asks for it
                self._known = [one for one in self._known if one is not batch]
        return np.fromiter(map(self.rows.pop, seqs), np.int64, len(seqs))

    def clear(self, rows: Ints) -> None:
        """Empty rows of sequences that have ended: others may have them."""
        self.table[rows, : max(self.counts[rows].tolist(), default=0)] = 0
        self._unused += rows.tolist()
        if self.kinship is not None:
            self.kinship.leave(rows)

    def row(self, seq: int, name: str = "seq") -> int:
        """Raises ValueError unless the sequence is alive."""
        row = self.rows.get(seq if type(seq) is int else checks.integer(name, seq))
        if row is None:
            raise ValueError(f"{name} must be alive, but sequence {seq} was freed or never allocated")
        return row

    def named(self, seqs: Any, name: str = "seqs") -> tuple[list[int], Ints]:
        """The numbers and rows of sequences (a list, tensor or array) that must be alive."""
        numbers = check_seqs(seqs, name)
        try:
            rows = np.fromiter(map(self.rows.__getitem__, numbers), np.int64, len(numbers))
        except KeyError:
            rows = np.array([self.row(seq, name) for seq in numbers], np.int64)
        return numbers, rows

    def some(self, seq: Any) -> tuple[list[int], Ints]:
        """named() of one number or of a list of them."""
        if several(seq):
            return self.named(seq, "seq")
        row = self.row(seq)
        return [int(seq)], np.array([row])

    @property
    def last_stamp(self) -> int:
        """The last stamp that was given: while it stands still, so do all of them."""
        return self._stamp

    def batch(self, seqs: Any) -> tuple[tuple[int, ...], Ints]:
        """named() of sequences that are named once each; the very same tuple and array if they are those of a call
        before. The tuple is taken as well as the list."""
        listed = type(seqs) is list
        for turn, batch in enumerate(self._known):
            same = batch.named is seqs or (listed and batch.seqs == seqs)
            if same and batch.gone.isdisjoint(batch.members):
                batch.gone.clear()
            elif same or not listed or len(seqs) != len(batch.seqs) or not self._replace(batch, seqs):
                continue
            if turn:
                self._known.insert(0, self._known.pop(turn))
            return batch.named, batch.rows
        named, rows = self.named(seqs)
        members = set(named)
        if len(members) != len(named):
            raise ValueError("seqs must name each sequence once, got one twice; add up its counts")
        if not listed:
            return tuple(named), rows
        made = Batch(named.copy(), tuple(named), rows, members)
        self._known = [made, *(one for one in self._known if len(one.seqs) != len(named))][:KNOWN]
        return made.named, rows

    def last_batch(self, rows: Ints) -> Batch | None:
        """The batch asked for last, if it has just these rows."""
        return self._known[0] if self._known and self._known[0].rows is rows else None

    def _replace(self, batch: Batch, seqs: list[int]) -> bool:
        """Make it the batch `seqs`, of as many sequences; False, with nothing changed, if one has to look at all."""
        old, half = batch.seqs, len(seqs) // 2
        if not (seqs[0] is old[0] or seqs[half] is old[half] or seqs[-1] is old[-1]):  # others altogether, mostly
            return False
        at = list(compress(range(len(seqs)), map(is_not, old, seqs)))
        new, left = [seqs[n] for n in at], [old[n] for n in at]
        if len(at) > half or not _all_ints(new) or not self.rows.keys() >= set(new):
            return False
        members = batch.members
        members.difference_update(left)
        members.update(new)
        if len(members) != len(seqs) or not members.isdisjoint(batch.gone):
            batch.members = set(old)
            return False
        batch.gone.clear()
        batch.before, batch.at, batch.rows = batch.rows, np.array(at, np.int64), batch.rows.copy()
        batch.rows[batch.at] = [self.rows[seq] for seq in new]
        batch.seqs, batch.named = seqs.copy(), tuple(seqs)
        return True

    def pages(self, seq: int, name: str = "seq") -> Pages:
        """The page list of one sequence: a copy, read-only."""
        row = self.row(seq, name)
        pages = self.table[row, : self.counts[row]].copy()
        pages.flags.writeable = False
        return pages

    def lists(self, rows: Ints) -> tuple[Pages, Ints]:
        """The pages that all of these rows begin with, and what comes after those, one row after another."""
        counts = self.counts[rows]
        if len(rows) < 2:
            return self.table[rows[:1], : counts[0] if len(rows) else 0].reshape(-1), np.empty(0, np.int64)
        each = counts.tolist()
        least, lead = min(each), 0
        if self.kinship is not None:
            lead = self.kinship.shared_by(rows)
        elif least:
            same = np.logical_and.reduce(self.table[rows[1:], :least] == self.table[rows[0], :least])
            lead = int(same.argmin())
            if same[lead]:
                lead = least
        rest = self.table.reshape(-1).take(ranges(rows * self.table.shape[1] + lead, counts - lead))
        return self.table[rows[0], :lead], rest.astype(np.int64)

    def padded(self, rows: Ints, fill: int) -> Pages:
        """(len(rows), most pages of any) int32: their page lists, filled up."""
        counts = self.counts[rows]
        width = int(counts.max(initial=0))
        return np.where(np.arange(width) < counts[:, None], self.table[rows, :width], np.int32(fill))

    def grow(self, rows: Ints, growth: Ints, pages: Ints) -> None:
        """Add `growth` pages at the end of each, all of them one after another in `pages`."""
        counts = self.counts[rows]
        self._widen(int(np.maximum.reduce(counts + growth)))
        if len(pages) == len(rows):
            self.table[rows, counts] = pages
            self.last[rows] = pages
        else:
            ends = growth.cumsum()
            at = np.repeat(counts - (ends - growth), growth) + np.arange(len(pages))
            self.table[np.repeat(rows, growth), at] = pages
            self.last[rows] = pages[ends - 1]
        self.counts[rows] = counts + growth

    def add_pages(self, rows: Ints, counts: Ints, pages: Ints) -> None:
        """One page more at the end of each, which has `counts` so far."""
        try:
            self.table[rows, counts] = pages
        except IndexError:  # cheaper than to look at all counts in every step
            self._widen(int(counts.max()) + 1)
            self.table[rows, counts] = pages
        self.last[rows] = pages
        self.counts[rows] = counts + 1

    def lengths_now(self, rows: Ints) -> tuple[Ints, int]:
        """The lengths of rows, and how long the longest of them is at most. The array is not changed by later steps."""
        run = self.run
        if run is not None and run.rows is rows and run.changes == self.changes:
            return run.lengths, run.longest
        lengths = self.lengths[rows]
        return lengths, int(np.maximum.reduce(lengths, initial=0))

    def grown(self, rows: Ints) -> Grown | None:
        """What the last step brought to rows which are those of the run."""
        run = self.run
        return run.grown if run is not None and run.rows is rows and run.changes == self.changes else None

    def replace_last(self, rows: Ints, pages: Ints) -> None:
        self.changes += 1
        self.table[rows, self.counts[rows] - 1] = pages
        self.last[rows] = pages
        self._restamp(rows)
        if self.kinship is not None:
            self.kinship.replace(rows)

    def _new_rows(self, seqs: list[int]) -> Ints:
        """A row for each of them."""
        self.changes += 1
        count, unused = len(seqs), self._unused
        fresh = max(0, count - len(unused))
        first = len(self.rows)  # with none unused, the first that never was in use
        if fresh and first + count > len(self.lengths):
            more = max(first + count, 2 * len(self.lengths))
            self.lengths, self.counts, self.last, self.stamps = (
                np.concatenate([x, np.zeros(more - len(x), np.int64)])
                for x in (self.lengths, self.counts, self.last, self.stamps)
            )
            self.moved = np.concatenate([self.moved, np.zeros(more - len(self.moved), bool)])
            self._resize(more, self.table.shape[1])
        first += len(unused)
        rows = unused[len(unused) - count + fresh :] + list(range(first, first + fresh))
        del unused[len(unused) - count + fresh :]
        self.rows.update(zip(seqs, rows, strict=True))
        found = np.array(rows, np.int64)
        self._restamp(found)
        return found

    def _restamp(self, rows: Ints) -> None:
        self.stamps[rows] = np.arange(self._stamp + 1, self._stamp + 1 + len(rows))
        self._stamp += len(rows)

    def _widen(self, pages: int) -> None:
        """Make room for lists of so many pages."""
        if pages > self.table.shape[1]:
            self._resize(len(self.table), max(pages, 2 * self.table.shape[1]))

    def _resize(self, rows: int, width: int) -> None:
        table = np.zeros((rows, width), np.int32)
        if self.table.size < LARGE:
            table[: len(self.table), : self.table.shape[1]] = self.table
        else:  # only what is listed is touched, and so takes memory: one long list does not make all others long
            for row, count in zip(self.rows.values(), self.counts[list(self.rows.values())].tolist(), strict=True):
                table[row, :count] = self.table[row, :count]
        self.table = table


def several(seq: Any) -> bool:
    """Whether it is a list of sequence numbers, not one number."""
    if type(seq) in (int, list):
        return type(seq) is list
    if isinstance(seq, (np.ndarray, torch.Tensor)):
        return seq.ndim > 0
    return isinstance(seq, Sequence) and not isinstance(seq, str)


def check_seqs(seqs: Any, name: str = "seqs") -> list[int]:
    """`seqs`, a list, tensor or array of sequence numbers, as a list of ints."""
    if type(seqs) is list and _all_ints(seqs):
        return seqs
    if isinstance(seqs, (torch.Tensor, np.ndarray)):
        seqs = seqs.tolist()
    if isinstance(seqs, str) or not isinstance(seqs, Sequence):
        raise TypeError(f"{name} must be a list of sequence numbers, got {type(seqs).__name__}")
    if _all_ints(seqs):
        return list(seqs)
    return [checks.integer(name, seq) for seq in seqs]


def check_counts(counts: Any, expected: int) -> tuple[tuple[int, ...], Ints]:
    """`counts`, one number or one for each of `expected` sequences, none below 0; also as an array, cut off at MANY."""
    if isinstance(counts, (torch.Tensor, np.ndarray)):
        counts = counts.tolist()
    if type(counts) is int or isinstance(counts, str) or not isinstance(counts, Sequence):
        count = counts if type(counts) is int and counts >= 0 else checks.integer("counts", counts, 0)
        return (count,) * expected, np.full(expected, min(count, MANY), np.int64)
    if len(counts) != expected:
        raise ValueError(f"counts must be one int or one for each of the {expected} seqs, got {len(counts)}")
    if not _all_ints(counts) or min(counts) < 0:
        counts = [checks.integer("counts", count, 0) for count in counts]
    cut = counts if max(counts, default=0) <= MANY else [min(count, MANY) for count in counts]
    return tuple(counts), np.array(cut, np.int64)


def _all_ints(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {int}
