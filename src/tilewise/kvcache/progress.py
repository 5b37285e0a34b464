"""What the sequences of a prefix tree hold: the ids of their tokens, and how many of these are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tilewise.kvcache.pool import Ints, Pages, ranges
from tilewise.kvcache.slots import Slots

if TYPE_CHECKING:
    from tilewise.kvcache.extending import ExtendPlan
    from tilewise.kvcache.paged import PagedKVCache


Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Step:
    """Tokens [starts, ends) of the sequences in these rows, which are written when `slots` are complete."""

    slots: Slots
    rows: Ints
    births: Ints  # of the sequences that had the rows
    starts: Ints
    ends: Ints


class Progress:
    """By rows of the cache, so that a step over hundreds of sequences is a few array operations.

    ids: (num_pages, page_size) int64, the token ids in the pages of the tree's sequences. Who shares a page shares its
    tokens. complete (rows,): how many first tokens of a sequence are written in every layer. limit (rows,): how many
    must be before the next page can enter the tree.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self.ids = np.empty((cache.num_pages, cache.page_size), np.int64)
        self.complete, self.limit, self._births = (np.zeros(0, np.int64) for _ in range(3))
        self._born = 0  # counts sequences; the birth of a row without one of the tree's is 0
        self._steps: list[Step] = []  # those that are not complete, oldest first
        self.untold: set[Slots] = set()  # whose tokens have no ids yet
        self._run: tuple[Ints, Ints] = self._births, self._births  # rows of a run, all the tree's, and their births

    def begin(self, rows: Ints, complete: Ints | int, limit: Ints | int) -> None:
        """New sequences."""
        room = len(self._cache.sequences.lengths)
        if len(self.complete) < room:
            self.complete, self.limit, self._births = (
                np.concatenate([x, np.zeros(room - len(x), np.int64)])
                for x in (self.complete, self.limit, self._births)
            )
        self.complete[rows], self.limit[rows] = complete, limit
        self._births[rows] = np.arange(self._born + 1, self._born + 1 + len(rows))
        self._born += len(rows)

    def end(self, rows: Ints) -> None:
        """These sequences are no more; what they did not write is forgotten."""
        self._births[rows] = 0
        if self._steps:
            self._steps = [step for step in self._steps if self._waits(step).any()]

    def all_of_the_tree(self, plan: ExtendPlan) -> bool:
        """Whether the sequences that a step extends are all the tree's."""
        rows = plan.rows
        if plan.run is not None and rows is self._run[0]:
            return True  # or one of them would have ended, and the batch would have other rows
        if len(rows) and int(np.maximum.reduce(rows)) >= len(self._births):
            return False
        births = self._births[rows]
        if np.count_nonzero(births) < len(rows):
            return False
        self._run = rows, births
        return True

    def add(self, slots: Slots, plan: ExtendPlan) -> Step | None:
        """Take note of the tokens that a step has added to sequences, `slots`; None if there are none."""
        rows, counts = plan.rows, plan.more
        if plan.run is not None and rows is self._run[0]:
            step = Step(slots, rows, self._run[1], slots.host_positions, plan.run.lengths)
            self._steps.append(step)
            return step
        if np.count_nonzero(counts) < len(counts):
            (at,) = counts.nonzero()
            rows, counts = rows[at], counts[at]
        if not len(rows):
            return None
        ends = self._cache.sequences.lengths[rows]
        step = Step(slots, rows, self._births[rows], ends - counts, ends)
        self._steps.append(step)
        return step

    def advance(self) -> Ints:
        """Some slots are complete now: count what they wrote. The rows of which a page can enter the tree."""
        ready: list[Ints] = []
        left: list[Step] = []
        for step in self._steps:
            waits = self._waits(step)
            if step.slots.complete and step.slots not in self.untold:
                # Tokens count when all before them do: those of an earlier step may be written later.
                waits &= self.complete[step.rows] == step.starts
                if np.count_nonzero(waits) == len(waits):  # and then none does any more
                    self.complete[step.rows] = step.ends
                    ready.append(step.rows[step.ends >= self.limit[step.rows]])
                    continue
                rows = step.rows[waits]
                self.complete[rows] = step.ends[waits]
                ready.append(rows[self.complete[rows] >= self.limit[rows]])
                waits = self._waits(step)
            if np.count_nonzero(waits):
                left.append(step)
        self._steps = left
        if len(ready) == 1:
            return ready[0]
        return np.array(list(dict.fromkeys(row for rows in ready for row in rows.tolist())), np.int64)

    def tell(self, slots: Slots, tokens: Tokens) -> None:
        """The ids of the tokens of `slots`, one of each sequence, which had none so far."""
        self.untold.discard(slots)
        step = next((step for step in self._steps if step.slots is slots), None)
        if step is None:  # all of these sequences are no more
            return
        alive = self._births[step.rows] == step.births
        rows, starts, size = step.rows[alive], step.starts[alive], self._cache.page_size
        self.ids[self._cache.sequences.table[rows, starts // size], starts % size] = tokens[alive]

    def full_pages(self, rows: Ints) -> Iterator[tuple[int, Tokens, Pages]]:
        """(row, tokens, pages) of what can enter the tree of each of these: whole pages, the first up to `limit`."""
        size, table = self._cache.page_size, self._cache.sequences.table
        first, stop = self.limit[rows] // size - 1, self.complete[rows] // size
        count = stop - first
        pages = table[np.repeat(rows, count), ranges(first, count)]
        tokens = self.ids[pages].reshape(-1)
        start = 0
        for row, end in zip(rows.tolist(), np.cumsum(count).tolist(), strict=True):
            yield row, tokens[start * size : end * size], pages[start:end]
            start = end

    def length(self, row: int) -> int:
        """All tokens of the sequence in this row."""
        return int(self._cache.sequences.lengths[row])

    def waiting(self, row: int) -> list[Step]:
        """The steps of which this sequence has tokens that do not count as written, oldest first."""
        return [step for step in self._steps if (self._waits(step) & (step.rows == row)).any()]

    def check_told(self, row: int) -> None:
        """ValueError if there are tokens without ids."""
        if self.untold and any(step.slots in self.untold for step in self.waiting(row)):
            raise ValueError("seq has a token that extend() was not told; call tell() before it is forked")

    def fork(self, row: int, rows: Ints) -> list[Step]:
        """Sequences `rows` were made with the tokens of `row`: the steps that they wait for, too."""
        self.begin(rows, self.complete[row], self.limit[row])
        births = self._births[rows]
        steps = []
        for step in self.waiting(row):
            at = int((step.rows == row).argmax())
            starts, ends = (np.full(len(rows), x[at]) for x in (step.starts, step.ends))
            steps.append(Step(step.slots, rows, births, starts, ends))
        self._steps += steps
        return steps

    def copy_ids(self, plan: ExtendPlan, old: Ints) -> None:
        """After an extend() which copied last pages, `old` being those of all its sequences before."""
        assert plan.copies is not None
        sequences, (at,) = self._cache.sequences, plan.copies.nonzero()
        rows = plan.rows[at]
        new = sequences.table[rows, sequences.counts[rows] - 1 - plan.growth[at]]
        self.ids[new] = self.ids[old[at]]

    def tokens(self, row: int, start: int, stop: int) -> Tokens:
        """The ids of tokens [start, stop) of the sequence in this row; a copy."""
        size = self._cache.page_size
        first = start // size
        pages = self._cache.sequences.table[row, first : -(-stop // size)]
        ids: Tokens = self.ids[pages].reshape(-1)[start - first * size : stop - first * size]
        return ids

    def _waits(self, step: Step) -> npt.NDArray[np.bool_]:
        """Which tokens of a step do not count as written; those of sequences that are no more are not waited for."""
        waits: npt.NDArray[np.bool_] = self._births[step.rows] == step.births
        waits &= self.complete[step.rows] < step.ends
        return waits
