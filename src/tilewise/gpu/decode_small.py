"""Decode of few sequences on a GPU, kernels/decode/decode_small.cu: when it serves, its shape, its launch.

Each sequence and KV head is computed by one cluster of thread blocks, whose states meet in distributed shared memory:
no grid barrier, no scratch memory, no list of items. Results have the bits of decode.cu.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch

from tilewise import compiler, emulator
from tilewise.arch import LIMITS, hopper
from tilewise.compiler.spec import KernelSpec
from tilewise.compiler.tensor_maps import TensorMapSpec
from tilewise.formats import KVFormat
from tilewise.gpu.abi import (
    DECODE_RULES,
    MOST_SMALL,
    DecodeArgs,
    Divisor,
    Paged,
    ScoreArgs,
    SmallArgs,
    SmallSequence,
    Strides,
)
from tilewise.gpu.decode_kernels import (
    BITS,
    BLOCK_OVERHEAD,
    HEAD_DIMS,
    DecodeTiling,
    Parts,
    chunk_map,
    decode_spec,
    row_bytes,
    stage_bytes,
)
from tilewise.plan.ranges import Longs
from tilewise.plan.tiles import DecodePlan
from tilewise.plan.worklist import CHUNK, FAR, Splitting, WorkList
from tilewise.scores import Scores

ROWS = 8  # query rows per sequence and KV head that the kernel serves
REGISTERS = 65536  # of a multiprocessor
WARPS = 4  # per block
LONGEST = 8192  # tokens of a sequence: longer ones keep many blocks busy as they are


@dataclass(frozen=True)
class SmallShape:
    """The shape of a kernel; no choice changes a bit of the result.

    cluster: blocks per sequence and KV head. warps: per block. round: chunks that the warps of a block compute between
    two of their barriers, a multiple of `warps`. depth: rounds in the ring. states: of a sequence at most. rows: query
    rows per sequence and KV head, rounded up to a power of two. tma: chunks come by TMA; without it, by cp.async.
    """

    cluster: int
    warps: int
    round: int
    depth: int
    states: int
    rows: int
    tma: bool


class SmallAsked(Protocol):
    """What a bound kernel depends on besides the plan: decode.Asked."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def fmt(self) -> KVFormat: ...
    @property
    def page_size(self) -> int: ...
    @property
    def rule(self) -> tuple[str, str]: ...
    @property
    def small(self) -> SmallShape | None: ...


def serves_pages(dtype: torch.dtype, fmt: KVFormat, page_size: int, rows: int, card: str) -> bool:
    """Is there a kernel for such pages and so many query rows per sequence and KV head? It takes 16-bit pages on Hopper
    and few rows."""
    pages = fmt.dtype == dtype and BITS[fmt.name] == 16 and page_size % CHUNK == 0
    pages = pages and fmt.head_dim in HEAD_DIMS and fmt.values.head_dim in HEAD_DIMS
    return hopper(card) and pages and rows <= ROWS


def serves_small(plan: DecodePlan, dtype: torch.dtype, fmt: KVFormat, page_size: int, card: str) -> bool:
    """Can the kernel compute this plan? There may not be many sequences, and nothing may be shared or hidden."""
    rows = plan.tokens_per_seq * (plan.heads_q // plan.heads_kv)
    simple = plan.shared_nodes == 0 and plan.window is None and not plan.chunk and plan.pages_per_seq == 0
    return simple and 0 < len(plan.seqs) <= MOST_SMALL and serves_pages(dtype, fmt, page_size, rows, card)


def pays_small(units: int, longest: int, processors: int) -> bool:
    """Is the kernel faster than decode.cu's? units: sequences times KV heads. longest: of the lengths."""
    return 2 * units <= processors and longest <= LONGEST


def small_shape(
    plan: object,
    q: torch.Tensor,
    fmt: KVFormat,
    listed: object,
    card: str,
    processors: int,
    room: int,
    splitting: Splitting | None,
    masked: bool,
    small: bool | SmallShape | None,
) -> SmallShape | None:
    """The shape of the kernel for a plan and its list, None if it does not serve them or another one is faster.

    It serves a DecodePlan by its WorkList. masked: query tokens see each other by a mask, or sequences read selected
    pages. small: as in decode.run; the emulator, where nothing is faster, takes the kernel only if it is asked to.
    """
    if not isinstance(plan, DecodePlan) or not isinstance(listed, WorkList):
        return None
    if small is None:
        units, longest = len(plan.seqs) * plan.heads_kv, max(plan.lengths, default=0)
        small = q.device.type == "cuda" and pays_small(units, longest, processors)
    if (
        not small
        or masked
        or not one_range_each(listed)
        or not serves_small(plan, q.dtype, fmt, listed.page_size, card)
    ):
        return None
    if isinstance(small, SmallShape):
        return small
    pieces = pieces_of(listed, splitting, room)
    states = int((-(-listed.capacity // pieces)).max(initial=1))
    rows = plan.tokens_per_seq * (plan.heads_q // plan.heads_kv)
    return choose_shape(fmt, rows, len(plan.seqs) * plan.heads_kv, states, int(pieces.max()) // CHUNK, processors)


def one_range_each(listed: WorkList) -> bool:
    """Is each sequence's only range that of all its tokens? Plans that were made for a CPU may cut it."""
    _, before, grows_from, _ = listed.states.T
    cut, whole = (before == 0) & (grows_from == 0), (before == 1) & (grows_from >= FAR)
    return bool((cut | whole).all())


def pieces_of(listed: WorkList, splitting: Splitting | None, room: int) -> Longs:
    """(n,): tokens per piece of each sequence, in the plan's order: what the length that was planned with asks for, and
    the room to grow."""
    return np.maximum((splitting or Splitting()).of(listed.capacity - room, listed.capacity), CHUNK)


@lru_cache(maxsize=256)
def choose_shape(fmt: KVFormat, rows: int, units: int, states: int, chunks: int, processors: int) -> SmallShape | None:
    """The kernel's shape for `units` sequences and KV heads with up to `states` states each, of pieces of up to
    `chunks` chunks; None if there are more states than the shared memory holds.

    As was fastest on an H200 (lab notes). A block per piece while that is at most two or four blocks per
    multiprocessor: all bytes are asked for at once. Otherwise clusters of up to eight. The blocks of a cluster have to
    find room in one part of the card, and clusters of more than two that fill it do not fit with one block per
    multiprocessor: they get rings of which two or three fit.
    """
    rows = _power_above(rows)
    widest = max(c for c in (1, 2, 4, 8, 16) if c < 2 * states and rows * fmt.values.head_dim % (4 * c) == 0)

    def ringed(cluster: int, together: int, ring: int) -> SmallShape:
        """With rounds of `together` chunks in a ring of so many bytes, or of two rounds."""
        depth = max(2, min(ring // (together * stage_bytes(fmt)), -(-states // cluster) * -(-chunks // together)))
        return SmallShape(cluster, WARPS, together, depth, _power_above(states), rows, True)

    def fits(shape: SmallShape, blocks: int) -> bool:
        return blocks_per_sm(fmt, shape) >= blocks

    at_once = replace(ringed(widest, WARPS, 0), depth=1)
    busy = units * widest / processors  # blocks per multiprocessor
    if states <= widest and chunks <= WARPS and busy <= (2 if widest > 8 else 4) and fits(at_once, math.ceil(busy)):
        return at_once
    cluster = min(8, widest)
    if processors < units * cluster <= 2 * processors and fits(three := ringed(cluster, WARPS, 65536), 3):
        return three
    while cluster > 1 and units * cluster > processors:
        cluster //= 2
    if 2 * units * cluster <= processors and fits(one := ringed(cluster, 2 * WARPS, 196608), 1):
        return one
    two = ringed(cluster, WARPS, 98304)
    return two if fits(two, 1) else None


def _power_above(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def shared_bytes(fmt: KVFormat, shape: SmallShape) -> int:
    """Shared memory per block, as decode/small.cuh lays it out."""
    ring = shape.depth * shape.round * stage_bytes(fmt)
    slice_bytes = shape.rows * fmt.values.head_dim // shape.cluster * 4
    barriers = shape.depth * (shape.warps + 1) + 1
    return ring + 2 * shape.round * 512 + shape.states * (slice_bytes + 8 * shape.rows) + 8 * barriers


def blocks_per_sm(fmt: KVFormat, shape: SmallShape) -> int:
    """Blocks that a multiprocessor has shared memory for, up to what leaves 128 registers per thread."""
    room = LIMITS["sm_90a"].shared_sm // (shared_bytes(fmt, shape) + BLOCK_OVERHEAD)
    return min(REGISTERS // (128 * 32 * shape.warps), room)


def small_spec(
    dtype: torch.dtype, fmt: KVFormat, page_size: int, shape: SmallShape, rule: tuple[str, str] = DECODE_RULES[0]
) -> KernelSpec:
    """The kernel for queries and pages of `dtype`."""
    tiling = DecodeTiling(ROWS, shape.warps, 2, max(1, blocks_per_sm(fmt, shape)))
    like = decode_spec(dtype, fmt, page_size, tiling, tma=shape.tma, rule=rule)
    constants = (
        *like.constants,
        ("kCluster", shape.cluster),
        ("kRound", shape.round),
        ("kDepth", shape.depth),
        ("kMostStates", shape.states),
        ("kHeadRows", shape.rows),
    )
    name = "decode_small"
    return KernelSpec(name, f"decode/{name}.cu", name, constants, like.threads, shared_bytes(fmt, shape), product=True)


def specs(card: str = "sm_90a", *, every: bool = False) -> list[KernelSpec]:
    """The kernels as users of a card get them: bfloat16, D 128, four rows, pages of 16, for one sequence of 1024 tokens
    and for eight of 8192; with `every`, all 16-bit formats and head dimensions, K and V of 192 and 128, cp.async."""
    if not hopper(card):
        return []
    found = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if every else (("bf16", torch.bfloat16),):
        forms = [KVFormat(name, head_dim) for head_dim in (HEAD_DIMS if every else (128,))]
        if every:
            forms.append(KVFormat(name, 192).beside(KVFormat(name, 128)))
        for fmt in forms:
            for units, chunks in ((8, 4), (64, 32)):
                shape = choose_shape(fmt, 4, units, 16, chunks, 132)
                assert shape is not None
                for one in (shape, replace(shape, tma=False)) if every else (shape,):
                    found.append(small_spec(dtype, fmt, 16, one))
                    if every:
                        found.append(small_spec(dtype, fmt, 64, one, DECODE_RULES[1]))
    return found


def likely_specs(
    group: int,
    kv_heads: int,
    dtype: torch.dtype,
    fmt: KVFormat,
    page_size: int,
    rules: Iterable[tuple[str, str]],
    processors: int,
    card: str,
) -> list[KernelSpec]:
    """The kernels that up to eight sequences of 64 to 8192 tokens take, one token each. group: query heads per KV head.
    rules: what is done to scores."""
    found = []
    for sequences, tokens, rule in product((1, 2, 4, 8), (64, 512, 1024, 2048, 4096, 8192), rules):
        units, piece = sequences * kv_heads, int(Splitting().of(np.array([tokens]))[0])
        if pays_small(units, tokens, processors) and serves_pages(dtype, fmt, page_size, group, card):
            shape = choose_shape(fmt, group, units, -(-tokens // piece), piece // CHUNK, processors)
            if shape is not None:
                found.append(small_spec(dtype, fmt, page_size, shape, rule))
    return list(dict.fromkeys(found))


class SmallDecode:
    """The kernel for one plan and kind of tensors; called once per layer, like decode.Decode."""

    def __init__(
        self,
        plan: object,
        codes: tuple[torch.Tensor, torch.Tensor],
        listed: object,
        asked: SmallAsked,
        splitting: Splitting | None,
        room: int,
    ) -> None:
        assert isinstance(plan, DecodePlan)
        assert isinstance(listed, WorkList)
        assert asked.small is not None
        pieces = pieces_of(listed, splitting, room)
        fmt, shape, device = asked.fmt, asked.small, asked.device
        self.listed, self.device, self.shape = listed, device, shape
        self.spec = small_spec(asked.dtype, fmt, asked.page_size, shape, asked.rule)
        self.map_specs: list[TensorMapSpec | None] = [None, None]
        if shape.tma:
            self.map_specs = [
                chunk_map(x, row_bytes(side), CHUNK) for x, side in zip(codes, (fmt, fmt.values), strict=True)
            ]
        self.fixed = {name: listed.tensors(device)[name] for name in ("pages", "live")}
        group = plan.heads_q // plan.heads_kv
        a = self.args = DecodeArgs()
        a.pages, a.lengths = self.fixed["pages"].data_ptr(), self.fixed["live"].data_ptr()
        a.tails = a.lengths + 4 * listed.sequences
        a.sequences, a.kv_heads, a.tokens = listed.sequences, plan.heads_kv, plan.tokens_per_seq
        a.table_pages, a.tail_pages = listed.pages.shape[1], listed.tail_pages
        a.group, a.rows_each = Divisor.by(group), Divisor.by(plan.tokens_per_seq * group)
        self.small = SmallArgs()
        for n, (caller, tail_from, piece) in enumerate(zip(listed.order, listed.tail_from, pieces, strict=True)):
            rounds = -(-int(piece) // (CHUNK * shape.round))
            self.small.of[n] = SmallSequence(int(caller), int(tail_from), Divisor.by(int(piece)), Divisor.by(rounds))
        self.grid = (shape.cluster, plan.heads_kv, listed.sequences)
        if device.type == "cuda":
            self.kernel = compiler.load(self.spec, device)
            self.launch_args = compiler.Args(*[compiler.TensorMap.blank()] * 2, a, self.small)

    def __call__(
        self,
        q: torch.Tensor,
        k_parts: Parts,
        v_parts: Parts,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        scores: Scores,
        tree: torch.Tensor | None,
        selected: torch.Tensor | None,
        **emulated: Any,
    ) -> None:
        """Fills o, and lse if there is one, both like q. emulated: options of emulator.launch."""
        assert tree is None
        assert selected is None
        a = self.args
        sinks = None if scores.sinks is None else scores.sinks.float().contiguous()
        a.q, a.o, a.lse = q.data_ptr(), o.data_ptr(), None if lse is None else lse.data_ptr()
        a.scores = ScoreArgs.of(scores)
        a.scores.sinks = None if sinks is None else sinks.data_ptr()
        a.q_strides, a.o_strides = Strides.of(q), Strides.of(o)
        size = k_parts[0].element_size()
        a.k, a.v = Paged.of(k_parts[0], size), Paged.of(v_parts[0], size)
        pointers = (k_parts[0].data_ptr(), v_parts[0].data_ptr())
        if self.device.type == "cuda":
            for n, spec in enumerate(self.map_specs):
                if spec is not None:
                    self.launch_args.point(n, compiler.encode(spec, pointers[n]))
            stream = compiler.raw_stream(self.kernel.ordinal)
            self.kernel.launch(self.grid, self.launch_args, stream=stream, cluster=(self.shape.cluster, 1, 1))
            return
        tensors = {"q": q, "o": o, "lse": lse, "sinks": sinks, "k": k_parts[0], "v": v_parts[0], **self.fixed}
        maps = [
            emulator.TensorMap() if spec is None else emulator.tensor_map(spec, pointers[n])
            for n, spec in enumerate(self.map_specs)
        ]
        known = {name: x for name, x in tensors.items() if x is not None}
        emulator.launch(self.spec, self.grid, [*maps, a, self.small], known, cluster=self.shape.cluster, **emulated)
