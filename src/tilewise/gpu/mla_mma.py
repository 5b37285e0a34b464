"""The kernel over rows that are keys and values at once for cards without wgmma, kernels/mla/mla_decode_mma.cu: its
shapes and constants.

Everything here is a pure function of the sizes and the card; mla.py launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from tilewise.arch import hopper, limits_of
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu.abi import DECODE_RULES, ELEMENTS
from tilewise.gpu.mla_kernels import DTYPES, FORMATS, MAX_DIM, ROWS

# Keys of a slice and warps by the width, the better ones first. A warp has sixteen rows of S by 8 or 16 keys. Slices of
# 16 keys leave room for a second one beside 32 rows of Q within 99 KB; then a warp has 32 rows by 128 columns of O.
SHAPES = {16: ((32, 4),), 32: ((32, 8), (16, 4)), 64: ((32, 8),)}
# Of 576 channels a slice of 32 keys is 36 KB, and 10 KB on their way to each multiprocessor hide the latency of an
# A100's memory: more stages would wait for nothing.
MOST_STAGES = 4


@dataclass(frozen=True)
class MmaTiling:
    """rows: query rows of an item at most. keys: of a slice, which are computed at once. warps: of a block. stages:
    slices in shared memory, or raw slices beside one that is widened where rows are codes."""

    rows: int
    keys: int
    warps: int
    stages: int


def shared_bytes(head_dim: int, value_dim: int, tiling: MmaTiling, *, codes: bool) -> int:
    """mla/mma_layout.cuh: kSharedBytes."""
    rows, keys, groups = tiling.rows, tiling.keys, tiling.warps * 16 // tiling.rows
    raw = value_dim + 2 * (head_dim - value_dim) + value_dim // 32 if codes else 0
    slices = keys * (2 * head_dim * (1 if codes else tiling.stages) + raw * tiling.stages)
    per_row = 2 * (head_dim + max(keys, 32)) + 8 * groups + 36
    return slices + rows * per_row + 96 + (tiling.stages + 1) * keys


@lru_cache(maxsize=64)
def choose_tiling(head_dim: int, value_dim: int, rows: int, card: str, *, codes: bool = False) -> MmaTiling:
    """The kernel's shape for items of so many rows: the narrowest product that holds them and fits the card, and as
    many stages as fit. Rows of 576 channels have products of up to 64 rows beside 163 KB of shared memory, and of up to
    32 beside 99."""
    shapes = ((width, *shape) for width in ROWS for shape in SHAPES[width])
    tilings = [MmaTiling(*shape, stages) for shape in shapes for stages in range(MOST_STAGES, 1, -1)]
    room = limits_of(card).shared_block
    fitting = [tiling for tiling in tilings if shared_bytes(head_dim, value_dim, tiling, codes=codes) <= room]
    return next(tiling for tiling in fitting if tiling.rows >= min(rows, fitting[-1].rows))


@lru_cache(maxsize=256)
def mma_spec(
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    page_size: int,
    tiling: MmaTiling,
    *,
    chosen: bool = False,
    stored: str = "",
    rule: tuple[str, str] = DECODE_RULES[0],
) -> KernelSpec:
    """The kernel for queries of `dtype` over rows of it, or of the format `stored`, which is one of codes. chosen: each
    query token says which rows it reads."""
    constants = (
        ("Element", ELEMENTS[dtype]),
        ("kQueryDim", head_dim),
        ("kValueDim", value_dim),
        ("kPageSize", page_size),
        ("kRows", tiling.rows),
        ("kSlice", tiling.keys),
        ("kWarps", tiling.warps),
        ("kStages", tiling.stages),
        ("kChosen", chosen),
        ("kStoredAs", FORMATS.get(stored, 0)),
        rule,
        ("kLooksAhead", False),
        ("kSelected", False),
    )
    return KernelSpec(
        "mla_decode_mma",
        "mla/mla_decode_mma.cu",
        "mla_decode_mma",
        constants,
        32 * tiling.warps,
        shared_bytes(head_dim, value_dim, tiling, codes=bool(stored)),
        product=True,
    )


def specs(card: str, *, every: bool = False) -> list[KernelSpec]:
    """The kernels as users of DeepSeek's shapes get them on a card without wgmma; with `every`, all widths, element
    types, formats and rules."""
    found: list[KernelSpec] = []
    if hopper(card):
        return found
    for dtype in DTYPES if every else DTYPES[:1]:
        for stored in ("", "fp8", "int8") if every and dtype == torch.bfloat16 else ("", "fp8")[: 1 + (not every)]:
            widths = (choose_tiling(MAX_DIM, 512, rows, card, codes=bool(stored)) for rows in ROWS)
            for tiling in dict.fromkeys(widths):
                found.append(mma_spec(dtype, MAX_DIM, 512, 64, tiling, stored=stored))
                if every or tiling.rows == ROWS[0]:
                    found.append(mma_spec(dtype, MAX_DIM, 512, 64, tiling, stored=stored, chosen=True))
                if every:
                    found.append(mma_spec(dtype, MAX_DIM, 512, 24, tiling, stored=stored))
                    found.append(mma_spec(dtype, MAX_DIM, 512, 64, tiling, stored=stored, rule=DECODE_RULES[1]))
    return found
