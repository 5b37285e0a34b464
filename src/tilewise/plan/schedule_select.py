"""Which blocks a row of block scores keeps: the largest ones, by number or by share. The same to the bit as
kernels/common/schedule_select.cu, whatever the order in which that one adds: shares are sums of integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewise import checks
from tilewise.plan.schedule_bits import Bools, from_rows
from tilewise.plan.schedule_grid import Grid, Int64s, Pattern

SHARE_BITS = 24  # a threshold counts in steps of 2^-24
WEIGHT_BITS = 8  # a weight has that many bits below the 24 of a float32 with the row's largest exponent


def check_asked(scores: torch.Tensor, top_k: Any, threshold: Any) -> tuple[int | None, float | None]:
    """top_k and threshold, one of which is None, as an int and a float."""
    checks.tensor("scores", scores, dtypes=checks.FLOATS)
    if (top_k is None) == (threshold is None):
        given = "neither" if top_k is None else f"top_k={top_k} and threshold={threshold}"
        raise ValueError(f"from_scores takes exactly one of top_k and threshold, got {given}")
    if top_k is not None:
        return checks.integer("top_k", top_k, 1), None
    if not 0.0 < checks.number("threshold", threshold) <= 1.0:
        raise ValueError(f"threshold must be above 0 and at most 1, got {threshold}")
    return None, float(threshold)


def share_of(threshold: float) -> int:
    """A threshold in steps of 2^-SHARE_BITS, at least one, rounded down: ten equal scores reach 0.9 with nine."""
    return max(1, int(threshold * 2**SHARE_BITS))


def from_scores(grid: Grid, scores: torch.Tensor, top_k: int | None, threshold: float | None, causal: bool) -> Pattern:
    """The pattern of scores (…, num_q_blocks, num_k_blocks) on the CPU."""
    values = scores.detach().float().reshape(grid.rows, grid.cols).numpy()
    first, end = np.zeros(grid.q_blocks, np.int64), np.full(grid.q_blocks, grid.cols, np.int64)
    if causal:
        first, end = grid.covering(*grid.diagonal())
    columns = np.arange(grid.cols)

    def rows_of(rows: slice) -> Bools:
        block = np.arange(rows.start, rows.stop) % max(1, grid.q_blocks)
        keys = _keys(values[rows])
        keys[columns >= end[block, None]] = 0
        if threshold is not None:
            negative = ((keys > 0) & (values[rows] < 0)).any(axis=1)
            if negative.any():
                place = grid.place(rows.start + int(negative.argmax()))
                raise ValueError(f"scores must not be negative where a threshold is given, got some in {place}")
        kept = _largest(keys, top_k) if threshold is None else _reaching(keys, values[rows], share_of(threshold))
        if causal:
            kept |= (columns >= first[block, None]) & (columns < end[block, None])
        return kept

    return from_rows(grid, rows_of)


def _keys(values: npt.NDArray[np.float32]) -> Int64s:
    """Integers in the order of the values; 0 for NaN and −inf, which are never kept."""
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)  # −0 is 0
    keys = np.where(bits < 0, -1 - bits, bits + 2**31) % 2**32
    keys[np.isnan(values) | (values == -np.inf)] = 0
    return keys


def _largest(keys: Int64s, count: int | None) -> Bools:
    kept = np.zeros(keys.shape, np.bool_)
    order = np.argsort(-keys, axis=1, kind="stable")  # of equal ones the first
    np.put_along_axis(kept, order[:, :count], True, axis=1)
    return kept & (keys > 0)


def _reaching(keys: Int64s, values: npt.NDArray[np.float32], share: int) -> Bools:
    """Largest first, as few as reach this share of the row's sum."""
    weights = _weights(np.where(keys > 0, values, 0))
    total = weights.sum(axis=1, keepdims=True)
    high, low = total >> SHARE_BITS, total & (2**SHARE_BITS - 1)
    need = np.maximum(high * share + (low * share >> SHARE_BITS), np.minimum(total, 1))
    order = np.argsort(-keys, axis=1, kind="stable")
    ordered = np.take_along_axis(weights, order, axis=1)
    kept = np.zeros(keys.shape, np.bool_)
    np.put_along_axis(kept, order, np.cumsum(ordered, axis=1) - ordered < need, axis=1)
    return kept


def _weights(values: npt.NDArray[np.float32]) -> Int64s:
    """Values ≥ 0 in a unit by which a row's largest has 32 bits, rounded up. Infinity counts as 2^128."""
    bits = values.view(np.int32).astype(np.int64) & 0x7FFFFFFF
    exponent = np.maximum(bits >> 23, 1)
    mantissa = (bits & 0x7FFFFF) + np.where(bits >> 23, 0x800000, 0)
    down = np.minimum(exponent.max(axis=1, keepdims=True, initial=1) - exponent, 32)
    weights: Int64s = ((mantissa << WEIGHT_BITS) + (1 << down) - 1) >> down
    return weights
