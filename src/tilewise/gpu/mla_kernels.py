"""The kernel over rows that are keys and values at once, kernels/mla/mla_decode.cu: its shapes, constants and map.

Everything here is a pure function of the sizes and the card; mla.py launches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tilewise.arch import LIMITS, hopper
from tilewise.compiler.spec import KernelSpec
from tilewise.compiler.tensor_maps import TensorMapSpec
from tilewise.gpu.abi import DECODE_RULES, ELEMENTS, MAP_NAMES, PANEL, PANEL_BYTES
from tilewise.plan.cost import Weights
from tilewise.plan.worklist import FAR, Splitting

KEYS = 64  # mla/layout.cuh: of a block
THERE, SCALED_BLOCKS = 8, 4  # mla/layout.cuh: blocks for which chosen keys, and scales, are kept
FORMATS = {"bf16": 0, "fp16": 0, "fp8": 1, "int8": 2}  # tile/quant.cuh: Format
ROWS = (16, 32, 64)  # query rows of an item at most: widths of the products
LOOKS = (True, True, False)  # by the width: does a warp look up the next item? 64 rows leave no registers for that
MAX_TOKENS, MAX_ROWS = 16, 2048  # query tokens of a sequence; its query rows, a head of a token each
MAX_DIM = 576
DTYPES = (torch.bfloat16, torch.float16)

# What the list of blocks is balanced by, in the time of 16 tokens, about 900 cycles: Q of an item is waited for, and
# its result is written; a state is written and read again. Both were measured on an H200, when nothing was looked up
# ahead. One block streams faster while others are idle, though products bound it soon: an estimate.
WEIGHTS = Weights(item_chunks=9.0, state_chunks=6.0, sprint=1.5)
# Up to sixteen pieces, which is what merging folds in one run: a single sequence of 4096 tokens spreads over sixteen
# multiprocessors. Longer ones come in batches that fill the card, where a state costs: those of 16 rows in pieces of
# 512 tokens would be a ninth of the bytes that are read. Where one block takes a range whole, folding O of 64 rows
# takes as long as three blocks of keys, so their pieces are twice as long: on an H200 64 sequences of 8192 tokens with
# 128 heads took 369 µs in pieces of 1024 tokens, 328 of 2048 and 308 of 4096 (with blocks of keys in pairs).
NARROW = Splitting(pieces=((1024, 64), (2048, 128), (4096, 256), (8192, 1024), (FAR, 2048)), shared=256)
WIDE = Splitting(pieces=((1024, 128), (2048, 256), (4096, 512), (8192, 2048), (FAR, 4096)), shared=512)
LONGEST = 1024  # in chunks of 16 tokens: ranges that one block may take whole, which have sixteen pieces at most


@dataclass(frozen=True)
class MlaTiling:
    """rows: query rows of an item at most. places: panels of 64 tokens × 64 channels in the ring. slots: raw panels of
    64 tokens × 64 bytes on their way to become 16-bit values, 0 where rows are that. looks: a warp looks up the next
    item while one is computed."""

    rows: int
    places: int
    slots: int = 0
    looks: bool = False


def block_places(head_dim: int, value_dim: int) -> int:
    """Panels of a block of 64 tokens: mla/layout.cuh, kBlockPlaces."""
    return max(head_dim // PANEL, value_dim // PANEL + 1)


def shared_bytes(head_dim: int, tiling: MlaTiling) -> int:
    """mla/layout.cuh: kSharedBytes, with what is kept of chosen keys."""
    queries = head_dim // PANEL * tiling.rows * PANEL_BYTES
    table = 2 * (96 + 24 * tiling.rows) if tiling.looks else 96 + 16 * tiling.rows
    fixed = tiling.places * (KEYS * PANEL_BYTES + 16) + queries + 32 + tiling.rows * 76 + table + KEYS * THERE
    return fixed + tiling.slots * KEYS * PANEL + (SCALED_BLOCKS * KEYS * 16 if tiling.slots else 0)


@lru_cache(maxsize=64)
def choose_tiling(
    head_dim: int, value_dim: int, rows: int, arch: str = "sm_90a", *, codes: bool = False, boxes: bool = True
) -> MlaTiling:
    """The kernel's shape for items of so many rows: the narrowest product that holds them, and as many panels as fit.
    boxes: rows come by TMA.

    Shared memory holds 25 panels of 576 channels beside 16 rows of Q, 23 beside 32, and 18, which are two blocks,
    beside 64. More than four blocks would hide nothing more: 36 KB in flight hide the memory's latency. Of codes
    twelve raw panels, 44 KB, are on their way, or eight beside 64 rows, which are not bound by the memory.
    """
    width = next((n for n in ROWS if n >= rows), ROWS[-1])
    room = LIMITS[arch].shared_block
    most = 4 * block_places(head_dim, value_dim)
    slots = 0 if not codes else 8 if width == ROWS[-1] else 12
    base = MlaTiling(width, 0, slots, boxes and not codes and LOOKS[ROWS.index(width)])
    sizes = (replace(base, places=n) for n in range(most, 0, -1))
    return next(tiling for tiling in sizes if shared_bytes(head_dim, tiling) <= room)


@lru_cache(maxsize=256)
def mla_spec(
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    page_size: int,
    tiling: MlaTiling,
    *,
    gather: bool = False,
    chosen: bool = False,
    stored: str = "",
    rule: tuple[str, str] = DECODE_RULES[0],
) -> KernelSpec:
    """The kernel for queries of `dtype` over rows of it, or of the format `stored`, which is one of codes.

    gather: rows are copied one by one, from pages of any size. chosen: they are, and each query token says which.
    """
    constants = (
        ("Element", ELEMENTS[dtype]),
        ("kQueryDim", head_dim),
        ("kValueDim", value_dim),
        ("kPageSize", page_size),
        ("kRows", tiling.rows),
        ("kLooksAhead", tiling.looks),
        ("kPlaces", tiling.places),
        ("kGather", gather or chosen or tiling.slots > 0),
        ("kChosen", chosen),
        ("kStoredAs", FORMATS.get(stored, 0)),
        ("kSlots", tiling.slots),
        rule,
        ("kSelected", False),
    )
    return KernelSpec(
        "mla_decode",
        "mla/mla_decode.cu",
        "mla_decode",
        constants,
        512 if tiling.slots and tiling.rows < ROWS[-1] else 384,  # mla/layout.cuh: kThreads
        shared_bytes(head_dim, tiling),
        product=True,
    )


def row_map(rows: torch.Tensor) -> TensorMapSpec:
    """The map of a cache (num_pages, page_size, 1, head_dim): a box is a panel's tokens that lie in one page."""
    pages, page_size, heads, head_dim = rows.shape
    size = rows.element_size()
    page, token, head = (s * size if n > 1 else 16 for s, n in zip(rows.stride()[:3], rows.shape[:3], strict=True))
    box = next(n for n in (64, 32, 16) if page_size % n == 0)
    sizes = (head_dim, page_size, heads, pages)
    return TensorMapSpec(MAP_NAMES[rows.dtype], sizes, (token, head, page), (PANEL, box, 1, 1), 128)


def specs(card: str = "sm_90a", *, every: bool = False) -> list[KernelSpec]:
    """The kernels as users of DeepSeek's shapes get them on a Hopper card; with `every`, all widths, element types and
    rules."""
    found: list[KernelSpec] = []
    if not hopper(card):
        return found
    for dtype in DTYPES if every else DTYPES[:1]:
        for rows in ROWS if every else (16, 64):
            tiling = choose_tiling(MAX_DIM, 512, rows)
            for page_size in (16, 64) if every else (64,):
                found.append(mla_spec(dtype, MAX_DIM, 512, page_size, tiling))
            if every:
                found.append(mla_spec(dtype, MAX_DIM, 512, 64, tiling, rule=DECODE_RULES[1]))
            tiling = choose_tiling(MAX_DIM, 512, rows, boxes=False)
            if every:
                found.append(mla_spec(dtype, MAX_DIM, 512, 24, tiling, gather=True))
            found.append(mla_spec(dtype, MAX_DIM, 512, 64, tiling, chosen=True))
            if dtype == torch.bfloat16:
                codes = choose_tiling(MAX_DIM, 512, rows, codes=True)
                found.append(mla_spec(dtype, MAX_DIM, 512, 64, codes, stored="fp8"))
                if every:
                    found.append(mla_spec(dtype, MAX_DIM, 512, 64, codes, stored="fp8", chosen=True))
                    found.append(mla_spec(dtype, MAX_DIM, 512, 64, codes, stored="int8"))
    return found
