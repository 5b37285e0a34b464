"""States of some rows joined with others in place, kernels/common/merge_rows.cu: arguments and launch.

It runs on the card of its tensors, or in the emulator over CPU tensors, and validates nothing.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from typing import Any

import torch

from tilewise import compiler, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu.abi import ELEMENTS
from tilewise.gpu.append import CHANNELS, FLOATS, THREADS


class MergeRowsArgs(ctypes.Structure):
    """merge_rows.cu: MergeRowsArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("o", "lse", "states", "logs", "rows", "table")),
        *((n, ctypes.c_int64) for n in ("o_row", "o_head", "lse_head", "number")),
        *((n, ctypes.c_int) for n in ("count", "most", "heads", "head_dim")),
        ("vectors", ctypes.c_uint32),
    ]


@lru_cache(maxsize=256)
def merge_spec(dtype: torch.dtype, head_dim: int) -> KernelSpec:
    """The kernel for states of `dtype`."""
    chunks = -(-head_dim // CHANNELS)
    lanes = min(32, max(4, 1 << (chunks - 1).bit_length()))
    constants = (("Element", ELEMENTS[dtype]), ("kLanes", lanes), ("kChunks", -(-chunks // lanes)))
    return KernelSpec("merge_rows", "common/merge_rows.cu", "merge_rows", constants, THREADS, 0, product=True)


def specs(*, every: bool = False) -> list[KernelSpec]:
    """The kernels as users get them: bfloat16 and head dimension 128, or `every` dtype and width."""
    dtypes, widths = (FLOATS, (32, 64, 128, 256)) if every else ((torch.bfloat16,), (128,))
    return [merge_spec(dtype, width) for dtype in dtypes for width in widths]


class _Merge:
    """The kernel and its arguments for one device and dtype. One thread at a time fills and launches them."""

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        self.spec, self.lock, self.args = merge_spec(dtype, head_dim), threading.Lock(), MergeRowsArgs()
        self.rows_of_block = THREADS // int(dict(self.spec.constants)["kLanes"])
        if device.type == "cuda":
            self.kernel = compiler.load(self.spec, device)
            self.launch_args = compiler.Args(self.args)


_bound = lru_cache(maxsize=256)(_Merge)


def merge_rows(
    o: torch.Tensor,
    lse: torch.Tensor,
    states: torch.Tensor,
    logs: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    **emulated: Any,
) -> None:
    """Join the states of `rows` (n,) int32 of o (rows, heads, D), lse (heads, rows) with others, in place.

    states (m, heads, D) of o's dtype, logs (heads, m) float32, both contiguous: the others. table: (n, most) int32, row
    by row those that join it, negative where there are fewer. emulated: options of emulator.launch.
    """
    if not len(rows):
        return
    bound = _bound(o.device, o.dtype, o.shape[-1])
    with bound.lock:
        a, size = bound.args, o.element_size()
        a.o, a.lse, a.states, a.logs, a.rows, a.table = (x.data_ptr() for x in (o, lse, states, logs, rows, table))
        a.o_row, a.o_head, a.lse_head, a.number = o.stride(0), o.stride(1), lse.stride(0), len(states)
        a.count, a.most, a.heads, a.head_dim = len(rows), table.shape[1], o.shape[1], o.shape[2]
        whole = o.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in o.stride()[:2])
        a.vectors = whole + 2 * (o.shape[2] * size % 16 == 0)
        grid = (-(-len(rows) * o.shape[1] // bound.rows_of_block), 1, 1)
        if o.device.type == "cuda":
            bound.kernel.launch(grid, bound.launch_args)
            return
        known = {"o": o, "lse": lse, "states": states, "logs": logs, "rows": rows, "table": table}
        emulator.launch(bound.spec, grid, [a], known, **emulated)
