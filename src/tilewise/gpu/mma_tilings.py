"""Which form of kernels/prefill/forward_mma.cu serves a problem: the forward of cards without wgmma, and of float32.

The choice is a pure function of the card's shared memory and of what a problem needs registers for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tilewise.arch import fp8_products, hopper, limits_of, tf32_products
from tilewise.compiler.spec import Constant, KernelSpec
from tilewise.gpu.abi import ELEMENTS, FP8, TILE_WORDS
from tilewise.gpu.pattern import NO_PATTERN, Pattern, block_keys, problem_constants
from tilewise.gpu.widths import WIDE, Widths, widths_of
from tilewise.scores import Scores

PLAIN = Scores()
BLOCK_OVERHEAD = 1024  # bytes of shared memory per block that the driver reserves


def serves(card: str, dtype: torch.dtype, scores: Scores = PLAIN) -> bool:
    """Does this kernel serve the dtype on the card? On Hopper it does where wgmma has no product, in float32, and
    where weights are dropped."""
    return not hopper(card) or dtype == torch.float32 or scores.dropout > 0


@dataclass(frozen=True)
class MmaTiling:
    """Rows of a query tile and of a warp, keys of a block, places for K and V in shared memory, and the rest.

    operand: what the products are made of: the dtype, or float16 for FP8 that is widened. q_registers: warps keep Q in
    registers. lazy: the lazy softmax. blocks_each: thread blocks that a multiprocessor holds at once. cuda_cores: the
    products run on CUDA cores. unit: keys that one entry of a list stands for, 0 if blocks follow each other.
    """

    operand: torch.dtype
    tile_q: int
    tile_kv: int
    warp_rows: int
    stages: int
    q_registers: bool
    blocks_each: int
    lazy: bool = True
    cuda_cores: bool = False
    unit: int = 0

    @property
    def threads(self) -> int:
        return 32 * self.tile_q // self.warp_rows


def _tiling(
    tile_q: int, tile_kv: int, warp_rows: int, stages: int, blocks: int, q_registers: bool = False
) -> MmaTiling:
    return MmaTiling(torch.bfloat16, tile_q, tile_kv, warp_rows, stages, q_registers, blocks)


# By bytes of an operand and padded head dimension, the wider one where V has another: the first that fits the card's
# shared memory is taken. A warp holds S and O of its rows in registers. With 32 rows each fragment of K and V that is
# read serves two products, which takes shared memory out of the way; where O leaves no registers for that, warps have
# sixteen. Two blocks per multiprocessor hide each other's barriers and softmax, and come before longer key blocks.
TILINGS: dict[tuple[int, int], tuple[MmaTiling, ...]] = {
    (2, 64): (_tiling(128, 64, 32, 2, 2, q_registers=True),),
    (2, 96): (_tiling(128, 64, 32, 1, 2),),
    (2, 128): (_tiling(128, 64, 32, 1, 2), _tiling(128, 32, 32, 1, 2)),
    (2, 192): (_tiling(64, 64, 16, 1, 2), _tiling(64, 32, 16, 1, 2)),
    (2, 256): (_tiling(64, 64, 16, 1, 1), _tiling(64, 32, 16, 1, 1)),
    # FP8: half the bytes, so that all cards have room for two places
    (1, 64): (_tiling(128, 64, 32, 2, 2, q_registers=True),),
    (1, 128): (_tiling(128, 64, 32, 2, 2),),
    (1, 192): (_tiling(64, 64, 16, 2, 2),),
    (1, 256): (_tiling(64, 64, 16, 1, 2),),
    # float32: three products each, which hide what is loaded; or CUDA cores, for which P V is unrolled over the keys
    (4, 64): (_tiling(128, 32, 32, 1, 2),),
    (4, 96): (_tiling(64, 32, 16, 1, 2),),
    (4, 128): (_tiling(128, 16, 32, 1, 2), _tiling(64, 16, 16, 1, 2)),
    (4, 192): (_tiling(64, 16, 16, 1, 2), _tiling(64, 16, 16, 1, 1)),
    (4, 256): (_tiling(64, 16, 16, 1, 1),),
}
# The same by both head dimensions, where the narrower V leaves registers for 32 rows per warp.
PAIRS = {(2, 192, 128): (_tiling(128, 48, 32, 1, 2), _tiling(64, 32, 16, 1, 2))}
# Keys of a block, at most, where warps of 32 rows draw what is dropped, by padded head dimension.
DROPPING = {96: 48, 192: 32}
# Q and K of more than 256: Q takes most of the shared memory, and O no more registers than at 256 (widths.py: slices).
WIDE_TILINGS = {
    2: (_tiling(64, 64, 16, 1, 1), _tiling(64, 32, 16, 1, 1), _tiling(64, 16, 16, 1, 1)),
    4: (_tiling(64, 16, 16, 1, 1), _tiling(32, 16, 16, 1, 1), _tiling(16, 16, 16, 1, 1)),
}


def operand_of(card: str, dtype: torch.dtype) -> torch.dtype:
    """What products are made of: the inputs' dtype; FP8 is widened to float16 where the card does not multiply it."""
    return torch.float16 if dtype == FP8 and not (fp8_products(card) and not hopper(card)) else dtype


def choose(
    card: str,
    dtype: torch.dtype,
    head_dim: int,
    scores: Scores,
    *,
    vectors: bool = True,
    pattern: Pattern = NO_PATTERN,
    page_size: int = 0,
    value_dim: int | None = None,
) -> MmaTiling:
    """The tiling for a problem on a card; vectors: rows lie on 16 bytes; value_dim: of V, if it has another."""
    operand = operand_of(card, dtype)
    widths, limits = padded(head_dim, operand, value_dim), limits_of(card)
    width = widths.widest
    # Wider heads have no registers for what CUDA cores load together.
    cuda_cores = operand == torch.float32 and not tf32_products(card) and width <= 128
    crowded = scores.changed or pattern.listed or pattern.score or not vectors or (scores.exact and operand == FP8)
    crowded = crowded or scores.dropout > 0
    found = []
    for base in _bases(operand, widths):
        tiling = replace(base, operand=operand, cuda_cores=cuda_cores)
        tiling = _for_pattern(tiling, dtype, width, crowded, pattern, page_size)
        if scores.dropout and tiling.warp_rows == 32:
            tiling = replace(tiling, tile_kv=min(tiling.tile_kv, DROPPING.get(width, tiling.tile_kv)))
            if page_size:  # pages take their own, and are rare beside dropout
                tiling = replace(tiling, tile_kv=min(tiling.tile_kv, 32), q_registers=False)
        shared = shared_bytes(dtype, widths, tiling, told=_told(tiling, pattern, page_size))
        fits = limits.shared_sm // (shared + BLOCK_OVERHEAD) if shared <= limits.shared_block else 0
        if fits >= tiling.blocks_each:
            return tiling
        found += [replace(tiling, blocks_each=fits)] if fits else []
    return found[0]


def _bases(operand: torch.dtype, widths: Widths) -> tuple[MmaTiling, ...]:
    """The tilings to be tried, the best first."""
    if widths.width in WIDE:
        return WIDE_TILINGS[operand.itemsize]
    pair = PAIRS.get((operand.itemsize, widths.width, widths.value_width))
    return pair or TILINGS[operand.itemsize, widths.widest]


def _for_pattern(
    tiling: MmaTiling, dtype: torch.dtype, width: int, crowded: bool, pattern: Pattern, page_size: int
) -> MmaTiling:
    """The tiling with room for widening, lists and functions. crowded: more than the softmax needs registers."""
    if tiling.operand != dtype:  # what arrives has one place
        tiling = replace(tiling, stages=1)
    if pattern.block_q % 128 and tiling.tile_q > 64:  # rows of a tile would visit each other's blocks
        tiling = replace(tiling, tile_q=64, warp_rows=16, q_registers=False)
    if crowded and tiling.operand == torch.float32 and width > 192:  # nor for the lazy softmax's way back
        tiling = replace(tiling, lazy=False)
    step = max(16, 32 // tiling.operand.itemsize)  # a product's depth, and sixteen columns
    tiling = replace(tiling, tile_kv=_most_keys(tiling, width, crowded, pattern) // step * step)
    if pattern.listed:
        tile_kv, unit = block_keys(tiling.tile_kv, pattern.block_k, page_size, step)
        tiling = replace(tiling, tile_kv=tile_kv, unit=unit)
    return tiling


def _told(tiling: MmaTiling, pattern: Pattern, page_size: int) -> int:
    """Ints per key block that say where its keys lie: prefill/mma_loads.cuh."""
    rows = tiling.unit or (math.gcd(page_size, tiling.tile_kv) if page_size else tiling.tile_kv)
    return tiling.tile_kv // rows * ((tiling.unit > 0) + (page_size > 0) + pattern.lengths)


def _most_keys(tiling: MmaTiling, width: int, crowded: bool, pattern: Pattern) -> int:
    """Keys of a block, at most: lists, other loads and what is done to scores take registers that S would have."""
    if not crowded or tiling.warp_rows < 32 or width < 128:
        return tiling.tile_kv
    return min(tiling.tile_kv, 32 if pattern.listed else 48)


def padded(head_dim: int, operand: torch.dtype, value_dim: int | None = None) -> Widths:
    """The head dimensions that the products run over."""
    # Rows of 96 bytes are no multiple of 64, which the swizzle of shared memory wants.
    return widths_of(head_dim, value_dim, multiple=64 // operand.itemsize)


def shared_bytes(dtype: torch.dtype, widths: Widths, tiling: MmaTiling, *, told: int = 0, vectors: bool = True) -> int:
    """Shared memory per block, as prefill/mma_loads.cuh lays it out; told: ints per block about where its keys lie."""
    both = (widths.width, widths.value_width)
    tiles = (widths.width * tiling.tile_q + sum(both) * tiling.stages * tiling.tile_kv) * tiling.operand.itemsize
    raw = 0
    if tiling.operand != dtype and vectors:  # K and V as they arrive
        for width in both:
            arriving = width * dtype.itemsize // 16
            across = min(32, arriving & -arriving)
            step = tiling.threads // across
            raw += -(-tiling.tile_kv // step) * (arriving // across) * tiling.threads * 16
    return tiles + raw + 4 * (TILE_WORDS + 4 + 4 * told)  # the tile, where K and V begin, four blocks' boxes


@lru_cache(maxsize=1024)
def forward_mma_spec(
    dtype: torch.dtype,
    head_dim: int,
    tiling: MmaTiling,
    scores: Scores,
    *,
    pack: int = 1,
    page_size: int = 0,
    vectors: bool = True,
    pattern: Pattern = NO_PATTERN,
    value_dim: int | None = None,
) -> KernelSpec:
    """The kernel for one dtype, head dimension, tiling and choice of features; vectors, value_dim: as in `choose`."""
    widths = padded(head_dim, tiling.operand, value_dim)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENTS[dtype]),
        ("Operand", ELEMENTS[tiling.operand]),
        ("Out", ELEMENTS[torch.bfloat16 if dtype == FP8 else dtype]),
        ("kHeadDim", widths.width),
        ("kColumns", head_dim),
        ("kValueDim", widths.value_width),
        ("kValueColumns", widths.value_dim),
        ("kTileQ", tiling.tile_q),
        ("kTileKv", tiling.tile_kv),
        ("kWarpRows", tiling.warp_rows),
        ("kStages", tiling.stages),
        ("kQInRegisters", tiling.q_registers),
        ("kCudaCores", tiling.cuda_cores),
        ("kBlocksEach", tiling.blocks_each),
        ("kVectors", vectors),
        ("kDropout", scores.dropout > 0),
        *problem_constants(
            scores, pattern, tile_q=tiling.tile_q, unit=tiling.unit, lazy=tiling.lazy, pack=pack, page_size=page_size
        ),
    )
    shared = shared_bytes(dtype, widths, tiling, told=_told(tiling, pattern, page_size), vectors=vectors)
    source = "prefill/forward_mma.cu"
    return KernelSpec(
        "forward_mma", source, "forward_mma", constants, tiling.threads, shared, product=True, text=pattern.text
    )
