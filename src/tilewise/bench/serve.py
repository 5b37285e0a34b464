"""The serving table: decode and shared prefixes on one GPU, row by row with what each row must reach.

Every kernel is captured in a graph. The replays of a row's kernels alternate, and the L2 cache is flushed before each.
Each answer is checked on a few sequences first. `tilewise bench serve` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch

from . import peers, prefill
from .measure import Result, measure, time_replays
from .prefill import Goal
from .records import records
from .sweep import Sheet, attempt
from .trees import BF16, NARROW, TWO_LEVELS, UNSHARED, Levels, Pool, Tree, build
from .workloads import Point, complete

COLUMNS = ("ours", "unshared", "cuDNN", "FlashInfer")
PAGE_SIZES = (16, 64)
BUDGET, GRID_BUDGET = 0.3, 0.06  # seconds of replays per row, and per point of the grid
TREE: Levels = ((1, 4096), (8, 1024), (128, 256), (512, 64))  # system prompt, few-shot groups, questions, samples


@dataclass(frozen=True)
class Row(prefill.Row):
    """A row: a point, whose tree is `levels` if that is more than a prefix. A row with a `grid` is all those points."""

    levels: Levels = ()
    grid: tuple[Point, ...] = ()

    @property
    def trees(self) -> list[Tree]:
        """What is measured, one after the other."""
        if self.levels:
            return [Tree(self.point, self.levels)]
        return [Tree.of(point) for point in self.grid or (self.point,)]


@dataclass(frozen=True)
class Outcome(prefill.Outcome):
    """A row with what was measured of it; of a grid point by point too."""

    by_point: dict[Point, list[Result]] = field(default_factory=dict)

    @property
    def rates(self) -> list[float | None]:
        """The microseconds of COLUMNS. Nothing of a grid: each point has its own."""
        if self.by_point:
            return [None] * len(COLUMNS)
        unshared = self.of(f"{self.ours}, {UNSHARED}") or (self.of(self.ours) if self.row.point.prefix else None)
        best = min(
            (r for name in (peers.FLASHINFER, peers.FLASHINFER_CASCADE) if (r := self.of(name)) and r.timing),
            key=_seconds,
            default=None,
        )
        found = (self.of(self.ours), unshared, self.of(peers.CUDNN), best)
        return [None if r is None or r.timing is None else r.timing.median * 1e6 for r in found]

    @property
    def ratios(self) -> dict[Point, float]:
        """Of a grid: the speed of "auto" over that without sharing; 1 where auto shares nothing and is the same."""
        found = {}
        for point, results in self.by_point.items():
            at = Outcome(replace(self.row, point=point), results)
            ours, unshared = at.of(at.ours), at.of(f"{at.ours}, {UNSHARED}")
            if ours is not None and ours.timing is not None and (unshared is None or unshared.timing is not None):
                found[point] = 1.0 if unshared is None else _seconds(unshared) / _seconds(ours)
        return found


# ---- what bars are set on ---------------------------------------------------------------------------------------


def microseconds(outcome: prefill.Outcome) -> float | None:
    """Tilewise's time."""
    ours = outcome.of(outcome.ours)
    return None if ours is None or ours.timing is None else ours.timing.median * 1e6


def over_cudnn(outcome: prefill.Outcome) -> float | None:
    """Tilewise's speed over cuDNN's, which has its keys one after another."""
    ours = outcome.of(outcome.ours)
    return None if ours is None else ours.ratio_to.get(peers.CUDNN)


def over_bf16(outcome: prefill.Outcome) -> float | None:
    """Tilewise's speed over its own on bf16 pages."""
    return _over(outcome, [f"{outcome.ours}, {BF16}"])


def times_narrow(outcome: prefill.Outcome) -> float | None:
    """Tilewise's time in times of its own on heads of 128 channels, as many rows × channels in all."""
    faster = _over(outcome, [f"{outcome.ours}, {NARROW}"])
    return None if faster is None else 1 / faster


def over_two_levels(outcome: prefill.Outcome) -> float | None:
    """Tilewise's speed over the best of its own plans that share one level of the tree."""
    names = [r.kernel for r in outcome.results if r.kernel.startswith(f"{outcome.ours}, {TWO_LEVELS}")]
    return _over(outcome, names)


def worst_auto(outcome: prefill.Outcome) -> float | None:
    """The least speed of "auto" over that without sharing; none while a point of the grid has no figure."""
    assert isinstance(outcome, Outcome)
    ratios = outcome.ratios
    return min(ratios.values()) if ratios and len(ratios) == len(outcome.by_point) else None


def _over(outcome: prefill.Outcome, others: Sequence[str]) -> float | None:
    ours, beside = outcome.of(outcome.ours), [outcome.of(name) for name in others]
    timed = [r for r in beside if r is not None and r.timing is not None]
    if ours is None or ours.timing is None or not timed or len(timed) < len(others):
        return None
    return min(map(_seconds, timed)) / _seconds(ours)


def _seconds(result: Result) -> float:
    assert result.timing is not None
    return result.timing.median


def _at_most(limit: float) -> Goal:
    return Goal(microseconds, limit, unit=" µs", at_most=True)


def _over_bf16(limit: float) -> Goal:
    return Goal(over_bf16, round(limit, 2), what="of bf16")


# ---- the rows ---------------------------------------------------------------------------------------------------

DECODE = {
    (64, 4096): Goal(over_cudnn, 1.0),
    (64, 16384): Goal(over_cudnn, 1.0),
    (256, 1024): Goal(over_cudnn, 1.0),
    (1, 131072): Goal(over_cudnn, 1.0),
}
SMALL = ((1, 2, 4, 8), (512, 1024, 2048, 4096, 8192))  # sequences, tokens: at least as fast as cuDNN
SMALLEST = _at_most(10.5)  # of 1 × 1024
FORMATS = {"fp8": 1.85, "int8": 1.85, "int4": 3.1}
PREFIX = {  # (sequences, shared, own tokens): microseconds at most, by page size
    (32, 4096, 128): (23, 23),
    (64, 8192, 256): (42, 42),
    (256, 16384, 128): (135, 120),
    (64, 1024, 256): (30, 30),
    (64, 256, 256): (29, 29),
    (512, 1024, 64): (58, 58),
}
PREFIX_FORMATS = {"int8": 1 / 0.75, "int4": 1 / 0.65}  # at least so many times as fast as bf16
WIDE_TIMES = 2.2  # heads of 256 channels take at most so many times as long as those of 128
HYDRAGEN = ((512, 1024), (1024, 2048), (2048, 4096), (4096, 8192))
GRID = ((1, 2, 8, 64, 256), (0, 64, 256, 1024, 8192), (16, 256, 2048))  # sequences, shared, own


def rows(device: str) -> list[Row]:
    """The whole table."""
    base = Point("decode", heads=32, kv_heads=8, dtype="bfloat16", kv_format="bf16", device=device)
    chosen = []
    for size in PAGE_SIZES:
        paged = replace(base, page_size=size)
        for (batch, seq), goal in DECODE.items():
            chosen.append(Row(f"{batch} × {seq}, page {size}", replace(paged, batch=batch, seq=seq), (goal,)))
        for name, bar in FORMATS.items():
            point = replace(paged, batch=64, seq=16384, kv_format=name)
            chosen.append(Row(f"{name}, 64 × 16384, page {size}", point, (_over_bf16(bar),)))
    for batch, seq in product(*SMALL):
        goals = (Goal(over_cudnn, 1.0), *((SMALLEST,) if (batch, seq) == (1, 1024) else ()))
        chosen.append(Row(f"{batch} × {seq}, page 16", replace(base, batch=batch, seq=seq, page_size=16), goals))
    for size in PAGE_SIZES:
        paged = replace(base, page_size=size)
        for (batch, prefix, own), bars in PREFIX.items():
            goal = _at_most(bars[PAGE_SIZES.index(size)])
            point = _prefix(paged, batch, prefix, own)
            chosen.append(Row(f"{_sizes(batch, prefix, own)}, page {size}", point, (goal,)))
        tree = _prefix(paged, 512, 4096, sum(tokens for _, tokens in TREE[1:]))
        goal = Goal(over_two_levels, 1.5, what="of two levels")
        chosen.append(Row(f"tree of three levels, page {size}", tree, (goal,), levels=TREE))
    shared = _prefix(replace(base, page_size=16), 64, 8192, 256)
    for name, bar in PREFIX_FORMATS.items():
        row = Row(f"{name}, {_sizes(64, 8192, 256)}", replace(shared, kv_format=name), (_over_bf16(bar),))
        chosen.append(row)
    wide = Goal(times_narrow, WIDE_TIMES, what="of head_dim 128", at_most=True)
    chosen.append(Row(f"head_dim 256, {_sizes(64, 8192, 256)}", replace(shared, heads=16, hdim=256), (wide,)))
    for batch, prefix in HYDRAGEN:
        point = _prefix(replace(base, heads=8, kv_heads=1), batch, prefix, 128)
        chosen.append(Row(f"Hydragen {_sizes(batch, prefix, 128)}", point, ()))
    for prefix in (1024, 2048, 4096):
        point = _prefix(replace(base, kv_heads=32, page_size=64), 64, prefix, 256)
        chosen.append(Row(f"ChunkAttention {_sizes(64, prefix, 256)}", point, ()))
    # Its backend by name: some of its points are rows too, and a CSV tells points apart by what they are.
    by_name = replace(base, backend=torch.device(device).type)
    grid = tuple(complete(_prefix(by_name, *sizes)) for sizes in product(*GRID))
    chosen.append(Row("auto over a grid", grid[0], (Goal(worst_auto, 0.97, what="of unshared"),), grid=grid))
    return [replace(row, point=complete(row.point)) for row in chosen]


def _sizes(batch: int, prefix: int, own: int) -> str:
    return f"{batch} × ({prefix} + {own})"


def _prefix(point: Point, batch: int, prefix: int, own: int) -> Point:
    return replace(point, workload="prefix" if prefix else "decode", batch=batch, prefix=prefix, seq=own)


def run(chosen: Sequence[Row], sheet: Sheet | None = None, loops: int | None = None) -> Iterator[Outcome]:
    """Measure the rows one after the other, those that the sheet does not have; it gets each as soon as it is done."""
    if not chosen:
        return
    pool = Pool((tree for row in chosen for tree in row.trees), torch.device(chosen[0].point.device))
    for row in chosen:
        todo = [tree.point for tree in row.trees if sheet is None or not sheet.has(tree.point)]
        if not todo:
            continue
        # A grid is judged as a whole, so it is measured as a whole, and without peers: it compares us with ourselves.
        found = {tree.point: attempt(_time, tree, pool, loops, not row.grid) for tree in row.trees}
        if sheet is not None:
            sheet.append([record for point in todo for record in records(point, found[point])])
        results = [result for one in found.values() for result in one]
        yield Outcome(row, results, found if row.grid else {})


def _time(tree: Tree, pool: Pool, loops: int | None, with_peers: bool) -> list[Result]:
    budget = BUDGET if with_peers else GRID_BUDGET
    return measure(build(tree, pool, with_peers=with_peers), loops=loops, budget=budget, timer=time_replays)


def notes(outcomes: Sequence[Outcome]) -> list[str]:
    """What the table's numbers do not say."""
    lines = []
    for outcome in outcomes:
        if ratios := outcome.ratios:
            point = min(ratios, key=lambda p: ratios[p])
            shared = sum(any(r.kernel.endswith(UNSHARED) for r in found) for found in outcome.by_point.values())
            where = _sizes(point.batch, point.prefix, point.seq)
            lines.append(f"{outcome.row.name}: {len(ratios)} points, {shared} of them shared; the worst is {where}")
    if isinstance(missing := peers.find(peers.FLASHINFER), str):
        lines.append(f"{peers.FLASHINFER}: {missing}")
    return lines
