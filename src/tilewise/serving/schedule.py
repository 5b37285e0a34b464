"""Who is prefilled, who runs, who has to wait: the order of turns, and room in the cache.

Turns go by priority, then by age. A step decodes all who run and prefills as many tokens of prompts as it has left.
Prompts that begin alike are prefilled one after the other, so that what they share is computed once. When pages run
out, the cache evicts what nobody uses; if that does not suffice, the youngest of the lowest priority gives up its pages
and is prefilled again later, from whatever of it is still cached then.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from ..kvcache import OutOfPages, PrefixCache, Slots
from .requests import FinishReason, Job, Rank, Request, Sample
from .rows import Rows

# Tokens of a step, decodes among them, that prompts fill up: about where a card's products take as long as reading the
# weights, its operations per second over the weights that it reads in one, which is from 150 to 400. In the model of
# bench/engine_model.py, an 8B Llama on an H200 at 70% of what it can take, the p99 of the time between tokens is 2.01
# times the p50 with 256 and a SPREAD of 4, 1.90 with 224 and 6, and 1.83 with 192, where first tokens take 20% longer.
CHEAP_TOKENS = 224
LEAST_CHUNK = 64  # tokens of prompts that a step takes, however many decode
SPREAD = 6  # steps over which more prompts than that are spread
CROWD = 16  # prompts that wait: more are not counted, but computed as fast as the budget allows


class Schedule:
    """Jobs that wait and are prefilled, in the order of their turns, and rows that run.

    max_rows: how many may be under way, prefilled or running. leaving: samples whose last token is on its way, and
    their sequences. preemptions, reused: counted.
    """

    def __init__(self, prefix: PrefixCache, max_rows: int) -> None:
        self.prefix, self.max_rows = prefix, max_rows
        self.leaving: dict[Sample, int] = {}
        self.waiting: list[Job] = []
        self.prefilling: list[Job] = []
        self.rows = Rows(max_rows)
        self.preemptions = self.reused = 0
        self._held = False  # nobody is let in: pages ran out, and nobody has left since
        self._short = False  # a prompt could not go on for want of pages that somebody with a later turn has

    @property
    def under_way(self) -> int:
        return len(self.rows) + len(self.prefilling)

    @property
    def busy(self) -> bool:
        return bool(self.rows.samples or self.prefilling or self.waiting)

    def add(self, job: Job) -> None:
        """It waits for its turn."""
        insort(self.waiting, job, key=_rank)

    # Prefill.

    def prefill(self, budget: int) -> tuple[list[Slots], list[Job]]:
        """Reserve room for up to `budget` tokens of prompts: slots, and the jobs that they are for, in their order.

        After it, nobody who runs is sent out before the step is over: their next tokens are reserved already.
        """
        if not self.under_way:
            self._held = False
        parts: list[Slots] = []
        jobs: list[Job] = []
        under_way = list(self.prefilling)
        for priority in sorted({job.priority for job in under_way}, reverse=True):
            budget -= self._admit(budget, priority, parts, jobs)
            chosen = [job for job in under_way if job.priority == priority and job in self.prefilling]
            budget -= self._continue(chosen, budget, parts, jobs)
        self._admit(budget, None, parts, jobs)
        return parts, jobs

    def even_budget(self, budget: int) -> int:
        """How many of `budget` tokens of prompts to compute beside those who run, so that steps take about as long.

        Up to CHEAP_TOKENS with the decodes; more if there is so much to do that it would take many steps.
        """
        return even_tokens(budget, len(self.rows), self._backlog(SPREAD * budget)) if self.rows.samples else budget

    def _backlog(self, most: int) -> int:
        """Tokens of prompts that are not computed yet; `most` if there are more, or too many to count."""
        left = sum(job.left for job in self.prefilling)
        for turn, job in enumerate(self.waiting):
            if left >= most or turn == CROWD:
                return most
            left += len(job.tokens) - self.prefix.match(job.tokens)
        return min(left, most)

    def _continue(self, chosen: list[Job], budget: int, parts: list[Slots], jobs: list[Job]) -> int:
        """Go on with prompts that are partly done, in one go; the number of tokens."""
        while chosen:
            counts: list[int] = []
            for job in chosen:
                counts.append(min(job.left, budget - sum(counts)))
            going = [(job, count) for job, count in zip(chosen, counts, strict=True) if count]
            if not going:
                break
            more = [job.tokens[job.done : job.done + count].tolist() for job, count in going]
            try:
                slots = self.prefix.extend([job.seq for job, _ in going], more)
            except OutOfPages:
                last = self._last()
                if not isinstance(last, Job) or last in jobs:
                    self._short = True  # of pages that whoever has them cannot give within this step
                    break
                self.send_out()
                chosen = [job for job in chosen if job is not last]
                continue
            for job, count in going:
                job.done += count
            parts.append(slots)
            jobs += [job for job, _ in going]
            return len(slots)
        return 0

    def _admit(self, budget: int, above: int | None, parts: list[Slots], jobs: list[Job]) -> int:
        """Begin with prompts that wait, in the order of their turns, while there is room for them; their tokens.

        above: with those of a higher priority alone. One that would share a page more with a prompt that is just being
        computed waits for that.
        """
        size = self.prefix.cache.page_size
        chosen: list[tuple[Job, int, int]] = []  # how many of its tokens, and how many of those are cached
        turn, left = 0, budget
        # No more are looked at than could begin: a long queue is not searched in every step.
        while left > 0 and self.under_way + len(chosen) < self.max_rows and not self._held and turn < self.max_rows:
            if turn == len(self.waiting) or (above is not None and self.waiting[turn].priority <= above):
                break
            job = self.waiting[turn]
            turn += 1
            known = self.prefix.match(job.tokens)
            page_end = (known // size + 1) * size
            others = itertools.chain(self.prefilling, (other for other, *_ in chosen))
            if page_end >= len(job.tokens) or not any(_begin_alike(job, other, page_end) for other in others):
                count = min(len(job.tokens), known + left)
                chosen.append((job, count, known))
                left -= count - known
        return self._begin(chosen, parts, jobs)

    def _begin(self, chosen: list[tuple[Job, int, int]], parts: list[Slots], jobs: list[Job]) -> int:
        """Insert so many first tokens of prompts, all in one go, or as many prompts as there are pages for."""
        taken = 0
        while chosen:
            try:
                seqs, reused, slots = self.prefix.insert_many([job.tokens[:count] for job, count, _ in chosen])
            except OutOfPages:
                if len(chosen) > 1:
                    half = (len(chosen) + 1) // 2
                    taken += self._begin(chosen[:half], parts, jobs)
                    chosen = [] if self._held else chosen[half:]
                    continue
                if not self.under_way and not self.leaving:
                    raise  # submit() has made sure that one fits alone
                self._held = True
                break
            if len(slots) > sum(count - known for _, count, known in chosen):
                # For want of pages cached ones that they have in common were evicted: more tokens than the step has
                # room for. In the next step it is known what is left.
                self.prefix.release(seqs)
                break
            for (job, count, _), seq, known in zip(chosen, seqs, reused, strict=True):
                job.seq, job.done = seq, count
                if job.request.reused is None:
                    job.request.reused = known
                self.reused += known
                del self.waiting[bisect_left(self.waiting, job.rank, key=_rank)]
                insort(self.prefilling, job, key=_rank)
            parts.append(slots)
            jobs += [job for job, *_ in chosen]
            return taken + len(slots)
        return taken

    def room(self, jobs: list[Job]) -> list[int]:
        """How many samples of each of these prompts, which will be computed by this step, can run then."""
        counts: list[int] = []
        under_way = self.under_way - len(jobs)
        for left, job in zip(range(len(jobs) - 1, -1, -1), jobs, strict=True):
            room = self.max_rows - under_way - sum(counts) - left
            counts.append(min(len(job.samples), max(1, room)))
        return counts

    def start(self, jobs: list[Job], counts: list[int]) -> None:
        """Prompts are computed: so many samples of each begin to run now. The others wait for a row, in front."""
        for job, count in zip(jobs, counts, strict=True):
            self.prefilling.remove(job)
            seqs = [job.seq, *(self.prefix.fork(job.seq, count - 1) if count > 1 else ())]
            for sample, seq in zip(job.samples[:count], seqs, strict=True):
                self.rows.add(sample, seq)
            if count < len(job.samples):
                self.add(Job.of(job.samples[count:]))  # from the cached prompt, when there is room

    # Leaving.

    def leave(self, samples: Sequence[Sample]) -> None:
        """They run no more, and give their pages up."""
        if samples:
            self.prefix.release([self.rows.remove(sample) for sample in samples])
            self._held = False

    def leave_late(self, samples: Sequence[Sample]) -> None:
        """They run no more, and give their pages up by leave_now(), when they have their last token."""
        for sample in samples:
            self.leaving[sample] = self.rows.remove(sample)

    def leave_now(self, samples: Sequence[Sample]) -> None:
        """Of these samples, those who are leaving."""
        seqs = [self.leaving.pop(sample) for sample in samples if sample in self.leaving]
        if seqs:
            self.prefix.release(seqs)
            self._held = False

    def end(self, request: Request, reason: FinishReason) -> None:
        """End what is left of a request, between two steps."""
        self.leave([sample for sample in request.samples if sample.row >= 0])
        for job in [job for job in self.prefilling if job.request is request]:
            self.prefilling.remove(job)
            self.prefix.release(job.seq)
            self._held = False
        first = bisect_left(self.waiting, (-request.priority, request.number, 0), key=_rank)
        stop = bisect_left(self.waiting, (-request.priority, request.number + 1, 0), key=_rank)
        del self.waiting[first:stop]
        for sample in request.samples:
            sample.finish_reason = sample.finish_reason or reason

    @property
    def crowded(self) -> bool:
        """Does a prompt of a higher priority, or one that had its turn earlier, lack a row or pages?"""
        if self._short and self.under_way:
            return True
        if not (self.waiting and self.under_way and (self._held or self.under_way >= self.max_rows)):
            return False
        lowest = int(self.rows.priorities[: len(self.rows)].min(initial=self.waiting[0].priority))
        return min([lowest, *(job.priority for job in self.prefilling)]) < self.waiting[0].priority

    def make_way(self) -> None:
        """Before a step: somebody is sent out if it is crowded."""
        if self.crowded:
            self.send_out()
            self._held &= self._short  # of who lacks a row one is let in
            self._short = False

    def send_out(self) -> None:
        """Take the pages of the youngest of the lowest priority; it waits, to be prefilled again.

        No token may be on its way to it if it runs: that would not be among those that are prefilled.
        """
        last = self._last()
        if isinstance(last, Sample):
            self.leave([last])
            job = Job.of([last])
        else:
            job = last
            self.prefilling.remove(job)
            self.prefix.release(job.seq)
        self.add(job)
        self._held = True
        self.preemptions += 1

    def _last(self) -> Sample | Job:
        """Of those under way, whose turn comes last."""
        everybody: list[Sample | Job] = [*self.rows.samples, *self.prefilling]
        return max(everybody, key=_rank)


def even_tokens(budget: int, rows: int, backlog: int) -> int:
    """even_budget() beside so many rows that run, with so many tokens of prompts to be computed."""
    return min(budget, max(CHEAP_TOKENS - rows, backlog // SPREAD, LEAST_CHUNK))


def _rank(one: Sample | Job) -> Rank:
    return one.rank


def _begin_alike(job: Job, other: Job, count: int) -> bool:
    return (
        other.priority >= job.priority  # for somebody who has to wait himself nobody waits
        and len(other.tokens) >= count
        and job.tokens[count - 1] == other.tokens[count - 1]  # mostly enough to tell that they do not
        and np.array_equal(job.tokens[:count], other.tokens[:count])
    )
