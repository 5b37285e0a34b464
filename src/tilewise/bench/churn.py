"""What a decode step costs the host while sequences come and go, row by row with what each row must reach.

In a step some sequences leave and are freed, as many whose prompts are computed join, as many new ones are forked and
get the first tokens of their prompts, every running sequence is extended by a token, and the standing plan is renewed.
No attention is computed: this is the host's time before the first kernel of a layer. On a GPU the planner's own time
stands beside it. `tilewise bench churn` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from .. import api
from ..gpu.decode import kept
from ..kvcache import PagedKVCache
from ..kvcache.slots import room_for
from . import prefill
from .measure import OK, Result, Timing, device_cost, timing_of
from .prefill import Goal
from .records import records
from .sweep import Sheet, attempt
from .workloads import DTYPES, Point, backends, complete

COLUMNS = ("step", "of it cache", "first plan", "planner")
STEP, CACHE, FIRST, PLANNER = "a step", "its cache", "first plan", "planner"
PARTS = ("free", "fork", "prompts", "tokens", "renew")  # of a step, in their order
SLOWEST = "slowest step"  # medians do not show what happens every twenty steps
STEPS = 60  # that are timed, after WARM
WARM = 8
SHARED, LONGEST = 8192, 4096  # tokens of the prefix, and of a sequence's own at most
CHUNK = 16  # tokens of its prompt that a new sequence gets in the step in which it is forked
TREE = ((8, 1024), (8, 512))  # below the prefix: children of each node, tokens of each


@dataclass(frozen=True)
class Row(prefill.Row):
    """leaving: sequences that leave, and join, in each step. tree: two more levels below the prefix."""

    leaving: int = 0
    tree: bool = False


class Outcome(prefill.Outcome):
    """A row with what was measured of it."""

    @property
    def rates(self) -> list[float | None]:
        """The microseconds of COLUMNS."""
        return [microseconds(self, name) for name in (STEP, CACHE, FIRST, PLANNER)]


def microseconds(outcome: prefill.Outcome, part: str) -> float | None:
    """What a part of the row's step takes."""
    result = outcome.of(f"{outcome.ours}, {part}")
    return None if result is None or result.timing is None else result.timing.median * 1e6


def _at_most(part: str, limit: float) -> Goal:
    return Goal(lambda outcome: microseconds(outcome, part), limit, unit=" µs", what=part, at_most=True)


def rows(device: str) -> list[Row]:
    """The whole table. A CPU has no planner: plans are made anew there in each step, and have a bar of their own."""
    base = Point("prefix", heads=32, kv_heads=8, hdim=128, page_size=16, prefix=SHARED, dtype="bfloat16", device=device)
    first = _at_most(FIRST, 2000)
    chosen = []
    for name, batch, leaving, tree, step_us, planner_us in (
        ("256, nothing joins or leaves", 256, 0, False, 60, 30),
        ("256, 16 leave and join", 256, 16, False, 300, 30),
        ("256 in a tree of three levels, 16 leave and join", 256, 16, True, 400, 30),
        ("1024, 64 leave and join", 1024, 64, False, 1000, 80),
    ):
        goals = () if device == "cpu" else (_at_most(STEP, step_us), _at_most(PLANNER, planner_us))
        goals = (*goals, first) if batch == 256 else goals
        # Each row has a point of its own: the tokens of its sequences are at most so many.
        point = complete(replace(base, batch=batch, seq=LONGEST - leaving - tree))
        chosen.append(Row(name, point, goals, leaving=leaving, tree=tree))
    return chosen


def run(chosen: Sequence[Row], sheet: Sheet | None = None, loops: int | None = None) -> Iterator[Outcome]:
    """Measure the rows one after the other, those that the sheet does not have; it gets each as soon as it is done."""
    for row in chosen:
        if sheet is not None and sheet.has(row.point):
            continue
        outcome = Outcome(row, attempt(_time, row, loops))
        if sheet is not None:
            sheet.append(records(row.point, outcome.results))
        yield outcome


class Crowd:
    """Sequences that come and go over one cache, their lengths drawn from a seeded generator."""

    def __init__(self, row: Row) -> None:
        point = row.point
        self.random, self.row = np.random.default_rng(0), row
        inner = 0 if not row.tree else TREE[0][0] * (TREE[0][1] + TREE[1][0] * TREE[1][1])
        tokens = SHARED + inner + (point.batch + 3 * row.leaving) * (point.seq + 2 * STEPS + point.page_size)
        hdim = point.hdim if point.device != "cpu" else 1  # nothing is computed there, and memory may be short
        self.cache = PagedKVCache(
            tokens // point.page_size, point.page_size, point.kv_heads, hdim, kv_format="bf16", device=point.device
        )
        root = self.cache.allocate()
        self._fill([root], [SHARED])
        self.roots = [root]
        for children, tokens in TREE if row.tree else ():
            self.roots = self.cache.fork([one for one in self.roots for _ in range(children)])
            self._fill(self.roots, [tokens] * len(self.roots))
        self.seqs = self.begin(self.draw(point.batch))
        # Where a captured step looks for its places.
        self.slots = room_for(self.cache, point.batch, planned=True)
        self.chunks = room_for(self.cache, row.leaving * CHUNK)
        self.new: list[int] = []
        self.finish(self.seqs)
        self.most = SHARED + sum(tokens for _, tokens in TREE) + point.seq + 2 * STEPS

    def _fill(self, seqs: list[int], counts: list[int]) -> None:
        self.cache.mark_written(self.cache.extend(seqs, counts))

    def draw(self, count: int) -> list[int]:
        """Roots below which so many sequences begin."""
        return [self.roots[n] for n in self.random.integers(len(self.roots), size=count)]

    def begin(self, roots: list[int]) -> list[int]:
        """New sequences below these, with the first tokens of their own."""
        new = self.cache.fork(roots)
        self._fill(new, [CHUNK] * len(new))
        return new

    def finish(self, seqs: list[int]) -> None:
        """The rest of their prompts, which steps of prefill would compute."""
        self._fill(seqs, self.random.integers(1, self.row.point.seq - CHUNK, size=len(seqs)).tolist())

    def prepare(self) -> None:
        """What stands before a step: prompts of those that were forked in the last one are computed, and who comes and
        goes is known."""
        if self.new:
            self.finish(self.new)
        elif self.row.leaving:
            self.new = self.begin(self.draw(self.row.leaving))
            self.finish(self.new)
        self.coming = self.draw(self.row.leaving)
        self.gone = self.random.choice(len(self.seqs), self.row.leaving, replace=False).tolist()

    def change(self) -> list[float]:
        """What a step does to the cache; when each of PARTS but the last was done."""
        ends = []
        if self.row.leaving:
            self.cache.free([self.seqs[n] for n in self.gone])
            ends.append(time.perf_counter())
            for n, seq in zip(self.gone, self.new, strict=True):  # others keep their rows
                self.seqs[n] = seq
            self.new = self.cache.fork(self.coming)
            ends.append(time.perf_counter())
            self.chunks = self.cache.extend(self.new, [CHUNK] * len(self.new), into=self.chunks)
            self.cache.mark_written(self.chunks)
            ends.append(time.perf_counter())
        self.slots = self.cache.extend(self.seqs, 1, into=self.slots)
        self.cache.mark_written(self.slots)
        return [*ends, time.perf_counter()]


def _time(row: Row, loops: int | None) -> list[Result]:
    point = row.point
    ((ours, backend),) = backends(point).items()
    crowd, steps = Crowd(row), loops or STEPS
    cuda = point.device != "cpu"
    wait = partial(_synchronize, torch.device(point.device))
    plan = api.plan_decode(crowd.cache, crowd.seqs, num_heads=point.heads, rows=point.batch, max_length=crowd.most)
    q = torch.randn((point.batch, 1, point.heads, point.hdim), device=point.device).to(DTYPES[point.dtype])
    if cuda:  # a layer that asks for it makes the list that renew_plan keeps up to date
        api.decode(q, crowd.cache, 0, plan, backend=backend)
    times: list[list[float]] = []
    for _ in range(WARM + steps):
        crowd.prepare()
        wait()
        start = time.perf_counter()
        ends = crowd.change()
        api.renew_plan(plan, crowd.cache, crowd.seqs)
        times.append([start, *ends, time.perf_counter()])
    parts = np.diff(times[WARM:]).T
    whole: list[float] = parts.sum(0).tolist()

    def first() -> None:
        fresh = api.plan_decode(crowd.cache, crowd.seqs, num_heads=point.heads)
        if cuda:  # the list is made, and sent, when a layer first asks for it
            api.decode(q, crowd.cache, 0, fresh, backend=backend)

    found = {STEP: timing_of(whole), CACHE: timing_of(parts[:-1].sum(0).tolist())}
    found |= {FIRST: _repeated(first, steps, wait), SLOWEST: timing_of([max(whole)])}
    found |= {name: timing_of(part) for name, part in zip(PARTS[-len(parts) :], parts.tolist(), strict=True)}
    results = [Result(f"{ours}, {part}", True, OK, timing=timing) for part, timing in found.items()]
    if cuda:
        (listed,) = kept(plan).lists.values()
        results.append(device_cost(f"{ours}, {PLANNER}", listed.launch))
    return results


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _repeated(call: Callable[[], None], steps: int, wait: Callable[[], object]) -> Timing:
    seconds = []
    for _ in range(2 + min(steps, 20)):
        wait()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return timing_of(seconds[2:])


def notes(outcomes: Sequence[Outcome]) -> list[str]:
    """What the table's numbers do not say."""
    lines = [f"lengths of their own: 1 to {LONGEST} tokens, evenly, seed 0, and {SHARED} shared; pages of 16"]
    for outcome in outcomes:
        found = ((part, microseconds(outcome, part)) for part in (*PARTS, SLOWEST))
        parts = ", ".join(f"{part} {us:,.0f}" for part, us in found if us is not None)
        lines.append(f"{outcome.row.name}: {parts} µs")
    if outcomes and outcomes[0].row.point.device == "cpu":
        lines.append("a CPU makes plans anew: a step is the cache's work alone, its plan is the first plan")
    return lines
