"""Packed trees of tokens as tiles. Tokens stand in depth-first order, and `ends[k]` is the first query that no longer
sees key k: key k is seen by the queries k … ends[k] − 1.

What lies below a stretch of tokens stands right behind it, so a stretch is two tiles: the triangle over itself, and one
rectangle of everything below it, however many branches that is. With a window each branch meets each of its ancestors
under a band of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.plan.dense import cut, plan_sizes, together
from tilewise.plan.tiles import Band, Plan, Tiles

Ends = npt.NDArray[np.int32]


class Run(NamedTuple):
    """Tokens [start, stop), each below the one before; those below all of them reach to `end`. position: of the first
    token in its sequence."""

    start: int
    stop: int
    end: int
    position: int


def runs_of(ends: Ends) -> list[Run]:
    """The stretches without a branch, in order; a branch that is a parent's only one is part of its stretch."""
    if not len(ends):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ends)) + 1, [len(ends)]]).tolist()
    found: list[Run] = []
    above: list[Run] = []
    for start, stop in pairwise(starts):
        while above and above[-1].end <= start:
            above.pop()
        position = above[-1].position + above[-1].stop - above[-1].start if above else 0
        found.append(Run(start, stop, int(ends[start]), position))
        above.append(found[-1])
    return found


def plan_branches(
    ends: Ends,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    value_dim: int = 0,
    *,
    left: int | None = None,
    io_bytes: int = 2,
) -> Plan:
    """The causal plan of a packed tree; left: how many tokens before its own a query sees, None for all."""
    runs = runs_of(ends)
    below = list(_below(runs) if left is None else _below_within(runs, left))
    tiles = together(_own(runs, left)) + below
    sizes = plan_sizes(heads_q, heads_kv, head_dim, value_dim, not below and left is None, io_bytes)
    return Plan("tree", tuple(tiles), len(ends), (len(ends),), **sizes)


def _own(runs: list[Run], left: int | None) -> Iterator[Tiles]:
    """Each stretch over itself."""
    for start, stop, _, _ in runs:
        tokens = stop - start
        for tile in cut(tokens, tokens, Band(None if left is None else -left, 0).opened(tokens, tokens)):
            yield replace(tile, row=start + tile.row, key=start + tile.key)


def _below(runs: list[Run]) -> Iterator[Tiles]:
    """All rows below a stretch over the whole of it."""
    for start, stop, end, _ in runs:
        if end > stop:
            yield Tiles(stop, end - stop, start, stop - start)


def _below_within(runs: list[Run], left: int) -> Iterator[Tiles]:
    """Each stretch over what a window shows of each one above it."""
    above: list[Run] = []
    for run in runs:
        while above and above[-1].end <= run.start:
            above.pop()
        rows = run.stop - run.start
        for other in above:
            keys = other.stop - other.start
            low = run.position - other.position - left  # of key − row, both counted from the first of their stretch
            if low < keys:
                for tile in cut(rows, keys, Band(low, None).opened(rows, keys)):
                    yield replace(tile, row=run.start + tile.row, key=other.start + tile.key)
        above.append(run)
