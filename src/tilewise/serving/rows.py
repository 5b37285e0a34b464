"""The samples that run: one row of arrays each, so that what a step does for all of them is a few array operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .requests import FinishReason, Sample, Token
from .sampling import Kind, parameters, uniforms_of

_token = partial(tuple.__new__, Token)  # from a tuple of its fields; a call by name takes three times as long


class Rows:
    """Up to `capacity` running samples. Whoever leaves is replaced by the last one, so that others keep their rows.

    samples and seqs: of each row, its sample and its sequence in the cache. latest: (capacity,) int64, the last token
    of each, which the next step feeds. params: (4, capacity) float64, see sampling.parameters(). priorities:
    (capacity,) int64.
    """

    def __init__(self, capacity: int) -> None:
        self.samples: list[Sample] = []
        self.seqs: list[int] = []
        self.latest, self.priorities = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self.params = np.zeros((4, capacity))
        self._keys = np.zeros((4, capacity), np.uint64)  # what the next token is drawn with, see Sample.draw
        self._left = np.zeros(capacity, np.int64)  # tokens until the most that were asked for
        self._looks = np.zeros(capacity, bool)  # for stop lists or texts, at every token
        self._kinds = np.zeros(capacity, np.int64)
        self._ends: set[int] = set()  # tokens that end one of those that run, or ended one that did
        # For take(), which goes through all rows: each one's list of tokens, and which sample of which request it is.
        self._adds: list[Callable[[int], None]] = []
        self._requests: list[int] = []
        self._numbers: list[int] = []
        lists = (self.samples, self.seqs, self._adds, self._requests, self._numbers)
        self._held: tuple[list[Any], ...] = lists

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def kind(self) -> Kind:
        """What the choice of the next tokens has to do."""
        return Kind(int(self._kinds[: len(self)].max(initial=0)))

    def add(self, sample: Sample, seq: int) -> None:
        """A sample, which has a token at least, begins to run."""
        row, request = len(self.samples), sample.request
        sampling, ends = request.sampling, request.ends
        sample.row = row
        self.samples.append(sample)
        self.seqs.append(seq)
        self._adds.append(sample.tokens.append)
        self._requests.append(request.number)
        self._numbers.append(sample.number)
        self.latest[row], self.priorities[row] = sample.tokens[-1], request.priority
        self.params[:, row] = parameters([sampling])[:, 0]
        self._keys[:, row] = sample.draw
        self._left[row] = ends.max_new_tokens - len(sample.tokens)
        self._looks[row] = bool(ends.stop_tokens or ends.stop_texts)
        self._kinds[row] = sampling.kind
        self._ends |= ends.end_tokens

    def remove(self, sample: Sample) -> int:
        """It runs no more; its sequence, which is the caller's to release."""
        row, last = sample.row, len(self.samples) - 1
        seq = self.seqs[row]
        if row != last:
            for held in self._held:
                held[row] = held[last]
            self.samples[row].row = row
            for array in (self.latest, self.priorities, self._left, self._looks, self._kinds):
                array[row] = array[last]
            self.params[:, row], self._keys[:, row] = self.params[:, last], self._keys[:, last]
        for held in self._held:
            held.pop()
        sample.row = -1
        if not self.samples:
            self._ends.clear()
        return seq

    def uniforms(self) -> npt.NDArray[np.float64]:
        """(rows,) numbers in [0, 1) that the next tokens are drawn with."""
        return uniforms_of(self._keys[:, : len(self)])

    def take(self, chosen: Sequence[int]) -> tuple[list[Token], list[Sample]]:
        """Give each row its next token; the tokens, and those who are done, who have not left yet."""
        count = len(self.samples)
        self.latest[:count] = chosen
        self._keys[3, :count] += np.uint64(1)
        left = self._left[:count]
        left -= 1
        for add, token in zip(self._adds, chosen, strict=True):
            add(token)
        ending = set(np.flatnonzero((left <= 0) | self._looks[:count]).tolist())
        if not self._ends.isdisjoint(chosen):
            ending.update(row for row, token in enumerate(chosen) if token in self._ends)
        reasons: list[FinishReason | None] = [None] * count
        done = []
        for row in sorted(ending):
            sample = self.samples[row]
            reasons[row] = sample.finish_reason = sample.request.ends.reason(sample.tokens)
            if sample.finish_reason is not None:
                done.append(sample)
        found: list[Token] = list(map(_token, zip(self._requests, self._numbers, chosen, reasons, strict=True)))
        return found, done
