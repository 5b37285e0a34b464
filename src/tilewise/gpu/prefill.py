"""The Hopper forward, kernels/prefill/forward.cu: which kernel serves a problem, its arguments, its launch.

`Forward` is bound to a problem's shapes, strides and options; calling it on tensors of that kind launches the kernel on
their card, or runs it in the emulator over CPU tensors. Binding validates nothing: api/ has done that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from tilewise import compiler, emulator
from tilewise.arch import multiprocessors
from tilewise.compiler.spec import Constant, KernelSpec
from tilewise.compiler.tensor_maps import TensorMapSpec
from tilewise.gpu.abi import (
    ELEMENTS,
    EVERY_RULE,
    FAR,
    FP8,
    LIST_HEADER,
    MAP_NAMES,
    NoFunctionArgs,
    PANEL_BYTES,
    TILE_WORDS,
    Descale,
    Divisor,
    ForwardArgs,
    RaggedArgs,
    ScoreArgs,
    Strides,
    score_rule,
)
from tilewise.gpu.pattern import NO_PATTERN, Lists, Pattern, block_keys
from tilewise.plan.dense import plan_tiled
from tilewise.plan.tiles import Launch, Plan
from tilewise.scores import Scores

if TYPE_CHECKING:
    from tilewise.functions import Function
    from tilewise.plan.schedule import BlockSchedule

DTYPES = (torch.bfloat16, torch.float16, FP8)
MAX_HEAD_DIM = 256
BUCKETS = 128  # by length, into which ragged.cu sorts tiles
HEADS_TOGETHER = (
    2048  # heads × head_dim of the heads whose tiles are taken side by side, so that their K and V stay in L2
)
SCALE_BYTES = 128 + 16  # prefill/layout.cuh: the scale once per lane, and the count of V's valid rows per stage
MAPS_KEPT = 1024


@dataclass(frozen=True)
class Tiling:
    """Rows of a query tile, keys of a block, stages of Q, K and V in shared memory, and how the warpgroups work.

    ping_pong: they take turns at the tensor cores. q_registers: they keep Q in registers. lazy: the lazy softmax. It
    keeps K until the softmax is done, in case S has to be computed again, and so needs one more stage of K.
    stages_raw: stages of FP8's V before it is transposed; stages_v are those after it. unit: keys that one entry of a
    list stands for, 0 if blocks follow each other.
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

    @property
    def blocks_each(self) -> int:
        """Thread blocks that a multiprocessor holds at once: prefill/layout.cuh has the same."""
        return 2 if self.tile_q == 64 else 1


# By padded head dimension. A warpgroup holds S (64 × tile_kv), P of the block before it and O at once; a block holds Q
# and rings of K and V. At 64 the softmax takes longer than the products: three warpgroups hide it.
TILINGS = {
    64: Tiling(192, 128, 2, 4, 3, ping_pong=True, q_registers=False, lazy=True),
    96: Tiling(128, 128, 2, 3, 2, ping_pong=True, q_registers=True, lazy=True),
    128: Tiling(128, 128, 2, 3, 2, ping_pong=True, q_registers=True, lazy=True),
    192: Tiling(128, 112, 1, 2, 2, ping_pong=True, q_registers=False, lazy=False),
    256: Tiling(128, 64, 1, 2, 2, ping_pong=True, q_registers=False, lazy=True),
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
SHORT = 1024  # query rows, up to which a sequence counts as short
# Schedules with fewer than 128 rows per block: rows that are in a tile together would otherwise visit each other's
# blocks. Two such blocks of threads share a multiprocessor.
FEW_ROWS = Tiling(64, 64, 2, 3, 2, ping_pong=False, q_registers=False, lazy=True)


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """What comes out where `dtype` goes in: the same, or bfloat16 for FP8."""
    return torch.bfloat16 if dtype == FP8 else dtype


def padded(head_dim: int) -> int:
    """The head dimension that the products run over: the smallest with a tiling."""
    return next(d for d in TILINGS if d >= head_dim)


def choose_tiling(
    dtype: torch.dtype,
    head_dim: int,
    seqlen_q: float,
    scores: Scores,
    *,
    plain: bool,
    pattern: Pattern = NO_PATTERN,
    page_size: int = 0,
) -> Tiling:
    """The tiling for sequences of about `seqlen_q` rows; plain: K and V come by TMA and are not paged."""
    width = padded(head_dim)
    if pattern != NO_PATTERN:
        return _patterned_tiling(dtype, width, scores, pattern, plain, page_size)
    if dtype == FP8:
        tiling = TILINGS_FP8[width]
        if scores.changed or not plain:
            tiling = replace(tiling, q_registers=False, tile_kv=min(96, tiling.tile_kv))
        return tiling
    tiling, short = TILINGS[width], seqlen_q <= SHORT
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


def _patterned_tiling(
    dtype: torch.dtype, width: int, scores: Scores, pattern: Pattern, plain: bool, page_size: int
) -> Tiling:
    """The tiling with lists or functions: both take registers, so Q stays in shared memory.

    The blocks of a schedule arrive less evenly than neighbouring ones, and waiting for turns costs more than it gains.
    """
    tiling = TILINGS_FP8[width] if dtype == FP8 else SMALL_64 if width == 64 else TILINGS[width]
    if pattern.block_q % 128 and width <= 128 and dtype != FP8 and plain:
        tiling = FEW_ROWS
    most = tiling.tile_kv
    if dtype == FP8:
        most = min(96, most)
    elif width > 128:
        most = 48 if width == 256 and pattern.text else 64
    tiling = replace(
        tiling, q_registers=False, lazy=tiling.lazy and not (scores.changed and width == 256), tile_kv=most
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
) -> KernelSpec:
    """The kernel for one dtype, head dimension, tiling and choice of features."""
    width, fp8 = padded(head_dim), dtype == FP8
    row = -(-width * dtype.itemsize // PANEL_BYTES) * PANEL_BYTES
    kv, raw = row * tiling.tile_kv, tiling.stages_raw
    tiles = tiling.stages_q * row * tiling.tile_q + tiling.stages_k * kv
    if fp8:  # Vᵀ, V, and O if it goes by way of shared memory
        tiles += tiling.stages_v * -(-tiling.tile_kv // PANEL_BYTES) * width * PANEL_BYTES + raw * kv
        tiles += (tiling.stages_q > 1) * -(-width * 2 // PANEL_BYTES) * PANEL_BYTES * tiling.tile_q
    else:
        tiles += tiling.stages_v * kv
    stages_o = 1 if fp8 else tiling.stages_q
    barriers = 16 * (tiling.stages_q + tiling.stages_k + tiling.stages_v + max(1, raw) + stages_o + 1)
    threads = 2 * tiling.tile_q + (256 if fp8 else 128)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENTS[dtype]),
        ("Out", ELEMENTS[out_dtype(dtype)]),
        ("kHeadDim", width),
        ("kColumns", head_dim),
        ("kTileQ", tiling.tile_q),
        ("kTileKv", tiling.tile_kv),
        ("kStagesQ", tiling.stages_q),
        ("kStagesK", tiling.stages_k),
        ("kStagesV", tiling.stages_v),
        ("kStagesRaw", raw),
        ("kPingPong", tiling.ping_pong),
        ("kQInRegisters", tiling.q_registers),
        ("kPack", pack),
        ("kPageSize", page_size),
        ("kTma", tma),
        ("kExact", scores.exact or not tiling.lazy),
        score_rule(Scores() if pattern.score else scores),
        ("kUnit", tiling.unit),
        ("kSlabs", pattern.block_q * pack % tiling.tile_q > 0),
        ("kLengths", pattern.lengths),
        ("Function", "UserFunction" if pattern.text else "NoFunction"),
    )
    boxes = tiling.tile_kv // tiling.unit if tiling.unit else 0
    told = 4 * boxes * (tiling.stages_k * (1 + pattern.lengths) + raw * pattern.lengths)
    shared = tiles + -(-(barriers + SCALE_BYTES + told) // 64) * 64 + 4 * TILE_WORDS * (tiling.stages_q + 1)
    return KernelSpec(
        "forward", "prefill/forward.cu", "forward", constants, threads, shared, product=True, text=pattern.text
    )


@lru_cache(maxsize=64)
def ragged_spec(index: torch.dtype, tiling: Tiling, pack: int) -> KernelSpec:
    """The kernel that lists the tiles of packed sequences; index: of the cumulative lengths."""
    constants = (
        ("Index", "int64_t" if index == torch.int64 else "int"),
        ("kTileQ", tiling.tile_q),
        ("kTileKv", tiling.tile_kv),
        ("kPack", pack),
    )
    return KernelSpec("ragged", "prefill/ragged.cu", "ragged", constants, 1024, 0, product=True)


def specs(*, every: bool = False) -> list[KernelSpec]:
    """The kernels as users get them: bfloat16 and head dimension 128, or `every` dtype, head dimension and feature."""
    causal = (None, 0)
    asked = [Scores(causal), Scores(causal, exact=True)]
    if every:
        asked += [Scores(), *(replace(rule, window=causal) for rule in EVERY_RULE[1:])]
    loads: list[dict[str, Any]] = [{}, {"page_size": 16}, {"tma": False}] if every else [{}]
    found = []
    for dtype in DTYPES if every else (torch.bfloat16, FP8):
        for head_dim in TILINGS if every else (128,):
            for scores in asked:
                for seqlen_q in (SHORT, 1 << 20):
                    for load in loads:
                        tiling = choose_tiling(dtype, head_dim, seqlen_q, scores, plain=not load)
                        found.append(forward_spec(dtype, head_dim, tiling, scores, **load))
    found.append(ragged_spec(torch.int32, TILINGS[128], 1))
    return list(dict.fromkeys(found))


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
    are taken side by side, the heaviest first.
    """

    tiling: Tiling
    pack: int
    heads: int
    q_tiles: int
    together: int


def geometry(
    dtype: torch.dtype,
    batch: int,
    seqlen_q: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    scores: Scores,
    *,
    plain: bool,
    sequences: int | None = None,
    pattern: Pattern = NO_PATTERN,
    page_size: int = 0,
) -> Geometry:
    """The geometry of dense rows, or of `sequences` packed ones; plain: as choose_tiling has it."""
    rows = seqlen_q if sequences is None else seqlen_q / max(1, sequences)  # of a sequence, about
    tiling = choose_tiling(dtype, head_dim, rows, scores, plain=plain, pattern=pattern, page_size=page_size)
    group = heads_q // heads_kv
    # Slabs are whole tokens, and the heads of a tile share its list.
    apart = pattern.listed and (pattern.heads > heads_kv or group & (group - 1) != 0)
    pack = 1 if apart else pack_of(tiling.tile_q, rows, group)
    heads, together = heads_q // pack, 1
    if scores.window[1] is not None or pattern.mask:  # tiles differ in weight
        wanted = min(max(1, HEADS_TOGETHER // padded(head_dim)), batch * heads)
        together = next(d for d in range(wanted, 0, -1) if batch * heads % d == 0)
    return Geometry(tiling, pack, heads, math.ceil(seqlen_q * pack / tiling.tile_q), together)


def plan_of(q: torch.Tensor, k: torch.Tensor, scores: Scores) -> Plan:
    """The tiles of a dense call on q (B, Nq, Hq, D) and k (B, Nk, Hkv, D), V being laid out as K, in their order."""
    (batch, seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv) = q.shape, k.shape[1:3]
    g = geometry(q.dtype, batch, seqlen_q, heads_q, heads_kv, head_dim, scores, plain=tma_can(q, k))
    blocks = min(g.q_tiles * batch * g.heads, multiprocessors(q.device))
    launch = Launch(f"forward, {ELEMENTS[q.dtype]}, D {head_dim}", g.tiling.tile_q, g.tiling.tile_kv, g.pack, blocks)
    sizes = (batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim)
    size, out_size = q.element_size(), out_dtype(q.dtype).itemsize
    return plan_tiled(*sizes, launch, g.together, window=scores.window, io_bytes=size, out_bytes=out_size)


def tma_can(*tensors: torch.Tensor) -> bool:
    """Do the rows of these lie on 16 bytes, as TMA and 16-byte stores want them?"""
    return all(
        x.shape[-1] * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
        and all(s * x.element_size() % 16 == 0 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
        for x in tensors
    )


class Forward:
    """The kernel, its launch and its arguments but for the addresses, for tensors like these.

    q: (B, Nq, Hq, D), k and v: (B, Nk, Hkv, D); or packed, with `sequences` of them: q (total_q, Hq, D), k and v
    (total_k, Hkv, D), or (pages, page size, Hkv, D) if `paged`. o: like q. tma: whether `tma_can` of them all.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        scores: Scores,
        *,
        tma: bool,
        sequences: int | None = None,
        index: torch.dtype = torch.int32,
        paged: bool = False,
        pattern: Pattern = NO_PATTERN,
        table_pages: int = 0,
    ) -> None:
        packed = sequences is not None
        self.packed, self.device, self.pattern = packed, q.device, pattern
        batch, seqlen_q, heads, head_dim = (1, *q.shape) if packed else q.shape
        seqlen_k, heads_kv = k.shape[-3:-1]
        sized = (q.dtype, batch, seqlen_q, heads, heads_kv, head_dim, scores)
        page_size = k.shape[1] if paged else 0
        plain = tma and not paged
        g = geometry(*sized, plain=plain, sequences=sequences, pattern=pattern, page_size=page_size)
        tiling, pack = g.tiling, g.pack
        loads: dict[str, Any] = {"page_size": page_size, "tma": tma}
        self.spec = forward_spec(q.dtype, head_dim, tiling, scores, pack=pack, pattern=pattern, **loads)
        # Rows of (D, heads of a tile, N, the other heads, B), a box being the rows of a tile; of K and V (D, N, H, B).
        box = (pack, tiling.tile_q // pack, 1, 1)
        sizes = (head_dim, pack, seqlen_q, g.heads, batch)
        self._maps: list[tuple[TensorMapSpec, dict[int, Any]]] = []
        if tma:
            q_map, o_map = (
                _map_spec(
                    x, sizes, (x.stride(-2), x.stride(-3), x.stride(-2) * pack, 0 if packed else x.stride(0)), box
                )
                for x in (q, o)
            )
            self._maps = [(q_map, {})]
            box_rows = tiling.unit or (math.gcd(page_size, tiling.tile_kv) if paged else tiling.tile_kv)
            for x in (k, v):
                outer = 0 if packed and not paged else x.stride(0)
                kv_sizes = (head_dim, seqlen_k, heads_kv, x.shape[0] if paged else batch)
                strides = (x.stride(-3), x.stride(-2), outer)
                self._maps.append((_map_spec(x, kv_sizes, strides, (box_rows, 1, 1)), {}))
            self._maps.append((o_map, {}))
        self.list_tiles = g.q_tiles + (sequences or 0)  # at most
        self.tiles = g.heads * (self.list_tiles if packed else g.q_tiles * batch)
        self.blocks = min(self.tiles, multiprocessors(self.device) * tiling.blocks_each)
        per_kv, beside = heads // heads_kv // pack, max(1, g.together * g.q_tiles)
        self.args = ForwardArgs(
            *(None,) * 8,
            *(_strides(x, packed and not (paged and x is not q)) for x in (q, k, v)),
            _strides(o, packed),
            *((0, q.shape[0]) if packed else (heads * seqlen_q, seqlen_q)),
            0,
            ScoreArgs.of(scores),
            *(Descale() for _ in range(3)),
            *(seqlen_q, seqlen_k),
            *(g.q_tiles * batch * g.heads, g.q_tiles),
            *(Divisor.by(n) for n in (g.heads, per_kv, g.together, beside)),
        )
        self.lists: Lists | None = None
        if pattern.listed:
            self.lists = Lists(
                pattern, device=q.device, batch=batch, tile_heads=g.heads, pack=pack, tile_q=tiling.tile_q,
                unit=tiling.unit, rows_each=self.list_tiles if packed else g.q_tiles,
                keys=table_pages * page_size if paged else seqlen_k, packed=packed,
            )  # fmt: skip
            self.args.lists = self.lists.tile_lists
        if packed:
            self.ragged_spec = ragged_spec(index, tiling, pack)
            total_k = FAR if paged else seqlen_k
            self.ragged_args = RaggedArgs(*(None,) * 4, sequences, seqlen_q, total_k, total_k, self.list_tiles, 0)
        if self.device.type == "cuda":
            self._load()

    def _load(self) -> None:
        self._stream: int | None = None
        self.kernel = compiler.load(self.spec, self.device)
        self.grid = (self.blocks, 1, 1)
        self._take_values(None)
        if self.packed:
            self.ragged_kernel = compiler.load(self.ragged_spec, self.device)
            self.ragged_launch_args = compiler.Args(self.args, self.ragged_args)

    def _take_values(self, function: Function | None) -> None:
        """From now on launches give the kernel what this function captured."""
        self._values_of = None if function is None else function.key
        values = NoFunctionArgs() if function is None else function.arguments()
        self.launch_args = compiler.Args(*[compiler.TensorMap.blank()] * 4, self.args, values)
        self._pointers = (0, 0, 0, 0)  # the tensor maps have to be named again

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        starts: tuple[torch.Tensor, torch.Tensor] | None = None,
        page_table: torch.Tensor | None = None,
        descales: tuple[torch.Tensor | None, ...] = (None, None, None),
        schedule: BlockSchedule | None = None,
        function: Function | None = None,
        **emulated: Any,
    ) -> None:
        """Fills o, and lse if there is one. sinks, slopes: float32. emulated: options of emulator.launch.

        descales: of q, k and v in FP8, (sequences, KV heads) float32 with the last stride 1.
        """
        a = self.args
        pointers = (q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr())
        if lse is not None:
            a.lse = lse.data_ptr()
        if sinks is not None:
            a.scores.sinks = sinks.data_ptr()
        if slopes is not None:
            a.scores.slopes, a.scores.slopes_batch = slopes.data_ptr(), slopes.stride(0)
        if page_table is not None:
            a.page_table, a.page_table_stride = page_table.data_ptr(), page_table.stride(0)
        for field, descale in zip((a.descale_q, a.descale_k, a.descale_v), descales, strict=True):
            if descale is not None:
                field.values, field.batch = descale.data_ptr(), descale.stride(0)
        work = None
        if starts is not None:
            words = LIST_HEADER + TILE_WORDS * self.list_tiles + BUCKETS
            work = torch.empty(words, dtype=torch.int32, device=self.device)
            a.list = work.data_ptr()
            r = self.ragged_args
            r.starts_q, r.starts_k, r.list = starts[0].data_ptr(), starts[1].data_ptr(), work.data_ptr()
            r.buckets = work.data_ptr() + 4 * (words - BUCKETS)
            if page_table is not None:
                r.longest_k = min(FAR, page_table.shape[1] * k.shape[1])
        if self.device.type == "cuda":
            self.launch(pointers, schedule, function)
            return
        a.q, a.k, a.v, a.o = pointers
        counter = torch.zeros(2, dtype=torch.int32)
        a.counter = counter.data_ptr()
        tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "sinks": sinks, "slopes": slopes, "work": work}
        tensors |= {"page_table": page_table, "counter": counter}
        tensors |= {f"descale_{name}": x for name, x in zip("qkv", descales, strict=True)}
        if starts is not None:
            tensors |= {"starts_q": starts[0], "starts_k": starts[1]}
        known = {name: x for name, x in tensors.items() if x is not None}
        if starts is not None:
            emulator.launch(self.ragged_spec, (1, 1, 1), [a, self.ragged_args], known, **emulated)
        if self.lists is not None:
            known |= self.lists.emulate(a, schedule, function, known, **emulated)
        if function is not None:
            known |= {f"captured {n}": x for n, x in enumerate(function.tensors)}
        values = NoFunctionArgs() if function is None else function.arguments()
        maps = [emulator.tensor_map(spec, x) for (spec, _), x in zip(self._maps, pointers, strict=False)]
        maps = maps or [emulator.TensorMap()] * 4
        emulator.launch(self.spec, (self.blocks, 1, 1), [*maps, a, values], known, **emulated)

    def launch(
        self,
        pointers: tuple[int, int, int, int],
        schedule: BlockSchedule | None = None,
        function: Function | None = None,
    ) -> None:
        """Over q, k, v and o at these addresses, on the current stream. What has not changed is not set again."""
        a = self.args
        if function is not None and function.key != self._values_of:
            self._take_values(function)
        if pointers != self._pointers:
            a.q, a.k, a.v, a.o = self._pointers = pointers
            for index, ((spec, made), pointer) in enumerate(zip(self._maps, pointers, strict=False)):
                if pointer not in made:
                    if len(made) >= MAPS_KEPT:
                        made.clear()
                    made[pointer] = compiler.encode(spec, pointer)
                self.launch_args.point(index, made[pointer])
        stream = compiler.raw_stream(self.kernel.ordinal)
        if _capturing() or stream != self._stream:
            # A graph may be replayed beside anything, so it counts its tiles apart, and not here.
            self._stream = None if _capturing() else stream
            self._counter = _counter(self.device, self.kernel.ordinal, self._stream)
            a.counter = self._counter.data_ptr()
        if self.packed:
            self.ragged_kernel.launch((1, 1, 1), self.ragged_launch_args, stream=stream)
        if self.lists is not None:
            self._listed = self.lists.make(a, schedule, function, stream)
        self.kernel.launch(self.grid, self.launch_args, stream=stream)


def _map_spec(x: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> TensorMapSpec:
    """The map of x by dimensions, innermost first; a box is a panel of these rows.

    The stride of a dimension of size 1 is not used, and may be odd.
    """
    size = x.element_size()
    used = tuple(s * size if n > 1 else 16 for n, s in zip(sizes[1:], strides, strict=True))
    return TensorMapSpec(MAP_NAMES[x.dtype], sizes, used, (PANEL_BYTES // size, *box), PANEL_BYTES)


def _strides(x: torch.Tensor, packed: bool) -> Strides:
    return Strides(0 if packed else x.stride(0), x.stride(-3), x.stride(-2))


_counters: dict[tuple[int, int], torch.Tensor] = {}
_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing


def _counter(device: torch.device, ordinal: int, stream: int | None) -> torch.Tensor:
    """The tile counter of a stream: zero between its launches, which follow each other. None: one for a graph alone."""
    if stream is None:
        return torch.zeros(2, dtype=torch.int32, device=device)  # zeroed within the graph
    found = _counters.get((ordinal, stream))
    if found is None:
        found = _counters[ordinal, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return found
