"""The pool of pages: who holds which, and which free ones to hand out next."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class PagePool:
    """Reference counts of `num_pages` pages. Page lists given to it never name a page twice."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free_pages = num_pages
        self.refs = np.zeros(num_pages, np.int32)  # 0 = free
        self.fill = np.zeros(num_pages, np.int32)  # tokens reserved in the page
        self.generation = np.zeros(num_pages, np.int64)  # counts how often the page was freed

    def retain(self, pages: Pages) -> None:
        """Hold the pages once more."""
        self.free_pages -= int((self.refs[pages] == 0).sum())
        self.refs[pages] += 1

    def release(self, pages: Pages) -> None:
        """Hold the pages once less; those that nobody holds are free again."""
        self.refs[pages] -= 1
        freed = pages[self.refs[pages] == 0]
        self.generation[freed] += 1
        self.fill[freed] = 0
        self.free_pages += len(freed)

    def take(self, last_pages: list[int], wanted: list[int]) -> list[Pages]:
        """Hold `wanted` free pages for each sequence, whose last page is given or -1; enough pages must be free.

        Consecutive pages are read without a copy. So a sequence gets the pages right after its last one if they are
        free, else the first free run that is long enough, else the longest runs, so that the pieces are few.
        """
        assert sum(wanted) <= self.free_pages
        taken: list[list[tuple[int, int]]] = [[] for _ in wanted]  # runs [start, stop)
        missing = [0] * len(wanted)
        for i, (last, count) in enumerate(zip(last_pages, wanted, strict=True)):
            start, stop = last + 1, last + 1 + count
            if count and last >= 0 and stop <= self.num_pages and not self.refs[start:stop].any():
                taken[i].append((start, stop))
                self.refs[start:stop] = 1
            else:
                missing[i] = count
        if any(missing):
            edges = np.flatnonzero(np.diff(self.refs == 0, prepend=False, append=False))
            starts, lengths = edges[0::2].copy(), edges[1::2] - edges[0::2]
            for runs, count in zip(taken, missing, strict=True):
                while count:
                    fits = lengths >= count
                    at = int(fits.argmax())
                    if not fits[at]:
                        at = int(lengths.argmax())
                    start, length = int(starts[at]), min(count, int(lengths[at]))
                    runs.append((start, start + length))
                    self.refs[start : start + length] = 1
                    starts[at] += length
                    lengths[at] -= length
                    count -= length
        self.free_pages -= sum(wanted)
        nothing = np.empty(0, np.int32)
        spelled = [[np.arange(start, stop, dtype=np.int32) for start, stop in runs] for runs in taken]
        return [np.concatenate(runs) if len(runs) > 1 else (runs or [nothing])[0] for runs in spelled]


class GrowingArray:
    """A one-dimensional array that is appended to, with room to spare so that a token a step costs no copy.

    Views handed out earlier stay what they were: values in use are never changed in place.
    """

    __slots__ = ("_data", "size")

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._data = values.copy()
        self.size = len(values)

    def append(self, values: npt.NDArray[Any]) -> None:
        size = self.size + len(values)
        if size > len(self._data):
            data = np.empty(max(size, 2 * len(self._data), 8), self._data.dtype)
            data[: self.size] = self._data[: self.size]
            self._data = data
        self._data[self.size : size] = values
        self.size = size

    def replace_last(self, value: int) -> None:
        self._data = self._data.copy()
        self._data[self.size - 1] = value

    def view(self) -> npt.NDArray[Any]:
        """The values so far, read-only, without a copy."""
        values = self._data[: self.size]
        values.flags.writeable = False
        return values


def page_step(table: Pages) -> int | None:
    """Pages from one list's first to the next one's, if each list's pages are consecutive and all the steps are equal.

    table (n, c), one list a row. Such a table is one strided view of the storage; None means it must be gathered.
    """
    if not table.size:
        return 0
    first = table[:, 0].astype(np.int64)
    step = int(first[1] - first[0]) if len(first) > 1 else 0
    regular = int(first[0]) + step * np.arange(table.shape[0])[:, None] + np.arange(table.shape[1])
    return step if step >= 0 and np.array_equal(table, regular) else None
