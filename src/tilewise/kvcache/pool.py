"""The pool of pages: who holds which, and which free ones to hand out next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

SCAN = 1024  # pages looked at together when single free ones are wanted


class PagePool:
    """Reference counts of `num_pages` pages. Page lists given to it never name a page twice."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free_pages = num_pages
        self.refs = np.zeros(num_pages, np.int32)  # 0 = free
        self.fill = np.zeros(num_pages, np.int32)  # tokens reserved in the page
        self.generation = np.zeros(num_pages, np.int64)  # counts how often the page was freed
        self.losses = 0  # counts calls that took pages from a holder: while it stands still, slots cannot go stale
        self._lowest = 0  # no page below is free

    def retain(self, pages: Pages) -> None:
        """Hold the pages once more."""
        self.free_pages -= int((self.refs[pages] == 0).sum())
        self.refs[pages] += 1

    def release(self, pages: Pages | Ints) -> None:
        """Hold the pages once less; those that nobody holds are free again."""
        self.losses += 1
        self.refs[pages] -= 1
        freed = pages[self.refs[pages] == 0]
        if len(freed):
            self.generation[freed] += 1
            self.fill[freed] = 0
            self.free_pages += len(freed)
            self._lowest = min(self._lowest, int(freed.min()))

    def take(self, last_pages: Ints, wanted: Ints) -> Pages:
        """Hold `wanted` free pages, one at least, for each sequence, whose last page is given or -1; enough are free.

        The pages of all, one sequence after another. Consecutive pages are read without a copy. So a sequence gets the
        pages right after its last one if they are free, else the first free run that is long enough, else the longest
        runs, so that the pieces are few.
        """
        total = int(wanted.sum())
        assert total <= self.free_pages
        self.free_pages -= total
        if total == len(wanted):  # one each, as in a decode step
            return self._take_ones(last_pages)
        taken: list[list[tuple[int, int]]] = [[] for _ in wanted]  # runs [start, stop)
        missing = wanted.tolist()
        for i, (last, count) in enumerate(zip(last_pages.tolist(), missing, strict=True)):
            start, stop = last + 1, last + 1 + count
            if last >= 0 and stop <= self.num_pages and not self.refs[start:stop].any():
                taken[i].append((start, stop))
                self.refs[start:stop] = 1
                missing[i] = 0
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
        return np.concatenate([np.arange(start, stop, dtype=np.int32) for runs in taken for start, stop in runs])

    def _take_ones(self, last_pages: Ints) -> Pages:
        """take() of one page for each, without a loop over them."""
        pages = last_pages + 1
        # The page after the last of all is out of range, and the one after -1 is no neighbour.
        taken = self.refs.take(pages, mode="clip") > 0
        taken |= (pages == 0) | (pages == self.num_pages)
        if not taken.all():
            (at,) = (~taken).nonzero()
            if len(set(pages[at].tolist())) < len(at):  # they share their last page, and the first has the one after it
                at = at[np.unique(pages[at], return_index=True)[1]]
                taken[:] = True
                taken[at] = False
            self.refs[pages[at]] = 1
        pages[taken] = self._take_lowest(int(np.count_nonzero(taken)))
        return pages.astype(np.int32)

    def _take_lowest(self, count: int) -> Ints:
        found: list[Ints] = []
        while count:
            free = (self.refs[self._lowest : self._lowest + SCAN] == 0).nonzero()[0][:count]
            free += self._lowest
            self.refs[free] = 1
            found.append(free)
            count -= len(free)
            self._lowest = self._lowest + SCAN if count else int(free[-1]) + 1
        return np.concatenate(found) if found else np.empty(0, np.int64)


@dataclass(frozen=True)
class CacheStats:
    """What PagedKVCache.stats() counts. `tokens_logical` counts a token once per sequence, `tokens_stored` once."""

    pages_total: int
    pages_used: int
    pages_shared: int
    tokens_stored: int
    tokens_logical: int
    bytes_total: int
    bytes_used: int
    page_size: int

    @property
    def pages_free(self) -> int:
        """Pages that nobody holds."""
        return self.pages_total - self.pages_used

    @property
    def utilisation(self) -> float:
        """Stored tokens over the room in the used pages; 1.0 for an empty cache, which wastes nothing."""
        return self.tokens_stored / (self.pages_used * self.page_size) if self.pages_used else 1.0

    def __str__(self) -> str:
        return (
            f"{self.pages_used} of {self.pages_total} pages of {self.page_size} tokens used, "
            f"{self.pages_shared} shared; "
            f"{self.tokens_stored} tokens stored serve {self.tokens_logical} tokens of sequences; "
            f"{self.bytes_used / 2**20:.1f} of {self.bytes_total / 2**20:.1f} MiB, utilisation {self.utilisation:.0%}"
        )


class GrowingArray:
    """A one-dimensional array that is appended to, with room to spare so that one token per step costs no copy.

    Views handed out earlier stay what they were: values in use are never changed in place.
    """

    __slots__ = ("_data", "size")

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._data = values.copy()
        self.size = len(values)

    def append(self, values: npt.NDArray[Any]) -> None:
        size = self.size + len(values)
        if size > len(self._data):
            self._grow(size)
        self._data[self.size : size] = values
        self.size = size

    def push(self, value: int) -> None:
        """append() of one value."""
        if self.size == len(self._data):
            self._grow(self.size + 1)
        self._data[self.size] = value
        self.size += 1

    def _grow(self, size: int) -> None:
        data = np.empty(max(size, 2 * len(self._data), 8), self._data.dtype)
        data[: self.size] = self._data[: self.size]
        self._data = data

    def view(self) -> npt.NDArray[Any]:
        """The values so far, read-only, without a copy."""
        values = self._data[: self.size]
        values.flags.writeable = False
        return values
