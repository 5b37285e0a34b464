"""The pool of pages: who holds which, and which free ones to hand out next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

LATE = 64  # reservations that are noted before the pages' fill is set
SCAN = 1024  # pages looked at together when single free ones are wanted
ONE = np.int32(1)  # of the references' own dtype, or add.at is twenty times slower
_NONE = np.empty(0, np.int64)


class PagePool:
    """Reference counts of `num_pages` pages. Page lists given to it never name a page twice."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free_pages = num_pages
        self.refs = np.zeros(num_pages, np.int32)  # 0 = free
        self.freed = np.zeros(num_pages, np.int64)  # `losses` when the page was freed last
        self.losses = 0  # counts calls that took pages from a holder: while it stands still, slots cannot go stale
        self._fill = np.zeros(num_pages, np.int32)
        self._late: list[Ints] = []  # of reservations that are not in _fill yet, the oldest first: see reserve()
        self._size = 1  # tokens of a page
        self._losses = 0  # when pages that are free had no fill
        self._lowest = 0  # no page below is free
        self._known: Ints = _NONE  # pages from there on that were free, no free one between them left out

    @property
    def fill(self) -> Pages:
        """(num_pages,): tokens reserved in the page."""
        self._settle()
        if self._losses != self.losses:
            self._losses = self.losses
            self._fill[self.refs == 0] = 0
        return self._fill

    def stats(self, page_size: int, bytes_per_token: int, tokens_logical: int) -> CacheStats:
        """What PagedKVCache.stats() tells of pages of so many tokens, each of so many bytes."""
        used = self.num_pages - self.free_pages
        return CacheStats(
            pages_total=self.num_pages,
            pages_used=used,
            pages_shared=int((self.refs > 1).sum()),
            tokens_stored=int(self.fill.sum()),
            tokens_logical=tokens_logical,
            bytes_total=self.num_pages * page_size * bytes_per_token,
            bytes_used=used * page_size * bytes_per_token,
            page_size=page_size,
        )

    def reserve(self, index: Ints, size: int) -> None:
        """Take note of the last token of each page that grew, at page · size + offset. Its fill is set when somebody
        looks, and after some calls."""
        self._size = size
        self._late.append(index)
        if len(self._late) > LATE:
            self._settle()

    def _settle(self) -> None:
        if self._late:
            index = np.concatenate(self._late)
            self._late.clear()
            pages = index // self._size
            index -= pages * self._size
            index += 1
            self._fill[pages] = index  # of a page that is named again the last one counts

    def retain(self, pages: Pages) -> None:
        """Hold the pages once more."""
        self.free_pages -= int((self.refs[pages] == 0).sum())
        self.refs[pages] += 1

    def share(self, pages: Pages) -> None:
        """retain() of pages that somebody holds."""
        self.refs[pages] += ONE

    def retain_lists(self, lead: Pages, times: int, rest: Ints) -> None:
        """Hold pages that somebody holds `times` more: those of `lead`, named once each, and once more for every time
        that it is named each page of `rest`."""
        self.refs[lead.astype(np.int64)] += np.int32(times)
        if len(rest):
            np.add.at(self.refs, rest, ONE)

    def release(self, pages: Pages | Ints) -> None:
        """Hold the pages once less; those that nobody holds are free again."""
        self.release_lists(pages, 1, _NONE)

    def release_lists(self, lead: Pages | Ints, times: int, rest: Ints) -> None:
        """The reverse of retain_lists(); pages that nobody holds are free again."""
        self.losses += 1
        if len(lead):
            lead = lead.astype(np.int64)
            left = self.refs[lead] - np.int32(times)
            self.refs[lead] = left
            if np.count_nonzero(left) < len(left):
                self._note_free(lead[left == 0])
        if len(rest):
            single = self.refs.take(rest) == 1  # held, and so named, once
            own = rest if np.count_nonzero(single) == len(rest) else rest[single]
            self.refs[own] = 0
            self._note_free(own)
            if len(own) < len(rest):
                rest = rest[~single]
                np.subtract.at(self.refs, rest, ONE)
                freed = rest[self.refs.take(rest) == 0]
                if len(freed):
                    self._note_free(np.unique(freed))

    def leave(self, pages: Ints) -> None:
        """Hold the pages once less for every time that they are named; others hold them still."""
        self.losses += 1
        np.subtract.at(self.refs, pages, ONE)

    def _note_free(self, pages: Pages | Ints) -> None:
        if len(pages):
            self.freed[pages] = self.losses
            self.free_pages += len(pages)
            self._lowest = min(self._lowest, int(np.minimum.reduce(pages)))
            self._known = _NONE

    def take(self, last_pages: Ints, wanted: Ints) -> Ints:
        """Hold `wanted` free pages, one at least, for each sequence, whose last page is given or -1; enough are free.

        The pages of all, one sequence after another. Consecutive pages are read without a copy. So a sequence gets the
        pages right after its last one if they are free, else the first free run that is long enough, else the longest
        runs, so that the pieces are few.
        """
        total = int(np.add.reduce(wanted))
        assert total <= self.free_pages
        self.free_pages -= total
        if total == len(wanted):  # one each, as in a decode step
            return self._take_ones(last_pages)
        served = self._take_next(last_pages, wanted)
        (others,) = (~served).nonzero()
        (owners,) = served.nonzero()
        starts, lengths = last_pages[owners] + 1, wanted[owners]
        if len(others):
            runs = np.array(self._find_runs(others.tolist(), wanted[others].tolist()), np.int64)
            owners = np.concatenate([owners, runs[:, 0]])
            order = owners.argsort(kind="stable")
            starts = np.concatenate([starts, runs[:, 1]])[order]
            lengths = np.concatenate([lengths, runs[:, 2]])[order]
        pages = ranges(starts, lengths)
        self.refs[pages] = 1
        return pages

    def _take_next(self, last_pages: Ints, wanted: Ints) -> npt.NDArray[np.bool_]:
        """Take the pages right after the last one where all that are wanted are free; for which sequences they are."""
        starts = last_pages + 1
        served = (last_pages >= 0) & (starts + wanted <= self.num_pages)
        served &= self.refs.take(starts, mode="clip") == 0
        (at,) = served.nonzero()
        if len(at):
            pages, counts = ranges(starts[at], wanted[at]), wanted[at]
            at = at[np.maximum.reduceat(self.refs[pages], np.cumsum(counts) - counts) == 0]
            # Ranges overlap only where sequences share their last page; the first of these has what comes after it.
            if len(set(starts[at].tolist())) < len(at):
                at = at[np.unique(starts[at], return_index=True)[1]]
            self.refs[ranges(starts[at], wanted[at])] = 1
            served[:] = False
            served[at] = True
        return served

    def _find_runs(self, owners: list[int], wanted: list[int]) -> list[tuple[int, int, int]]:
        """(owner, first page, pages) of free runs that give each owner what it wants. They are not held yet."""
        found: list[tuple[int, int, int]] = []
        holes = _Holes(self.refs, self._lowest)
        for owner, count in zip(owners, wanted, strict=True):
            while count:
                start, length = holes.cut(count)
                found.append((owner, start, length))
                count -= length
        self._lowest = holes.lowest()
        return found

    def _take_ones(self, last_pages: Ints) -> Ints:
        """take() of one page for each, without a loop over them."""
        pages = last_pages + 1
        # The page after the last of all is out of range, and the one after -1 is no neighbour.
        free = self.refs.take(pages, mode="clip") == 0
        free &= (last_pages >= 0) & (pages < self.num_pages)
        (at,) = free.nonzero()
        if len(at):
            if len(set(pages[at].tolist())) < len(at):  # they share their last page, and the first has the one after it
                at = at[np.unique(pages[at], return_index=True)[1]]
                free[:] = False
                free[at] = True
            self.refs[pages[at]] = 1
        elif len(pages):
            return self._take_lowest(len(pages))
        if len(at) < len(pages):
            pages[~free] = self._take_lowest(len(pages) - len(at))
        return pages

    def take_single(self, last_pages: Ints) -> Ints:
        """take() of one page for each."""
        self.free_pages -= len(last_pages)
        return self._take_ones(last_pages)

    def take_next(self, last_pages: Ints) -> Ints:
        """take() of one page for each of sequences that have a last page, each another one."""
        self.free_pages -= len(last_pages)
        pages = last_pages + 1
        free = self.refs.take(pages, mode="clip") == 0  # after the last of all: that page again, which is held
        found = int(np.count_nonzero(free))
        if not found and len(pages):
            return self._take_lowest(len(pages))
        if found < len(pages):
            self.refs[pages[free]] = 1
            pages[~free] = self._take_lowest(len(pages) - found)
        else:
            self.refs[pages] = 1
        return pages

    def _take_lowest(self, count: int) -> Ints:
        known = self._known
        if len(known) >= count:  # some of them may have been taken since they were found
            free = known[:count]
            if not np.count_nonzero(self.refs[free]):
                self._known = known[count:]
                self.refs[free] = 1
                self._lowest = int(free[-1]) + 1
                return free
        self._known = _NONE
        found: list[Ints] = []
        while count:
            free = (self.refs[self._lowest : self._lowest + SCAN] == 0).nonzero()[0]
            free += self._lowest
            if len(free) > count:
                free, self._known = free[:count], free[count:]
            self.refs[free] = 1
            found.append(free)
            count -= len(free)
            self._lowest = self._lowest + SCAN if count else int(free[-1]) + 1
        return found[0] if len(found) == 1 else np.concatenate(found) if found else _NONE


class _Holes:
    """Runs of free pages in their order, found as far as they are asked for; no page below `lowest` is free."""

    def __init__(self, refs: Pages, lowest: int) -> None:
        self._refs, self._scanned, self._span = refs, lowest, 4 * SCAN
        self._starts, self._lengths = np.empty(0, np.int64), np.empty(0, np.int64)
        self._known: dict[int, int] = {}  # the first run of so many pages, which is never one before the last found

    def cut(self, count: int) -> tuple[int, int]:
        """The first page and the pages of what goes to somebody who wants `count`, which is no longer free."""
        at = self._fitting(count)
        start, free = int(self._starts[at]), int(self._lengths[at])
        length = min(count, free)
        self._starts[at], self._lengths[at] = start + length, free - length
        return start, length

    def lowest(self) -> int:
        """A page below which none is free."""
        left = self._starts[self._lengths > 0]
        return int(left[0]) if len(left) else self._scanned

    def _fitting(self, count: int) -> int:
        """The first run of at least `count` pages, else the longest."""
        known = self._known.get(count, 0)
        if known < len(self._lengths) and self._lengths[known] >= count:
            return known
        while True:
            fits = self._lengths[known:] >= count
            if len(fits) and fits[at := int(fits.argmax())]:
                self._known[count] = known + at
                return known + at
            known = len(self._lengths)
            if not self._scan():
                return int(self._lengths.argmax())

    def _scan(self) -> bool:
        """Find more runs; False if there are none."""
        low, end = self._scanned, len(self._refs)
        if low == end:
            return False
        high = min(low + self._span, end)
        self._span *= 2
        used = np.ones(high - low + 2, bool)
        np.not_equal(self._refs[low:high], 0, out=used[1:-1])
        edges = (used[1:] != used[:-1]).nonzero()[0] + low
        starts, stops = edges[0::2], edges[1::2]
        self._scanned = high
        if high < end and len(stops) and stops[-1] == high:  # it may go on: the next scan finds the whole of it
            self._scanned = int(starts[-1])
            starts, stops = starts[:-1], stops[:-1]
        self._starts = np.concatenate([self._starts, starts])
        self._lengths = np.concatenate([self._lengths, stops - starts])
        return True


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """start, start + 1, … of each, `lengths` numbers, one range after another."""
    ends = lengths.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    numbers: Ints = (starts - ends + lengths).repeat(lengths)
    numbers += np.arange(total)
    return numbers


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
