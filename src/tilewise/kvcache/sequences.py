"""The living sequences: one row of arrays per sequence, so that a step over hundreds is a few array operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tilewise import checks
from tilewise.kvcache.pool import Ints, Pages

MANY = 2**40  # a count of tokens that no cache has room for


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
        self._stamp = 0  # the last one given
        self._unused: list[int] = []
        # The sequences asked for last, and their rows: steps mostly go over the same ones.
        self._batch: tuple[list[int], tuple[int, ...], Ints] | None = None

    def add(self, seq: int, pages: Pages, length: int) -> None:
        row = self._unused.pop() if self._unused else len(self.rows)
        if row == len(self.lengths):
            self.lengths, self.counts, self.last, self.stamps = (
                np.concatenate([x, np.zeros_like(x)]) for x in (self.lengths, self.counts, self.last, self.stamps)
            )
            self._resize(2 * row, self.table.shape[1])
        self._widen(len(pages))
        self.table[row, : len(pages)] = pages
        self.rows[seq] = row
        self.lengths[row], self.counts[row] = length, len(pages)
        self.last[row] = pages[-1] if len(pages) else -1
        self._stamp += 1
        self.stamps[row] = self._stamp

    def remove(self, seq: int) -> Pages:
        """Its pages."""
        pages = self.pages(seq)
        self._batch = None
        row = self.rows.pop(seq)
        self.table[row, : len(pages)] = 0
        self._unused.append(row)
        return pages

    def row(self, seq: int, name: str = "seq") -> int:
        """Raises ValueError unless the sequence is alive."""
        row = self.rows.get(seq if type(seq) is int else checks.integer(name, seq))
        if row is None:
            raise ValueError(f"{name} must be alive, but sequence {seq} was freed or never allocated")
        return row

    def batch(self, seqs: Any) -> tuple[tuple[int, ...], Ints]:
        """The numbers and rows of sequences (a list, tensor or array) that must be alive and named once each."""
        if self._batch is None or self._batch[0] != seqs:
            named = check_seqs(seqs)
            try:
                rows = np.fromiter(map(self.rows.__getitem__, named), np.int64, len(named))
            except KeyError:
                rows = np.array([self.row(seq, "seqs") for seq in named], np.int64)
            if len(set(named)) != len(named):
                raise ValueError("seqs must name each sequence once, got one twice; add up its counts")
            if type(seqs) is not list:
                return tuple(named), rows
            self._batch = named.copy(), tuple(named), rows
        return self._batch[1:]

    def pages(self, seq: int, name: str = "seq") -> Pages:
        """The page list of one sequence: a copy, read-only."""
        row = self.row(seq, name)
        pages = self.table[row, : self.counts[row]].copy()
        pages.flags.writeable = False
        return pages

    def grow(self, rows: Ints, growth: Ints, pages: Pages) -> None:
        """Add `growth` pages at the end of each, all of them one after another in `pages`."""
        counts = self.counts[rows]
        self._widen(int((counts + growth).max()))
        if len(pages) == len(rows):
            self.table[rows, counts] = pages
            self.last[rows] = pages
        else:
            ends = np.cumsum(growth)
            at = np.repeat(counts - (ends - growth), growth) + np.arange(len(pages))
            self.table[np.repeat(rows, growth), at] = pages
            self.last[rows] = pages[ends - 1]
        self.counts[rows] = counts + growth

    def replace_last(self, rows: Ints, pages: Ints) -> None:
        self.table[rows, self.counts[rows] - 1] = pages
        self.last[rows] = pages
        self.stamps[rows] = np.arange(self._stamp + 1, self._stamp + 1 + len(rows))
        self._stamp += len(rows)

    def _widen(self, pages: int) -> None:
        """Make room for lists of so many pages."""
        if pages > self.table.shape[1]:
            self._resize(len(self.table), max(pages, 2 * self.table.shape[1]))

    def _resize(self, rows: int, width: int) -> None:
        table = np.zeros((rows, width), np.int32)
        table[: len(self.table), : self.table.shape[1]] = self.table
        self.table = table


def check_seqs(seqs: Any) -> list[int]:
    """`seqs`, a list, tensor or array of sequence numbers, as a list of ints."""
    if isinstance(seqs, (torch.Tensor, np.ndarray)):
        seqs = seqs.tolist()
    if isinstance(seqs, str) or not isinstance(seqs, Sequence):
        raise TypeError(f"seqs must be a list of sequence numbers, got {type(seqs).__name__}")
    if _all_ints(seqs):
        return seqs if type(seqs) is list else list(seqs)
    return [checks.integer("seqs", seq) for seq in seqs]


def check_counts(counts: Any, expected: int) -> tuple[tuple[int, ...], Ints]:
    """`counts`, one number or one for each of `expected` sequences, none below 0; also as an array, cut off at MANY."""
    if isinstance(counts, (torch.Tensor, np.ndarray)):
        counts = counts.tolist()
    if isinstance(counts, str) or not isinstance(counts, Sequence):
        count = checks.integer("counts", counts, 0)
        return (count,) * expected, np.full(expected, min(count, MANY), np.int64)
    if len(counts) != expected:
        raise ValueError(f"counts must be one int or one for each of the {expected} seqs, got {len(counts)}")
    if not _all_ints(counts) or min(counts) < 0:
        counts = [checks.integer("counts", count, 0) for count in counts]
    cut = counts if max(counts, default=0) <= MANY else [min(count, MANY) for count in counts]
    return tuple(counts), np.array(cut, np.int64)


def _all_ints(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {int}
