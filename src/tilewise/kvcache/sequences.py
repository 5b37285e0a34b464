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

    lengths: tokens, reserved ones included. counts: pages. last: the last page, -1 if there is none. The page lists lie
    in one array, each with room to spare, so that all that get a page in a step get it in one assignment.
    """

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.lengths, self.counts, self.last = (np.zeros(8, np.int64) for _ in range(3))
        self._starts, self._room = np.zeros(8, np.int64), np.zeros(8, np.int64)  # of the lists in _pages
        self._pages = np.empty(64, np.int32)
        self._end = 0  # of what is in use in _pages
        self._unused: list[int] = []
        # The sequences asked for last, and their rows: steps mostly go over the same ones.
        self._batch: tuple[list[int], tuple[int, ...], Ints] | None = None

    def add(self, seq: int, pages: Pages, length: int) -> None:
        row = self._unused.pop() if self._unused else len(self.rows)
        if row == len(self.lengths):
            self.lengths, self.counts, self.last, self._starts, self._room = (
                np.concatenate([x, np.zeros_like(x)])
                for x in (self.lengths, self.counts, self.last, self._starts, self._room)
            )
        self._place(row, pages)
        self.rows[seq] = row
        self.lengths[row], self.counts[row] = length, len(pages)
        self.last[row] = pages[-1] if len(pages) else -1

    def remove(self, seq: int) -> Pages:
        """Its pages."""
        pages = self.pages(seq)
        self._batch = None
        self._unused.append(self.rows.pop(seq))
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
            rows = np.array([self.row(seq, "seqs") for seq in named], np.int64)
            if len(set(named)) != len(named):
                raise ValueError("seqs must name each sequence once, got one twice; add up its counts")
            if type(seqs) is not list:
                return tuple(named), rows
            self._batch = named.copy(), tuple(named), rows
        return self._batch[1:]

    def pages(self, seq: int, name: str = "seq") -> Pages:
        """The page list of one sequence: a copy, read-only."""
        pages = self._view(self.row(seq, name)).copy()
        pages.flags.writeable = False
        return pages

    def grow(self, rows: Ints, growth: Ints, pages: Pages) -> None:
        """Add `growth` pages at the end of each, all of them one after another in `pages`."""
        counts = self.counts[rows]
        short = counts + growth > self._room[rows]
        if short.any():
            for row, more in zip(rows[short].tolist(), growth[short].tolist(), strict=True):
                self._place(row, self._view(row).copy(), more)
        at = self._starts[rows] + counts
        if len(pages) == len(rows):
            self._pages[at] = pages
            self.last[rows] = pages
        else:
            ends = np.cumsum(growth)
            self._pages[np.repeat(at - (ends - growth), growth) + np.arange(len(pages))] = pages
            self.last[rows] = pages[ends - 1]
        self.counts[rows] = counts + growth

    def replace_last(self, rows: Ints, pages: Ints) -> None:
        self._pages[self._starts[rows] + self.counts[rows] - 1] = pages
        self.last[rows] = pages

    def _view(self, row: int) -> Pages:
        start = self._starts[row]
        return self._pages[start : start + self.counts[row]]

    def _place(self, row: int, pages: Pages, more: int = 0) -> None:
        """Put a list at the end of the array, with room for `more` and as much again."""
        room = max(8, 2 * (len(pages) + more))
        if self._end + room > len(self._pages):
            # Those that live move together into a new array. It is twice as large as they are, so this is rare.
            living = [r for r in self.rows.values() if r != row]
            old = [self._view(r).copy() for r in living]
            self._pages = np.empty(2 * (int(self._room[living].sum()) + room), np.int32)
            self._end = 0
            for r, kept in zip(living, old, strict=True):
                self._pages[self._end : self._end + len(kept)] = kept
                self._starts[r] = self._end
                self._end += int(self._room[r])
        self._pages[self._end : self._end + len(pages)] = pages
        self._starts[row], self._room[row] = self._end, room
        self._end += room


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
