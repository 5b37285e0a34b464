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
LAG = 8  # mla/layout.cuh: panels on their way where rows are copied one by one
FORMATS = {"bf16": 0, "fp16": 0, "fp8": 1, "int8": 2}  # tile/quant.cuh: Format
ROWS = (16, 32, 64)  # query rows of an item at most: widths of the products
LOOKS = (True, True, False)  # by the width: does a warp look up the next item? 64 rows leave no registers for that
AHEAD, TOGETHER = 2, 2  # of the seesaw where nothing was measured: by the cycles in docs/inside/mla.md
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
    item while one is computed.

    seesaw: the body for 64 rows in which these are the rows of products (wide.cuh), not their columns. It sums in
    another order: of all that is said here, it alone changes bits of the result. ahead: panels of a block that it
    scores before it multiplies the block before. together: panels of values in one of its products.

    apart: of the warps that load codes, some copy and the others widen (widen.cuh)."""

    rows: int
    places: int
    slots: int = 0
    looks: bool = False
    seesaw: bool = False
    ahead: int = 0
    together: int = 1
    apart: bool = False


def block_places(head_dim: int, value_dim: int) -> int:
    """Panels of a block of 64 tokens: mla/layout.cuh, kBlockPlaces."""
    return max(head_dim // PANEL, value_dim // PANEL + 1)


def shared_bytes(head_dim: int, tiling: MlaTiling) -> int:
    """mla/layout.cuh: kSharedBytes, with what is kept of chosen keys."""
    queries = head_dim // PANEL * tiling.rows * PANEL_BYTES
    table = 2 * (96 + 24 * tiling.rows) if tiling.looks else 96 + 16 * tiling.rows
    fixed = tiling.places * (KEYS * PANEL_BYTES + 16) + queries + 32 + tiling.rows * 76 + table + KEYS * THERE
    raw = tiling.slots * KEYS * PANEL + (SCALED_BLOCKS * KEYS * 16 if tiling.slots else 0)
    return fixed + raw + (10 * tiling.slots if tiling.apart else 0)


def most_ahead(head_dim: int, value_dim: int, tiling: MlaTiling, *, boxes: bool) -> int:
    """Panels that are there while the block before is, as mla/layout.cuh has it: of rows that are copied one by one it
    is told kLag panels later, and codes are widened two panels at a time. With all panels of a block the place of its
    weights has to be there. Less than 0: too few places."""
    panels, block = head_dim // PANEL, block_places(head_dim, value_dim)
    beside = tiling.places - block - (0 if boxes or tiling.slots else LAG)
    beside = beside // 2 * 2 if tiling.slots else beside
    return panels if beside >= block else min(beside, panels - (block > panels))


def _most_slots(head_dim: int, value_dim: int, places: int) -> int:
    """mla/widen.cuh: raw panels, of which a lap through the places has as many at least."""
    block = block_places(head_dim, value_dim)
    weights = -(-places // block) if block > head_dim // PANEL else 0
    return (places - weights) // 2 * 2


def _wideners(tiling: MlaTiling) -> int:
    """mla/widen.cuh: kWideners, warps that widen and do not copy."""
    return 2 if tiling.rows == ROWS[-1] else 6


def fits(head_dim: int, value_dim: int, tiling: MlaTiling, arch: str = "sm_90a", *, boxes: bool = True) -> bool:
    """Is there a kernel of this shape? boxes: rows come by TMA."""
    wide = tiling.seesaw and tiling.rows == ROWS[-1]
    slots = range(2 * _wideners(tiling), _most_slots(head_dim, value_dim, tiling.places) + 1)
    return (
        0 <= tiling.ahead <= most_ahead(head_dim, value_dim, tiling, boxes=boxes)
        and (wide or not (tiling.seesaw or tiling.ahead or tiling.together > 1))
        and tiling.together >= 1
        and (boxes or not tiling.looks)
        and tiling.slots % 2 == 0
        and (not tiling.apart or tiling.slots in slots)
        and shared_bytes(head_dim, tiling) <= LIMITS[arch].shared_block
    )


@lru_cache(maxsize=64)
def choose_tiling(
    head_dim: int,
    value_dim: int,
    rows: int,
    arch: str = "sm_90a",
    *,
    codes: bool = False,
    boxes: bool = True,
    seesaw: bool = False,
) -> MlaTiling:
    """The kernel's shape for items of so many rows: the narrowest product that holds them, and as many panels as fit.
    boxes: rows come by TMA, which those of codes do not. seesaw: the other body, for more than 32 rows.

    Shared memory holds 25 panels of 576 channels beside 16 rows of Q, 23 beside 32, and 18, which are two blocks,
    beside 64. More than four blocks would hide nothing more: 36 KB in flight hide the memory's latency. Of codes
    twelve raw panels, 44 KB, are on their way, or eight beside 64 rows, which are not bound by the memory.
    """
    width = next((n for n in ROWS if n >= rows), ROWS[-1])
    room = LIMITS[arch].shared_block
    most = 4 * block_places(head_dim, value_dim)
    slots = 0 if not codes else 8 if width == ROWS[-1] else 12
    base = MlaTiling(width, 0, slots, boxes and not codes and (seesaw or LOOKS[ROWS.index(width)]), seesaw)
    sizes = (replace(base, places=n) for n in range(most, 0, -1))
    found = next(tiling for tiling in sizes if shared_bytes(head_dim, tiling) <= room)
    if not seesaw:
        return found
    block = block_places(head_dim, value_dim)
    if found.places >= 2 * block:  # whole blocks, of which panels that are multiplied together are neighbours
        found = replace(found, places=found.places // block * block)
    ahead = min(AHEAD, most_ahead(head_dim, value_dim, found, boxes=boxes and not codes))
    return replace(found, ahead=ahead, together=1 if found.places % block else TOGETHER)


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
        ("kSeesaw", tiling.seesaw),
        ("kAhead", tiling.ahead),
        ("kTogether", tiling.together),
        ("kGather", gather or chosen or tiling.slots > 0),
        ("kChosen", chosen),
        ("kStoredAs", FORMATS.get(stored, 0)),
        ("kSlots", tiling.slots),
        ("kApart", tiling.apart),
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
    """The kernels as users of DeepSeek's shapes get them on a Hopper card; with `every`, all widths, bodies, element
    types and rules."""
    found: list[KernelSpec] = []
    if not hopper(card):
        return found
    bodies = [(rows, False) for rows in ROWS] + [(ROWS[-1], True)] if every else [(16, False), (64, False)]
    for dtype in DTYPES if every else DTYPES[:1]:
        for rows, seesaw in bodies:
            tiling = choose_tiling(MAX_DIM, 512, rows, seesaw=seesaw)
            for page_size in (16, 64) if every else (64,):
                found.append(mla_spec(dtype, MAX_DIM, 512, page_size, tiling))
            if every:
                found.append(mla_spec(dtype, MAX_DIM, 512, 64, tiling, rule=DECODE_RULES[1]))
            tiling = choose_tiling(MAX_DIM, 512, rows, boxes=False, seesaw=seesaw)
            if every:
                found.append(mla_spec(dtype, MAX_DIM, 512, 24, tiling, gather=True))
            found.append(mla_spec(dtype, MAX_DIM, 512, 64, tiling, chosen=True))
            if dtype == torch.bfloat16:
                codes = choose_tiling(MAX_DIM, 512, rows, codes=True, seesaw=seesaw)
                found.append(mla_spec(dtype, MAX_DIM, 512, 64, codes, stored="fp8"))
                for tiling in (codes, replace(codes, apart=True)) if every else ():
                    found.append(mla_spec(dtype, MAX_DIM, 512, 64, tiling, stored="fp8", chosen=True))
                    found.append(mla_spec(dtype, MAX_DIM, 512, 64, tiling, stored="int8"))
    return found
