"""The kernel over rows that are keys and values at once, kernels/mla/mla_decode.cu: its shapes, constants and map.

Everything here is a pure function of the sizes and the card; mla.py launches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from tilewise.arch import LIMITS, hopper
from tilewise.compiler.spec import KernelSpec
from tilewise.compiler.tensor_maps import TensorMapSpec
from tilewise.gpu.abi import DECODE_RULES, ELEMENTS, MAP_NAMES, PANEL, PANEL_BYTES
from tilewise.plan.cost import Weights
from tilewise.plan.worklist import FAR, Splitting

KEYS = 64  # mla/layout.cuh: of a block
THERE = 8  # mla/layout.cuh: blocks for which chosen keys are kept
LANDINGS = 16  # mla/layout.cuh: barriers of codes
RAW_WEIGHTS = 4  # mla/layout.cuh: tiles of P of a block, where codes are raw
RAW_BLOCKS = 3  # of raw codes in the ring: on an H200 four take 5% longer
FORMATS = {"bf16": 0, "fp16": 0, "fp8": 1, "int8": 2}  # tile/quant.cuh: Format
ROWS = (16, 32, 64)  # query rows of an item at most: widths of the products
CLASSES = (*ROWS, 128)  # by which shapes are measured: with more than 64, several items read the same rows
# By class, where nothing was measured on the card at hand: what was best on an H200. Panels ahead hold the ring for
# longer; that pays where the tensor cores are what is waited for. Codes and rows that come one by one come slowly.
AHEAD, AHEAD_SLOW, FETCHES = (3, 3, 2, 6), 2, (0, 0, 0, 1)
MAX_TOKENS, MAX_ROWS = 16, 2048  # query tokens of a sequence; its query rows, a head of a token each
MAX_DIM = 576
MAPS = 3  # mla_decode.cu: of rows, or of their codes, scales and 16-bit channels
MOST_FETCHES = 4  # blocks ahead, of which each keeps the pages of its boxes in registers
DTYPES = (torch.bfloat16, torch.float16)

# What the list of blocks is balanced by, in the time of 16 tokens, about 900 cycles: Q of an item is waited for, and
# its result is written; a state is written and read again; O is folded, by the query rows of an item. All were measured
# on an H200, when nothing was looked up ahead, but for 32 rows' folds. One block hardly streams faster while others are
# idle: with 16 heads 64 of 132 take a block of keys in 2.2 µs, 128 in 2.6.
FOLD_CHUNKS = {16: 1.5, 32: 4.0, 64: 12.0}
WEIGHTS = {
    rows: Weights(item_chunks=9.0, state_chunks=6.0, sprint=1.2, fold_chunks=n) for rows, n in FOLD_CHUNKS.items()
}
# Up to sixteen pieces, which is what merging folds in one run: a single sequence of 4096 tokens spreads over sixteen
# multiprocessors. Longer ones come in batches that fill the card, where a state costs: those of 16 rows in pieces of
# 512 tokens would be a ninth of the bytes that are read. Where one block takes a range whole, folding O of 64 rows
# takes as long as three blocks of keys, so their pieces are twice as long: on an H200 64 sequences of 8192 tokens with
# 128 heads took 369 µs in pieces of 1024 tokens, 328 of 2048 and 308 of 4096 (with blocks of keys in pairs). Between
# a piece and a whole range there are groups of four pieces: 64 sequences of 8192 tokens are 128 of them, one for each
# multiprocessor.
NARROW = Splitting(pieces=((1024, 64), (2048, 128), (4096, 256), (8192, 1024), (FAR, 2048)), shared=256, group=4)
WIDE = Splitting(pieces=((1024, 128), (2048, 256), (4096, 512), (8192, 2048), (FAR, 4096)), shared=512, group=4)
LONGEST = 1024  # in chunks of 16 tokens: ranges that one block may take whole, which have sixteen pieces at most


@dataclass(frozen=True)
class MlaTiling:
    """rows: query rows of an item at most. places: panels of 64 tokens × 64 channels in the ring. codes: rows are codes
    that become 16-bit values in the ring, or by mma.sync in registers. looks: a warp looks up the next item while one
    is computed. ahead: panels of a block that are scored before the block before is multiplied. together: panels of
    values in one product of 64 rows. fetches: blocks of keys ahead of those that come to the ring, which L2 is asked
    for. raw: codes of up to sixteen rows stay codes in the ring and become halves in registers, multiplied by mma.sync.
    Nothing but the number of rows and `raw` changes bits of the result."""

    rows: int
    places: int
    codes: bool = False
    looks: bool = False
    ahead: int = 0
    together: int = 1
    fetches: int = 0
    raw: bool = False

    @property
    def widens(self) -> bool:
        """Codes become 16-bit values in the ring, by warps of their own."""
        return self.codes and not self.raw

    @property
    def scaled_blocks(self) -> int:
        """mla/layout.cuh, kScaleBlocks: blocks for which scales of codes are kept."""
        return 8 if self.raw else 4


def class_of(rows: int) -> int:
    """Of CLASSES the one of items of so many query rows, and 128 where they are more than an item has."""
    return next((n for n in CLASSES if n >= rows), CLASSES[-1])


def block_places(head_dim: int, value_dim: int, tiling: MlaTiling) -> int:
    """Places that a block of 64 tokens has in the ring: mla/layout.cuh, kBlockPlaces."""
    panels, values = head_dim // PANEL, value_dim // PANEL
    return panels - values // 2 if tiling.raw else max(panels, values + 1)


def shared_bytes(head_dim: int, tiling: MlaTiling) -> int:
    """mla/layout.cuh: kSharedBytes, with what is kept of chosen keys."""
    queries = head_dim // PANEL * tiling.rows * PANEL_BYTES
    table = 2 * (96 + 24 * tiling.rows) if tiling.looks else 96 + 16 * tiling.rows
    fixed = tiling.places * (KEYS * PANEL_BYTES + 16) + queries + 32 + tiling.rows * 76 + table + KEYS * THERE
    if tiling.codes:
        fixed += tiling.scaled_blocks * (KEYS * 16 + 8) + (8 * LANDINGS if tiling.widens else 0)
    if not tiling.raw:
        return fixed
    fixed += tiling.rows * 16  # largest scores of eight groups of keys
    return -(-fixed // 1024) * 1024 + 2 * RAW_WEIGHTS * tiling.rows * PANEL_BYTES


def most_ahead(head_dim: int, value_dim: int, tiling: MlaTiling) -> int:
    """Panels that are there while the block before is, as mla/layout.cuh has it: codes are widened two panels at a
    time. With all panels of a block the place of its weights has to be there. Less than 0: too few places. Of raw codes
    no panel is scored ahead, and a block's scores are made beside the values of the block before."""
    panels, block = head_dim // PANEL, block_places(head_dim, value_dim, tiling)
    beside = tiling.places - block
    if tiling.raw:
        return min(0, beside - block)
    beside = beside // 2 * 2 if tiling.codes else beside
    return panels if beside >= block else min(beside, panels - (block > panels))


def fits(head_dim: int, value_dim: int, tiling: MlaTiling, arch: str = "sm_90a", *, boxes: bool = True) -> bool:
    """Is there a kernel of this shape? boxes: rows come by TMA."""
    wide, block = tiling.rows == ROWS[-1], block_places(head_dim, value_dim, tiling)
    blocks = tiling.places // block + 1  # that are kept at once
    return (
        0 <= tiling.ahead <= most_ahead(head_dim, value_dim, tiling)
        and (tiling.together == 1 or (wide and tiling.together > 1))
        and (not wide or tiling.places % block == 0)
        and 0 <= tiling.fetches <= (MOST_FETCHES if boxes else 0)
        and not (tiling.looks and (tiling.widens or not boxes))
        and (not tiling.raw or (tiling.codes and tiling.rows == ROWS[0]))
        and (not tiling.codes or blocks < tiling.scaled_blocks)
        and blocks < THERE
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
    raw: bool = True,
) -> MlaTiling:
    """The kernel's shape for items of so many rows: the narrowest product that holds them, and as many panels as fit.
    boxes: rows come by TMA. raw: codes of few rows are, on an H200 they are faster so.

    Shared memory holds 25 panels of 576 channels beside 16 rows of Q, 23 beside 32, and 18, which are two blocks,
    beside 64. Rings of 16-bit rows are of whole blocks, so that a panel has the same place in all of them: on an H200
    16 heads take 160 µs with 18 panels and 164 with 25. More than four blocks would hide nothing more: 36 KB in flight
    hide the memory's latency.
    """
    width = next((n for n in ROWS if n >= rows), ROWS[-1])
    room = LIMITS[arch].shared_block
    wide = width == ROWS[-1]
    base = MlaTiling(width, 0, codes, raw=raw and codes and width == ROWS[0])
    base = replace(base, looks=boxes and not base.widens)
    block = block_places(head_dim, value_dim, base)
    most = RAW_BLOCKS * block if base.raw else (base.scaled_blocks - 1 if codes else 4) * block - codes
    found = next(t for t in (replace(base, places=n) for n in range(most, 0, -1)) if shared_bytes(head_dim, t) <= room)
    if wide or not codes:  # beside 64 rows places of weights stay places of weights
        found = replace(found, places=found.places // block * block)
    kind = CLASSES.index(class_of(rows))
    ahead = min(AHEAD[kind] if boxes and not codes else AHEAD_SLOW, most_ahead(head_dim, value_dim, found))
    together = 2 if codes and wide else 1
    return replace(found, ahead=ahead, together=together, fetches=FETCHES[kind] if boxes else 0)


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
        ("kRaw", tiling.raw),
        ("kLooksAhead", tiling.looks),
        ("kPlaces", tiling.places),
        ("kAhead", tiling.ahead),
        ("kTogether", tiling.together),
        ("kFetches", tiling.fetches),
        ("kGather", gather or chosen),
        ("kChosen", chosen),
        ("kStoredAs", FORMATS.get(stored, 0)),
        rule,
        ("kSelected", False),
    )
    return KernelSpec(
        "mla_decode",
        "mla/mla_decode.cu",
        "mla_decode",
        constants,
        512 if tiling.widens else 384,  # mla/layout.cuh: kThreads
        shared_bytes(head_dim, tiling),
        product=True,
    )


def row_map(rows: torch.Tensor) -> TensorMapSpec:
    """The map of a cache's rows (num_pages, page_size, 1, channels), or of a part of them, such as codes or scales. A
    box has the tokens of a block that lie in one page, and of each as many values as a panel's row, or all of few."""
    pages, page_size, heads, channels = rows.shape
    size = rows.element_size()
    page, token, head = (s * size if n > 1 else 16 for s, n in zip(rows.stride()[:3], rows.shape[:3], strict=True))
    box = next(n for n in (64, 32, 16) if page_size % n == 0)
    width = min(channels, PANEL_BYTES // size)
    swizzle = 128 if width * size == PANEL_BYTES else 0
    sizes = (channels, page_size, heads, pages)
    names = {**MAP_NAMES, torch.int8: "int8", torch.float32: "fp32"}
    return TensorMapSpec(names[rows.dtype], sizes, (token, head, page), (width, box, 1, 1), swizzle)


def specs(card: str = "sm_90a", *, every: bool = False) -> list[KernelSpec]:
    """The kernels as users of DeepSeek's shapes get them on a Hopper card; with `every`, all widths, bodies, ways of
    loading, element types and rules."""
    found: list[KernelSpec] = []
    if not hopper(card):
        return found
    widths = CLASSES if every else (CLASSES[0], CLASSES[-1])
    for dtype, rows in product(DTYPES if every else DTYPES[:1], widths):
        tiling = choose_tiling(MAX_DIM, 512, rows)
        for page_size in (16, 64) if every else (64,):
            found.append(mla_spec(dtype, MAX_DIM, 512, page_size, tiling))
        if every:
            found.append(mla_spec(dtype, MAX_DIM, 512, 64, tiling, rule=DECODE_RULES[1]))
        tiling = choose_tiling(MAX_DIM, 512, rows, boxes=False)
        if every:
            found.append(mla_spec(dtype, MAX_DIM, 512, 24, tiling, gather=True))
        found.append(mla_spec(dtype, MAX_DIM, 512, 64, tiling, chosen=True))
        for raw in ((True, False) if every and rows == ROWS[0] else (True,)) if dtype == torch.bfloat16 else ():
            codes, gathered = (
                choose_tiling(MAX_DIM, 512, rows, codes=True, boxes=boxes, raw=raw) for boxes in (True, False)
            )
            for stored in ("fp8", "int8") if every else ("fp8",):
                found.append(mla_spec(dtype, MAX_DIM, 512, 64, codes, stored=stored))
                if every:
                    found.append(mla_spec(dtype, MAX_DIM, 512, 24, gathered, stored=stored, gather=True))
                found.append(mla_spec(dtype, MAX_DIM, 512, 64, gathered, stored=stored, chosen=True))
    return found
