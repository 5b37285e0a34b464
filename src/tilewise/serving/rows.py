"""The samples that run: one row of arrays each, so that what a step does for all of them is a few array operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .requests import FinishReason, Sample, Token
from .sampling import Kind, parameters, uniforms_of

_parameters = lru_cache(1024)(lambda sampling: parameters([sampling])[:, 0])
_token = partial(tuple.__new__, Token)  # from a tuple of its fields; a call by name takes three times as long


class Rows:
    """Up to `capacity` running samples. Whoever leaves is replaced by the last one, so that others keep their rows.

    samples and seqs: of each row, its sample and its sequence in the cache. sources: (capacity,) int64, where the last
    token of each, which the next step feeds, stands among those that were chosen last. params: (4, capacity) float64,
    see sampling.parameters(). priorities: (capacity,) int64.
    """

    def __init__(self, capacity: int) -> None:
        self.samples: list[Sample] = []
        self.seqs: list[int] = []
        self.sources, self.priorities = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self.params = np.zeros((4, capacity))
        self._keys = np.zeros((4, capacity), np.uint64)  # what the next token is drawn with, see Sample.draw
        self._left = np.zeros(capacity, np.int64)  # tokens until the most that were asked for
        self._looks = np.zeros(capacity, bool)  # for stop lists or texts, at every token
        self._kinds = np.zeros(capacity, np.int64)
        self._ends: set[int] = set()  # tokens that end one of those that run, or ended one that did
        # For Flight.land(), which goes through all rows: each one's list of tokens, and whose it is.
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
        """A sample, whose next token is that of the step that is just computed, begins to run."""
        row, request = len(self.samples), sample.request
        sampling, ends = request.sampling, request.ends
        sample.row = row
        self.samples.append(sample)
        self.seqs.append(seq)
        self._adds.append(sample.tokens.append)
        self._requests.append(request.number)
        self._numbers.append(sample.number)
        self.priorities[row] = request.priority
        self.params[:, row] = _parameters(sampling)
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
            for array in (self.sources, self.priorities, self._left, self._looks, self._kinds):
                array[row] = array[last]
            self.params[:, row], self._keys[:, row] = self.params[:, last], self._keys[:, last]
        for held in self._held:
            held.pop()
        sample.row = -1
        if not self.samples:
            self._ends = set()
        return seq

    def uniforms(self) -> npt.NDArray[np.float64]:
        """(rows,) numbers in [0, 1) that the next tokens are drawn with."""
        return uniforms_of(self._keys[:, : len(self)])

    def fly(self) -> tuple[Flight, list[Sample]]:
        """A step is computed that chooses the next token of every row, in their order: what is to become of the tokens,
        and whose last ones these are, for they are as many as were asked for."""
        count = len(self.samples)
        self.sources[:count] = np.arange(count)
        self._keys[3, :count] += np.uint64(1)
        left = self._left[:count]
        left -= 1
        last = left <= 0
        lists = self.samples.copy(), self._adds.copy(), self._requests.copy(), self._numbers.copy()
        flight = Flight(*lists, last | self._looks[:count], self._ends)
        return flight, [self.samples[row] for row in np.flatnonzero(last).tolist()]


@dataclass(frozen=True, eq=False)
class Flight:
    """Tokens that are on their way to samples: of each, how it takes one, its request and its number.

    looks: (n,), whether a token may be a sample's last one whatever it is. ends: tokens that may be one.
    """

    samples: list[Sample]
    adds: list[Callable[[int], None]]
    requests: list[int]
    numbers: list[int]
    looks: npt.NDArray[np.bool_]
    ends: set[int]

    def land(self, chosen: list[int]) -> tuple[list[Token], list[Sample]]:
        """Give each sample its token, unless it has ended meanwhile; the tokens, and those who are done by them."""
        samples, adds, requests, numbers, looks = self.samples, self.adds, self.requests, self.numbers, self.looks
        here = [n for n, sample in enumerate(samples) if sample.finish_reason is None]
        if len(here) < len(samples):
            samples, adds, looks = [samples[n] for n in here], [adds[n] for n in here], looks[here]
            chosen, requests, numbers = ([x[n] for n in here] for x in (chosen, requests, numbers))
        for add, token in zip(adds, chosen, strict=True):
            add(token)
        ending = set(np.flatnonzero(looks).tolist())
        if not self.ends.isdisjoint(chosen):
            ending.update(row for row, token in enumerate(chosen) if token in self.ends)
        reasons: list[FinishReason | None] = [None] * len(chosen)
        done = []
        for row in sorted(ending):
            sample = samples[row]
            reasons[row] = sample.finish_reason = sample.request.ends.reason(sample.tokens)
            if sample.finish_reason is not None:
                done.append(sample)
        found: list[Token] = list(map(_token, zip(requests, numbers, chosen, reasons, strict=True)))
        return found, done
