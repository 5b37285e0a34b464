"""Which blocks of queries × keys a mask sees whole, in part or not at all, by interval arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tilewise.functions.expression import INDICES, Node, in_order
from tilewise.functions.intervals import ANY_FLOAT, ANY_INT, Interval, ranges

Array = Any
MOST_ENTRIES = 1 << 26  # of a tensor's least entries over all ranges of an index; beyond, the index may be anything


def classify(
    mask: Node, tensors: Sequence[torch.Tensor], sizes: Sequence[int], block_q: int, block_k: int
) -> torch.Tensor:
    """(B, H, blocks of q, blocks of k) int8: 0 none, 1 in part or not known, 2 all of a block's queries × keys.

    A last block ends with its sequence. Dimensions that the mask does not depend on are expanded.
    """
    tables = [Table(x) for x in tensors]
    inputs: dict[str, Interval] = {}
    for axis, (name, size, step) in enumerate(zip(INDICES, sizes, (1, 1, block_q, block_k), strict=True)):
        first = np.arange(0, size, step, dtype=np.float64)
        last = np.minimum(first + step, size) - 1
        shape = [-1 if n == axis else 1 for n in range(4)]
        inputs[name] = first.reshape(shape), last.reshape(shape)
    low, high = ranges(in_order(mask), inputs, lambda slot, index: tables[slot].reach(index))[mask]
    kinds = torch.from_numpy(np.asarray(low + high).astype(np.int8))
    return kinds.expand([inputs[name][0].size for name in INDICES])


class Table:
    """The least and the largest entries of a tensor over ranges of its indices."""

    def __init__(self, x: torch.Tensor) -> None:
        x = x.detach().cpu()
        if x.dtype in (torch.bfloat16, torch.float64):
            x = x.float()
        self._values = (x.byte() if x.dtype == torch.bool else x).numpy()
        self._unknown = ANY_FLOAT if x.is_floating_point() else ANY_INT

    def reach(self, index: Sequence[Interval]) -> Interval:
        low = high = self._values
        places: list[Array] = []
        for dim, bounds in enumerate(index):
            first, last = (np.clip(bound, 0, low.shape[dim] - 1).astype(np.int64) for bound in bounds)
            pairs, place = _distinct(first, last)
            if np.array_equal(pairs[0], pairs[1]):
                places.append(first)
                continue
            if low.size // low.shape[dim] * len(pairs[0]) > MOST_ENTRIES:
                pairs, place = np.array([[0], [low.shape[dim] - 1]]), np.int64(0)
            low, high = (_reduced(f, x, dim, *pairs) for f, x in ((np.minimum, low), (np.maximum, high)))
            places.append(place)
        found = low[tuple(places)].astype(np.float64), high[tuple(places)].astype(np.float64)
        # NaN, or an integer that becomes another one by 32 bits: then anything
        known = (found[0] >= self._unknown[0]) & (found[1] <= self._unknown[1])
        return np.where(known, found[0], self._unknown[0]), np.where(known, found[1], self._unknown[1])


def _distinct(first: Array, last: Array) -> tuple[Array, Array]:
    """The different ranges, (2, n) in rising order, and which of them stands in each place."""
    first, last = np.broadcast_arrays(first, last)
    most = int(last.max(initial=0)) + 1
    pairs, place = np.unique(first * most + last, return_inverse=True)
    return np.stack([pairs // most, pairs % most]), place.reshape(first.shape)


def _reduced(f: Any, values: Array, dim: int, first: Array, last: Array) -> Array:
    """Along one dimension, f over each of the ranges [first, last] instead of the entries."""
    values = np.moveaxis(values, dim, -1)
    if np.array_equal(first[1:], last[:-1] + 1):  # side by side
        found = f.reduceat(values[..., : last[-1] + 1], first, axis=-1)
        return np.moveaxis(found, -1, dim)
    found = np.empty((*values.shape[:-1], len(first)), values.dtype)
    power = np.log2(last - first + 1).astype(np.int64)
    for n in range(power.max() + 1):  # values: f over 2^n entries from each one on
        at = power == n
        found[..., at] = f(values[..., first[at]], values[..., last[at] - (1 << n) + 1])
        step = 1 << n
        values = f(values[..., :-step], values[..., step:]) if values.shape[-1] > step else values
    return np.moveaxis(found, -1, dim)
