"""Which kernel of kernels/prefill/ serves a problem: its tiling, its constants, and how the problem's tiles lie.

Here stands what the Hopper forward takes; mma_tilings.py has the same of the one for other cards and for float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from tilewise import functions, tuned
from tilewise.arch import arch_of_device, card_of, limits_of, tf32_products
from tilewise.compiler.spec import Constant, KernelSpec
from tilewise.gpu import mma_tilings
from tilewise.gpu.abi import ELEMENTS, EVERY_RULE, FP8, PANEL_BYTES, TILE_WORDS
from tilewise.gpu.kinds import kinds_spec
from tilewise.gpu.mma_tilings import MmaTiling
from tilewise.gpu.pattern import NO_PATTERN, Pattern, block_keys, fold_spec, problem_constants
from tilewise.gpu.widths import MAX_HEAD_DIM as MAX_HEAD_DIM
from tilewise.gpu.widths import Widths, widths_of
from tilewise.scores import Scores

DTYPES = (torch.bfloat16, torch.float16, FP8, torch.float32)
# Heads whose tiles are taken side by side, the heaviest first, so that no heavy tile is left for the end: as many heads
# × head_dim as this, whose tiles walk the same keys at the same time; and of packed sequences, whose tiles do not, as
# many as have so many bytes of K and V, which stay in L2.
HEADS_TOGETHER, BYTES_TOGETHER = 2048, 24 << 20
SCALE_BYTES = 128 + 16  # prefill/layout.cuh: the scale once per lane, and the count of V's valid rows per stage


@dataclass(frozen=True)
class Tiling:
    """Rows of a query tile, keys of a block, stages of Q, K and V in shared memory, and how the warpgroups work.

    ping_pong: they take turns at the tensor cores. q_registers: they keep Q in registers. lazy: the lazy softmax. It
    keeps K until the softmax is done, in case S has to be computed again, and so needs one more stage of K.
    stages_raw: stages of FP8's V before it is transposed; stages_v are those after it. unit: keys that one entry of a
    list stands for, 0 if blocks follow each other. parts: in which a block of K comes, each in
    a stage of its own.
    """

    tile_q: int
    tile_kv: int
    stages_q: int
    stages_k: int
    stages_v: int
    ping_pong: bool
    q_registers: bool
    lazy: bool
    stages_raw: int = 0
    unit: int = 0
    parts: int = 1

    @property
    def blocks_each(self) -> int:
        """Thread blocks that a multiprocessor holds at once: prefill/layout.cuh has the same."""
        return 2 if self.tile_q == 64 else 1


# By padded head dimension, the wider one where V has another. A warpgroup holds S (64 × tile_kv), P of the block before
# it and O at once; a block holds Q and rings of K and V. At 64 the softmax takes longer than the products: three
# warpgroups hide it.
TILINGS = {
    64: Tiling(192, 128, 2, 4, 3, ping_pong=True, q_registers=False, lazy=True),
    96: Tiling(128, 128, 2, 3, 2, ping_pong=True, q_registers=True, lazy=True),
    128: Tiling(128, 128, 2, 3, 2, ping_pong=True, q_registers=True, lazy=True),
    192: Tiling(128, 112, 1, 2, 2, ping_pong=True, q_registers=False, lazy=False),
    256: Tiling(128, 64, 1, 2, 2, ping_pong=True, q_registers=False, lazy=True),
}
# By the padded head dimensions of Q and K, and of V, where another tiling than that of the wider one serves. (192, 128)
# is made as 128 is: Q in registers, so that shared memory is read for K and V alone, and in two stages, so that tiles
# overlap. That leaves room for blocks of 96 keys. With 128 keys Q would not fit the registers, nor its second stage.
PAIRS = {
    (192, 128): Tiling(128, 96, 2, 2, 2, ping_pong=True, q_registers=True, lazy=True),
}
# What `tilewise tune` measures beside it: longer blocks, for which Q stays in shared memory, in one stage.
LONG_PAIR = Tiling(128, 128, 1, 2, 2, ping_pong=True, q_registers=False, lazy=True)
# Q and K of more than 256: there is room for one block of K only, which comes in parts. A part of the next block
# travels as soon as this one's is multiplied. S could not be computed again, but the softmax takes little beside such
# products anyway. At 512 a part is 128 columns: on an H200 causal 8192 tokens run at 468 TFLOP/s so, at 449 in parts
# of 64 columns and at 452 in halves. docs/lab-notes.md has the arithmetic.
WIDE = {
    384: Tiling(128, 64, 1, 6, 2, ping_pong=False, q_registers=False, lazy=False, parts=6),
    512: Tiling(128, 64, 1, 4, 1, ping_pong=False, q_registers=False, lazy=False, parts=4),
    576: Tiling(128, 48, 1, 9, 1, ping_pong=False, q_registers=False, lazy=False, parts=9),
}
# For scores that are more than scaled, and loads without TMA or from pages: three warpgroups leave too few registers.
SMALL_64 = Tiling(128, 128, 2, 3, 2, ping_pong=False, q_registers=True, lazy=True)
# Most tiles of short causal sequences lie on the diagonal, where smaller tiles waste less.
SHORT_64 = Tiling(128, 64, 2, 5, 4, ping_pong=False, q_registers=True, lazy=True)
# The standard softmax has a cost per block, so longer blocks pay; beside the lazy one they would not fit.
EXACT_256 = Tiling(128, 80, 1, 2, 2, ping_pong=True, q_registers=False, lazy=False)
# FP8: products take half the time, so that waiting for turns at the tensor cores costs more than it gains. Shared
# memory also holds Vᵀ beside V, and O, whose elements are twice as wide as Q's.
TILINGS_FP8 = {
    64: Tiling(128, 128, 2, 3, 2, ping_pong=False, q_registers=True, lazy=True, stages_raw=2),
    96: Tiling(128, 128, 2, 3, 2, ping_pong=False, q_registers=True, lazy=True, stages_raw=2),
    128: Tiling(128, 128, 2, 3, 2, ping_pong=False, q_registers=True, lazy=True, stages_raw=2),
    192: Tiling(128, 96, 1, 2, 2, ping_pong=False, q_registers=False, lazy=False, stages_raw=2),
    256: Tiling(128, 64, 1, 3, 2, ping_pong=False, q_registers=False, lazy=False, stages_raw=2),
}
AnyTiling = Tiling | MmaTiling
EVERY_PAIR = ((192, 128), (64, 512), (512, 512), (576, 512))  # head dimensions of Q and K, and V, that models have
SHORT = 1024  # query rows, up to which a sequence counts as short
# Schedules with fewer than 128 rows per block: rows that are in a tile together would otherwise visit each other's
# blocks. Two such blocks of threads share a multiprocessor.
FEW_ROWS = Tiling(64, 64, 2, 3, 2, ping_pong=False, q_registers=False, lazy=True)


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """What comes out where `dtype` goes in: the same, or bfloat16 for FP8."""
    return torch.bfloat16 if dtype == FP8 else dtype


def choose_tiling(
    dtype: torch.dtype,
    head_dim: int,
    seqlen_q: float,
    scores: Scores,
    *,
    plain: bool,
    pattern: Pattern = NO_PATTERN,
    page_size: int = 0,
    value_dim: int | None = None,
) -> Tiling:
    """The tiling for sequences of about `seqlen_q` rows; plain: K and V come by TMA and are not paged."""
    widths = widths_of(head_dim, value_dim)
    if pattern != NO_PATTERN:
        return _patterned_tiling(dtype, widths, scores, pattern, plain, page_size)
    width = widths.widest
    if dtype == FP8:
        tiling = TILINGS_FP8[width]
        if scores.changed or not plain:
            tiling = replace(tiling, q_registers=False, tile_kv=min(96, tiling.tile_kv))
        return tiling
    tiling, short = _base(widths), seqlen_q <= SHORT
    if width == 64 and (scores.changed or not plain):
        tiling = SMALL_64
    elif width == 64 and short and scores.window[1] is not None:
        tiling = SHORT_64
    elif width == 256 and scores.exact and not short and plain and not scores.changed:
        tiling = EXACT_256
    if scores.changed or not plain:  # these need the registers that Q or the lazy softmax would take
        tiling = replace(tiling, q_registers=False, lazy=tiling.lazy and width < 256)
    if scores.changed and not plain and width > 128:  # and some of those that S takes
        tiling = replace(tiling, tile_kv=tiling.tile_kv - 16)
    return tiling


def _base(widths: Widths) -> Tiling:
    """The tiling of 16-bit inputs with nothing special about them."""
    if widths.width in WIDE:
        return WIDE[widths.width]
    return PAIRS.get((widths.width, widths.value_width), TILINGS[widths.widest])


def _patterned_tiling(
    dtype: torch.dtype, widths: Widths, scores: Scores, pattern: Pattern, plain: bool, page_size: int
) -> Tiling:
    """The tiling with lists or functions: both take registers, so Q stays in shared memory.

    The blocks of a schedule arrive less evenly than neighbouring ones, and waiting for turns costs more than it gains.
    """
    width = widths.widest
    tiling = TILINGS_FP8[width] if dtype == FP8 else SMALL_64 if width == 64 else _base(widths)
    if pattern.block_q % 128 and width <= 128 and dtype != FP8 and plain:
        tiling = FEW_ROWS
    most = tiling.tile_kv
    if dtype == FP8:
        most = 32 if width == 256 and pattern.text and pattern.listed else min(96, most)
    elif width > 128:
        most = 48 if width >= 256 and pattern.text else min(64, most)
    tiling = replace(
        tiling, q_registers=False, lazy=tiling.lazy and not (scores.changed and width >= 256), tile_kv=most
    )
    if not pattern.listed:
        return tiling
    tile_kv, unit = block_keys(most, pattern.block_k, page_size, 32 if dtype == FP8 else 16)
    return replace(tiling, tile_kv=tile_kv, unit=unit, ping_pong=tiling.ping_pong and not pattern.block_q)


@lru_cache(maxsize=1024)
def forward_spec(
    dtype: torch.dtype,
    head_dim: int,
    tiling: Tiling,
    scores: Scores,
    *,
    pack: int = 1,
    page_size: int = 0,
    tma: bool = True,
    pattern: Pattern = NO_PATTERN,
    value_dim: int | None = None,
) -> KernelSpec:
    """The kernel for one dtype, head dimension, tiling and choice of features; value_dim: as `choose` has it."""
    widths, fp8 = widths_of(head_dim, value_dim), dtype == FP8
    row, value_row = (_panels(x * dtype.itemsize) for x in (widths.width, widths.value_width))
    out_row = _panels(widths.value_width * 2) if tiling.stages_q > 1 else 0  # O goes by way of shared memory
    values, raw = value_row * tiling.tile_kv, tiling.stages_raw
    tiles = tiling.stages_k * row * tiling.tile_kv // tiling.parts
    if fp8:  # Vᵀ, V, and O
        tiles += tiling.stages_v * _panels(tiling.tile_kv) * widths.value_width + raw * values
        tiles += (tiling.stages_q * row + out_row) * tiling.tile_q
    else:  # O stands where Q was
        tiles += tiling.stages_v * values + tiling.stages_q * max(row, out_row) * tiling.tile_q
    stages_o = 1 if fp8 else tiling.stages_q
    barriers = 16 * (tiling.stages_q + tiling.stages_k + tiling.stages_v + max(1, raw) + stages_o + 1)
    threads = 2 * tiling.tile_q + (256 if fp8 else 128)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENTS[dtype]),
        ("Out", ELEMENTS[out_dtype(dtype)]),
        ("kHeadDim", widths.width),
        ("kColumns", head_dim),
        ("kValueDim", widths.value_width),
        ("kValueColumns", widths.value_dim),
        ("kTileQ", tiling.tile_q),
        ("kTileKv", tiling.tile_kv),
        ("kParts", tiling.parts),
        ("kStagesQ", tiling.stages_q),
        ("kStagesK", tiling.stages_k),
        ("kStagesV", tiling.stages_v),
        ("kStagesRaw", raw),
        ("kPingPong", tiling.ping_pong),
        ("kQInRegisters", tiling.q_registers),
        ("kTma", tma),
        *problem_constants(
            scores, pattern, tile_q=tiling.tile_q, unit=tiling.unit, lazy=tiling.lazy, pack=pack, page_size=page_size
        ),
    )
    boxes = tiling.tile_kv // tiling.unit if tiling.unit else 0
    told = 4 * boxes * (tiling.stages_k * (1 + pattern.lengths) + raw * pattern.lengths)
    shared = tiles + -(-(barriers + SCALE_BYTES + told) // 64) * 64 + 4 * TILE_WORDS * (tiling.stages_q + 1)
    return KernelSpec(
        "forward", "prefill/forward.cu", "forward", constants, threads, shared, product=True, text=pattern.text
    )


def _panels(size: int) -> int:
    """Bytes that `size` of them take in whole panels."""
    return -(-size // PANEL_BYTES) * PANEL_BYTES


def choose(
    card: str,
    dtype: torch.dtype,
    head_dim: int,
    seqlen_q: float,
    scores: Scores,
    *,
    tma: bool = True,
    page_size: int = 0,
    pattern: Pattern = NO_PATTERN,
    value_dim: int | None = None,
) -> AnyTiling:
    """The tiling, and with it the kernel, for sequences of about `seqlen_q` rows; tma: rows lie on 16 bytes;
    value_dim: the head dimension of V, if it is another than that of Q and K."""
    loads: dict[str, Any] = {"pattern": pattern, "page_size": page_size, "value_dim": value_dim}
    if mma_tilings.serves(card, dtype, scores):
        return mma_tilings.choose(card, dtype, head_dim, scores, vectors=tma, **loads)
    return choose_tiling(dtype, head_dim, seqlen_q, scores, plain=tma and not page_size, **loads)


def kernel_of(device: torch.device, dtype: torch.dtype, dropout: bool = False) -> tuple[str, str]:
    """The kernel that serves a dtype on a device, forward or forward_mma, and why it is that one; dropout: weights are
    dropped."""
    card = card_of(device)
    asked = "" if card == arch_of_device(device) else ", which TILEWISE_CARD asks for,"
    if not mma_tilings.serves(card, dtype):
        if dropout:
            return "forward_mma", f"{card}{asked} drops weights in the kernel by mma.sync"
        return "forward", f"{card}{asked} has wgmma and TMA"
    if dtype == torch.float32:
        tf32 = "as three TF32 products of mma.sync each"
        how = tf32 if tf32_products(card) else f"on CUDA cores, of wide heads {tf32}"
        return "forward_mma", f"{card}{asked} runs float32 {how}"
    why = f"{card}{asked} has no wgmma, so products are made by mma.sync"
    if card in ("sm_100", "sm_103"):
        why += "; data-centre cards of Blackwell have no kernel of their own yet"
    if mma_tilings.operand_of(card, dtype) != dtype:
        why += "; FP8 is widened to float16, which that multiplies there"
    return "forward_mma", why


def as_measured(
    table: tuned.Tuned,
    card: str,
    dtype: torch.dtype,
    head_dim: int,
    seqlen_q: float,
    tiling: AnyTiling,
    scores: Scores,
    *,
    tma: bool = True,
    page_size: int = 0,
    pattern: Pattern = NO_PATTERN,
    value_dim: int | None = None,
) -> AnyTiling:
    """What was measured to be fastest on the card in place of `tiling`, if such problems were measured and it fits."""
    plain, width = tma and not page_size, widths_of(head_dim, value_dim).key
    family, key = tuned.key_of(dtype, width, seqlen_q, scores, plain=plain, pattern=pattern)
    limits = limits_of(card)
    loads: dict[str, Any] = {"tma": tma, "page_size": page_size, "pattern": pattern, "value_dim": value_dim}

    def fits(other: AnyTiling) -> bool:
        spec = spec_of(dtype, head_dim, other, scores, **loads)
        room = other.blocks_each * (spec.shared_bytes + mma_tilings.BLOCK_OVERHEAD) <= limits.shared_sm
        return room and spec.shared_bytes <= limits.shared_block

    return table.prefer(family, key, tiling, fits)


def spec_of(
    dtype: torch.dtype,
    head_dim: int,
    tiling: AnyTiling,
    scores: Scores,
    *,
    pack: int = 1,
    page_size: int = 0,
    tma: bool = True,
    pattern: Pattern = NO_PATTERN,
    value_dim: int | None = None,
) -> KernelSpec:
    """The kernel of a tiling."""
    loads: dict[str, Any] = {"page_size": page_size, "pattern": pattern, "value_dim": value_dim}
    if isinstance(tiling, MmaTiling):
        return mma_tilings.forward_mma_spec(dtype, head_dim, tiling, scores, pack=pack, vectors=tma, **loads)
    return forward_spec(dtype, head_dim, tiling, scores, pack=pack, tma=tma, **loads)


def spec_for(
    card: str, dtype: torch.dtype, head_dim: int, seqlen_q: float, scores: Scores, **loads: Any
) -> tuple[AnyTiling, KernelSpec]:
    """The tiling that a problem gets, and its kernel. loads: tma, page_size, pattern, value_dim, as in `choose`."""
    tiling = choose(card, dtype, head_dim, seqlen_q, scores, **loads)
    return tiling, spec_of(dtype, head_dim, tiling, scores, **loads)


@lru_cache(maxsize=64)
def ragged_spec(index: torch.dtype, tiling: AnyTiling, pack: int) -> KernelSpec:
    """The kernel that lists the tiles of packed sequences; index: of the cumulative lengths."""
    constants = (
        ("Index", "int64_t" if index == torch.int64 else "int"),
        ("kTileQ", tiling.tile_q),
        ("kTileKv", tiling.tile_kv),
        ("kPack", pack),
    )
    return KernelSpec("ragged", "prefill/ragged.cu", "ragged", constants, 1024, 0, product=True)


def specs(card: str = "sm_90a", *, every: bool = False) -> list[KernelSpec]:
    """The kernels as users of a card get them: bfloat16 and head dimension 128, or `every` dtype, head dimension and
    feature.

    With schedules and functions, of which there are as many kernels as users write, those that most users get.
    """
    causal = (None, 0)
    asked = [Scores(causal), Scores(causal, exact=True)]
    if every:
        asked += [Scores(), *(replace(rule, window=causal) for rule in EVERY_RULE[1:])]
    loads: list[dict[str, Any]] = [{}, {"page_size": 16}, {"tma": False}] if every else [{}]
    found = []
    for dtype in DTYPES if every else (torch.bfloat16, FP8, torch.float32):
        for head_dim in TILINGS if every else (128,):
            for scores in asked:
                for rows in (SHORT, 1 << 20):
                    found += [spec_for(card, dtype, head_dim, rows, scores, **load)[1] for load in loads]
    for dtype, head_dim, scores in _dropping(asked) if every else ():
        found += [spec_for(card, dtype, head_dim, 1 << 20, scores, **load)[1] for load in loads]
    for head_dim, value_dim in EVERY_PAIR if every else ():
        for dtype, load in product((torch.bfloat16, torch.float32), loads):
            found.append(spec_for(card, dtype, head_dim, 1 << 20, asked[0], value_dim=value_dim, **load)[1])
    tile = choose(card, torch.bfloat16, 128, 1 << 20, Scores())
    found += [ragged_spec(torch.int32, tile, 1), *_patterned_specs(card, every)]
    return list(dict.fromkeys(found))


def _dropping(asked: Sequence[Scores]) -> Iterator[tuple[torch.dtype, int, Scores]]:
    """The same problems with dropout, which FP8 has none of."""
    kinds = product((x for x in DTYPES if x != FP8), TILINGS, asked)
    return ((dtype, head_dim, replace(scores, dropout=0.1)) for dtype, head_dim, scores in kinds)


def _patterned_specs(card: str, every: bool) -> list[KernelSpec]:
    """The forward with lists and functions, and the kernels that make its lists."""
    plain, blocks = Scores(), Pattern(128, 128)
    masked, scored = _functions()
    asked: list[tuple[Pattern, Scores, int]] = [(x, plain, 0) for x in (blocks, masked, scored)]
    if every:
        small, causal = Pattern(64, 64), Scores((None, 0))
        asked += [
            (small, plain, 0),
            (replace(small, lengths=True), plain, 0),
            (blocks, causal, 16),
            (masked, plain, 16),
        ]
        asked += [(replace(masked, block_q=128, block_k=128), plain, 0)]
    found, lists = [], []
    for dtype in DTYPES if every else (torch.bfloat16,):
        for head_dim in (64, 128, 256) if every else (128,):
            for pattern, scores, page_size in asked:
                loads: dict[str, Any] = {"pattern": pattern, "page_size": page_size}
                tiling, spec = spec_for(card, dtype, head_dim, 1 << 20, scores, **loads)
                found.append(spec)
                if pattern.listed:
                    lists.append(fold_spec(pattern, tiling.tile_q, tiling.unit, 1, page_size > 0))
    return [*found, *lists, kinds_spec(masked.text)]


def _functions() -> list[Pattern]:
    """Causal attention within documents, and ALiBi, as users write them."""
    sizes = (1, 16, 4096, 4096)
    document, slopes = torch.zeros(4096, dtype=torch.int32), torch.zeros(16)
    mask = functions.of(lambda b, h, q, k: (document[q] == document[k]) & (q >= k), None)
    score = functions.of(None, lambda s, b, h, q, k: s - slopes[h] * (q - k).abs())
    return [Pattern.of(None, function, sizes) for function in (mask, score)]


def pack_of(tile_q: int, seqlen_q: float, group: int) -> int:
    """How many query heads of a KV head share a tile as neighbouring rows: all of them, if that saves tiles."""
    if group == 1 or tile_q % group:
        return 1
    apart, together = group * math.ceil(seqlen_q / tile_q), math.ceil(seqlen_q * group / tile_q)
    return group if together < 0.9 * apart else 1


@dataclass(frozen=True)
class Geometry:
    """How the tiles of a problem lie, and in which order thread blocks take them.

    pack: query heads of a KV head that stand in a tile as neighbouring rows. heads: that a sequence has tiles of, in
    units of `pack` query heads. q_tiles: per sequence and such head. together: such heads of all sequences whose tiles
    are taken side by side, the heaviest first. slices: of V's columns, each of which takes a thread block of its own.
    """

    tiling: AnyTiling
    pack: int
    heads: int
    q_tiles: int
    together: int
    slices: int = 1


def geometry(
    card: str,
    dtype: torch.dtype,
    batch: int,
    seqlen_q: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    scores: Scores,
    *,
    tma: bool,
    sequences: int | None = None,
    seqlen_k: int = 0,
    pattern: Pattern = NO_PATTERN,
    page_size: int = 0,
    table: tuned.Tuned | None = None,
    value_dim: int | None = None,
) -> Geometry:
    """The geometry of dense rows, or of `sequences` packed ones with `seqlen_k` keys in all, on a card; tma and
    value_dim: as `choose` has them. table: what was measured on it."""
    rows = seqlen_q if sequences is None else seqlen_q / max(1, sequences)  # of a sequence, about
    widths = widths_of(head_dim, value_dim)
    loads: dict[str, Any] = {"tma": tma, "pattern": pattern, "page_size": page_size, "value_dim": value_dim}
    tiling = choose(card, dtype, head_dim, rows, scores, **loads)
    if table is not None and not scores.dropout:
        tiling = as_measured(table, card, dtype, head_dim, rows, tiling, scores, **loads)
    group = heads_q // heads_kv
    # Slabs are whole tokens, and the heads of a tile share its list.
    apart = pattern.listed and (pattern.heads > heads_kv or group & (group - 1) != 0)
    # Where weights are dropped, a lane draws for two rows of a head.
    pack = 1 if apart or scores.dropout else pack_of(tiling.tile_q, rows, group)
    heads, together = heads_q // pack, 1
    if scores.window[1] is not None or pattern.mask or sequences is not None:  # tiles differ in weight
        # Tiles of a listed problem that run together need not walk the same keys together: fewer heads stay in L2.
        most = HEADS_TOGETHER // 4 if pattern.mask else HEADS_TOGETHER
        wanted = max(1, 2 * most // (widths.width + widths.value_width * widths.slices))
        if sequences is not None:
            row = (head_dim + widths.value_dim) * dtype.itemsize
            each = max(1, seqlen_k) * row * pack * heads_kv // heads_q  # per head of tiles
            wanted = min(wanted, max(1, BYTES_TOGETHER // each))
        together = next(d for d in range(min(wanted, batch * heads), 0, -1) if batch * heads % d == 0)
    return Geometry(tiling, pack, heads, math.ceil(seqlen_q * pack / tiling.tile_q), together, widths.slices)
