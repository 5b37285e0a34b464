"""A pattern as bits, the form that kernels read: bit j % 32 of word j // 32 of a row says that key block j is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewise.graphs import outside
from tilewise.plan.schedule_grid import Grid, Int32s, Pattern, indptr_of

Bools = npt.NDArray[np.bool_]
AT_ONCE = 2**24  # blocks laid out as one byte each at a time


def chunks(rows: int, cols: int) -> Iterator[slice]:
    """Slices of so many rows that their blocks are at most AT_ONCE."""
    step = max(1, AT_ONCE // max(1, cols))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def pack(kept: Bools) -> Int32s:
    """(rows, cols) bools -> (rows, words) int32."""
    rows, cols = kept.shape
    padded = np.zeros((rows, -(-cols // 32) * 32), np.bool_)
    padded[:, :cols] = kept
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32, copy=False)


def unpack(words: Int32s, cols: int) -> Bools:
    """(rows, words) int32 -> (rows, cols) bools."""
    raw = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    return np.unpackbits(raw, axis=1, count=cols, bitorder="little").view(np.bool_)


def dense(pattern: Pattern, cols: int, rows: slice) -> Bools:
    """Some rows of a pattern as (rows, cols) bools."""
    pointers = pattern.indptr[rows.start : rows.stop + 1]
    kept = np.zeros((rows.stop - rows.start, cols), np.bool_)
    kept[np.repeat(np.arange(len(kept)), np.diff(pointers)), pattern.indices[pointers[0] : pointers[-1]]] = True
    return kept


@outside
def bits_of(pattern: Pattern, grid: Grid) -> torch.Tensor:
    """int32 (batch or 1, heads or 1, num_q_blocks, words), on the CPU."""
    words = np.empty((grid.rows, grid.shape[-1]), np.int32)
    for rows in chunks(grid.rows, grid.cols):
        words[rows] = pack(dense(pattern, grid.cols, rows))
    return torch.from_numpy(words.reshape(grid.shape))


@outside
def pattern_of(bits: torch.Tensor, grid: Grid) -> Pattern:
    """The reverse of `bits_of`, for bits on the CPU; what stands past the last key block is ignored."""
    words: npt.NDArray[Any] = bits.numpy().reshape(grid.rows, grid.shape[-1])
    return from_rows(grid, lambda rows: unpack(words[rows], grid.cols))


def from_rows(grid: Grid, rows_of: Any) -> Pattern:
    """A pattern from what gives some of its rows, a slice of all, as (rows, cols) bools."""
    counts, indices = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    for rows in chunks(grid.rows, grid.cols):
        kept = rows_of(rows)
        counts.append(kept.sum(axis=1, dtype=np.int64))
        indices.append(np.nonzero(kept)[1].astype(np.int32))
    return Pattern(indptr_of(np.concatenate(counts)), np.concatenate(indices))
