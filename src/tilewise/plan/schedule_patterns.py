"""Patterns made on the CPU: what the makers of BlockSchedule compute, as CSR arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.plan.schedule_bits import from_rows
from tilewise.plan.schedule_grid import Grid, Pattern, as_array, as_int32, check_csr, indptr_of


def random(grid: Grid, sparsity: float, seed: int) -> Pattern:
    """The same number of blocks in each row, (1 - sparsity) of them, at least one, chosen at random."""
    generator = np.random.default_rng(seed)
    keep = min(grid.cols, max(1, math.floor((1.0 - sparsity) * grid.cols + 0.5)))
    indptr = indptr_of(np.full(grid.rows, keep, np.int64))
    indices = np.empty((grid.rows, keep), np.int32)
    # A few rows at a time: the random numbers then need little memory, however many heads there are.
    step = max(1, 2**20 // max(1, grid.cols))
    for start in range(0, grid.rows if keep else 0, step):
        part = indices[start : start + step]
        order = generator.random((len(part), grid.cols))
        part[:] = np.argpartition(order, keep - 1, axis=1)[:, :keep]
        part.sort(axis=1)
    return Pattern(indptr, indices.reshape(-1))


def strided(grid: Grid, stride: int, reach: int) -> Pattern:
    """The diagonal blocks with `reach` keys on each side, and every `stride`-th column of blocks."""
    first, last = grid.diagonal()
    near = grid.from_ranges(*grid.covering(first - reach, last + reach))
    columns = np.arange(grid.cols, dtype=np.int64)[stride - 1 :: stride]
    rows = np.arange(grid.rows, dtype=np.int64)
    # Each block gets one number, row · cols + column: the union of two patterns is a sorted set of these numbers.
    near_keys = np.repeat(rows, np.diff(near.indptr)) * grid.cols + near.indices
    keys = np.union1d(near_keys, (rows[:, None] * grid.cols + columns).reshape(-1))
    width = max(1, grid.cols)
    return Pattern(indptr_of(np.bincount(keys // width, minlength=grid.rows)), keys % width)


def covering_mask(grid: Grid, mask: npt.NDArray[np.bool_]) -> Pattern:
    """The blocks in which an elementwise mask (…, Nq, Nk) has a True."""
    if grid.rows == 0 or grid.cols == 0:
        return Pattern(indptr_of(np.zeros(grid.rows, np.int64)), np.empty(0, np.int32))
    # Rows first: this pass reads contiguous memory, and the second pass has only 1/block_q of the work.
    kept = np.logical_or.reduceat(mask, np.arange(0, grid.seqlen_q, grid.block_q), axis=-2)
    kept = np.logical_or.reduceat(kept, np.arange(0, grid.seqlen_k, grid.block_k), axis=-1)
    return from_blocks(grid, kept)


def from_blocks(grid: Grid, kept: npt.NDArray[np.bool_]) -> Pattern:
    """kept: (…, num_q_blocks, num_k_blocks)."""
    flat = kept.reshape(grid.rows, grid.cols)
    return from_rows(grid, lambda rows: flat[rows])


def from_runs(grid: Grid, runs: Any) -> Pattern:
    """One run of key blocks in each row: first and count."""
    pairs = as_array("runs", runs)
    if pairs.shape != (grid.rows, 2):
        raise ValueError(
            f"runs must have shape ({grid.rows}, 2), a start and a count for each of the {grid.rows} blocks of "
            f"{grid.block_q} queries in seqlen_q={grid.seqlen_q}, got {pairs.shape}"
        )
    pairs = as_int32("runs", pairs, rank=2).astype(np.int64)
    past = pairs.sum(axis=1) > grid.cols
    if past.any():
        row = int(past.argmax())
        start, count = pairs[row].tolist()
        raise ValueError(
            f"runs[{row}] must stay within the {grid.cols} key blocks, got start {start} and count {count}"
        )
    return grid.from_ranges(pairs[:, 0], pairs[:, 0] + pairs[:, 1])


def from_lists(grid: Grid, counts: Any, indices: Any, prefix: str = "") -> Pattern:
    """Rows of `counts` (…, num_q_blocks) entries of `indices` (…, num_q_blocks, width); what stands past them says
    nothing. prefix: of the two names in messages."""
    lengths = as_array(f"{prefix}counts", counts).reshape(grid.rows).astype(np.int64)
    width = indices.shape[-1]
    lists = as_array(f"{prefix}indices", indices).reshape(grid.rows, width)
    wrong = (lengths < 0) | (lengths > width)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{prefix}counts must be between 0 and the width {width} of {prefix}indices, got {lengths[row]} "
            f"in {grid.place(row)}"
        )
    entries = as_int32(f"{prefix}indices", lists[np.arange(width) < lengths[:, None]])
    pattern = Pattern(indptr_of(lengths), entries)
    check_csr(pattern.indptr.astype(np.int32), entries, grid, f"{prefix}indices")
    return pattern


def union(grid: Grid, pattern: Pattern, other: Pattern) -> Pattern:
    """Both, which must have no block in common."""
    keys = [np.repeat(np.arange(grid.rows), np.diff(p.indptr)) * grid.cols + p.indices for p in (pattern, other)]
    both, counts = np.unique(np.concatenate(keys), return_counts=True)
    if len(both) and counts.max() > 1:
        row, block = divmod(int(both[counts.argmax()]), grid.cols)
        raise ValueError(f"full_indices must not repeat what indices has, got {block} in both in {grid.place(row)}")
    width = max(1, grid.cols)
    return Pattern(indptr_of(np.bincount(both // width, minlength=grid.rows)), both % width)


def transposed(grid: Grid, pattern: Pattern) -> Pattern:
    """The pattern of `grid.transposed()`: for each key block, the query blocks that meet it."""
    outer, q_block = np.divmod(np.repeat(np.arange(grid.rows), np.diff(pattern.indptr)), max(1, grid.q_blocks))
    rows = outer * grid.cols + pattern.indices
    order = np.argsort(rows, kind="stable")  # the query blocks of a row stay in their order
    return Pattern(indptr_of(np.bincount(rows, minlength=grid.transposed().rows)), q_block[order])
