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


class Schedule:
    """Jobs that wait and are prefilled, in the order of their turns, and rows that run.

    max_rows: how many may be under way, prefilled or running. preemptions, reused: counted.
    """

    def __init__(self, prefix: PrefixCache, max_rows: int) -> None:
        self.prefix, self.max_rows = prefix, max_rows
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
                if not self.under_way:
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

    def start(self, jobs: list[Job]) -> list[int]:
        """Prompts are computed: how many samples of each begin to run now. The others wait for a row, in front."""
        counts: list[int] = []
        for job in jobs:
            self.prefilling.remove(job)
        for left, job in zip(range(len(jobs) - 1, -1, -1), jobs, strict=True):
            room = self.max_rows - self.under_way - sum(counts) - left
            counts.append(min(len(job.samples), max(1, room)))
            if counts[-1] < len(job.samples):
                self.add(Job.of(job.samples[counts[-1] :]))  # from the cached prompt, when there is room
        return counts

    def run(self, sample: Sample, seq: int) -> None:
        """A sample that has its first token goes on in `seq`, unless that token was its last."""
        if sample.finish_reason is None:
            self.rows.add(sample, seq)
        else:
            self.prefix.release(seq)
            self._held = False

    # Leaving.

    def leave(self, samples: Sequence[Sample]) -> None:
        """They run no more, and give their pages up."""
        if samples:
            self.prefix.release([self.rows.remove(sample) for sample in samples])
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

    def make_way(self) -> None:
        """Before a step: somebody is sent out where a prompt of a higher priority, or one that had its turn earlier,
        lacks a row or pages."""
        if self._short and self.under_way:
            self._short = False
            self.send_out()
        elif self.waiting and self.under_way and (self._held or self.under_way >= self.max_rows):
            lowest = int(self.rows.priorities[: len(self.rows)].min(initial=self.waiting[0].priority))
            lowest = min([lowest, *(job.priority for job in self.prefilling)])
            if lowest < self.waiting[0].priority:
                self.send_out()
                self._held = False

    def send_out(self) -> None:
        """Take the pages of the youngest of the lowest priority; it waits, to be prefilled again."""
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


def _rank(one: Sample | Job) -> Rank:
    return one.rank


def _begin_alike(job: Job, other: Job, count: int) -> bool:
    return (
        other.priority >= job.priority  # for somebody who has to wait himself nobody waits
        and len(other.tokens) >= count
        and job.tokens[count - 1] == other.tokens[count - 1]  # mostly enough to tell that they do not
        and np.array_equal(job.tokens[:count], other.tokens[:count])
    )
