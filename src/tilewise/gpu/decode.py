"""Decode on a GPU, kernels/decode/decode.cu and decode_tree.cu: which kernel serves a plan, its arguments, its launch.

`run` attends a plan's queries over one layer's pages, on a card or, over CPU tensors, in the emulator. The list of
work (worklist.py) is made once a plan and kept on it, so that all layers of a step share it. What changes when
sequences only grow lies apart in a few bytes, which WorkList.grow renews: a captured graph replays over them.

Unshared, a sequence's result is the same to the bit whatever else is decoded with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewise import compiler, emulator
from tilewise.arch import LIMITS, arch_of_device, multiprocessors
from tilewise.compiler.spec import KernelSpec
from tilewise.compiler.tensor_maps import TensorMapSpec
from tilewise.formats import KVFormat
from tilewise.gpu.abi import ELEMENTS, MAP_TYPES, PANEL, DecodeArgs, Divisor, Paged, ScoreArgs, Strides
from tilewise.plan import DecodePlan, Window
from tilewise.plan.worklist import (
    CHUNK,
    DEEP_CHUNKS,
    TILE_ROWS,
    TILE_TOKENS,
    WHOLE_CHUNKS,
    PageLists,
    Shape,
    Splitting,
    WorkList,
    uses_tiles,
    work_list,
)

Parts = Sequence[torch.Tensor]

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 96, 128, 192, 256)
TILE_HEAD_DIMS = (64, 96, 128)  # what two warpgroups have registers for beside the streaming warps
MAX_TOKENS, MAX_GROUP = 16, 64
FORMATS = {"bf16": 0, "fp16": 0, "fp8": 1, "int8": 2, "int4": 3}  # tile/quant.cuh: Format
BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
RING_BYTES = 65536  # of a block's streaming warps: what they have on its way at a time
TILE_WARPS, TILE_THREADS = 8, 384  # decode/decode_tree.cu: beside the streaming warps
BLOCK_OVERHEAD = 1024  # bytes of shared memory that the system takes of each block's


@dataclass(frozen=True)
class Tiling:
    """Query rows of a stream item at most, streaming warps of a block, chunks in a warp's ring, blocks of a
    multiprocessor; tile_stages: tiles of 64 tokens in the ring of the tiles' body, 0 for a kernel without it; joiners:
    of its warps, those that stream when their tiles are done."""

    rows: int
    warps: int
    stages: int
    blocks: int
    tile_stages: int = 0
    joiners: int = 0


def chunk_tokens(fmt: KVFormat) -> int:
    """Tokens that a warp takes at a time: decode/load.cuh."""
    return 2 * CHUNK if fmt.name == "int4" and fmt.head_dim <= 128 and scale_groups(fmt) <= 2 else CHUNK


def stage_bytes(fmt: KVFormat) -> int:
    """K and V of a chunk."""
    return 2 * chunk_tokens(fmt) * fmt.head_dim * BITS[fmt.name] // 8


def fold_bytes(fmt: KVFormat, rows: int) -> int:
    """What a warp has of a range whose pieces it folds."""
    return rows * (fmt.head_dim * 4 + 64)


def tile_bytes(fmt: KVFormat) -> int:
    """K and V of a tile."""
    return 2 * TILE_TOKENS * -(-fmt.head_dim // PANEL) * 2 * PANEL


def scale_groups(fmt: KVFormat) -> int:
    return -(-fmt.head_dim // fmt.group_size) if fmt.name == "int4" else 1


def line_heads(row_bytes: int, warps: int) -> int:
    """Of how many heads, for a box of `warps`, rows that follow each other make up 128 bytes, if they are shorter."""
    heads = 128 // row_bytes if row_bytes <= 128 else 1
    return heads if heads * row_bytes == 128 and warps % heads == 0 else 1


def shared_bytes(fmt: KVFormat, tiling: Tiling) -> int:
    """Of a block: decode/load.cuh and decode_stream.cuh lay it out."""
    tiles = tiling.tile_stages * tile_bytes(fmt)
    rings = tiling.warps * tiling.stages
    scales = chunk_tokens(fmt) * {"fp8": 2 * 4, "int8": 2 * 4, "int4": 4 * 2 * scale_groups(fmt)}.get(fmt.name, 0)
    at_fold = -(-(tiles + rings * stage_bytes(fmt)) // 1024) * 1024 + rings * (scales + 8)
    at_fold += 8 * tiling.joiners * tiling.stages
    at_fold = -(-(at_fold + 16 * tiling.tile_stages + 4 * tiling.stages) // 16) * 16
    if tiling.tile_stages:
        at_fold += (16 + 8) * 2 * TILE_ROWS
    return at_fold + tiling.warps * fold_bytes(fmt, tiling.rows)


@lru_cache(maxsize=256)
def choose_tiling(
    fmt: KVFormat, rows_each: int, tiles: bool = False, tma: bool = True, arch: str = "sm_90a", deep: bool = False
) -> Tiling:
    """The kernel's shape for `rows_each` query rows a sequence and KV head; no choice changes a bit of the result.

    deep: one block with rings twice as deep, for ranges that just fill its warps (`fills_one_block`).
    Two blocks where they fit; quantised tokens take more warps to decode, and eight ask for all heads of a token at
    about the same time; fewer warps where a card has little shared memory.
    """
    most = 8 if fmt.name in ("fp8", "int8", "int4") and fmt.head_dim <= 128 else 4
    limits = LIMITS[arch]

    def stages(warps: int) -> int:
        return max(2, min(8, RING_BYTES // warps // stage_bytes(fmt)))

    if tiles:
        each = -(-(stages(most) * stage_bytes(fmt) + fold_bytes(fmt, 8)) // 1024) * 1024  # where the tiles were
        sizes = (Tiling(8, most, stages(most), 1, n, min(8, n * tile_bytes(fmt) // each)) for n in range(8, 1, -1))
        return next(t for t in sizes if shared_bytes(fmt, t) <= limits.shared_block)
    if deep:
        return Tiling(8, most, min(8, 2 * stages(most)), 1)
    wide = rows_each > 8 and fmt.head_dim <= 128  # sixteen rows of more do not fit a warp's registers: two passes
    for warps in (most, most // 2, most // 4):
        for blocks in (2, 1):
            if blocks == 2 and warps == 8 and (wide or not tma):
                continue  # two blocks would have 128 registers a thread
            tiling = Tiling(16 if wide else 8, warps, stages(warps), blocks)
            shared = shared_bytes(fmt, tiling)
            if shared <= limits.shared_block and blocks * (shared + BLOCK_OVERHEAD) <= limits.shared_sm:
                return tiling
    raise AssertionError(f"{fmt} fits no block of {arch}")


@lru_cache(maxsize=1024)
def decode_spec(
    dtype: torch.dtype,
    fmt: KVFormat,
    page_size: int,
    tiling: Tiling,
    *,
    tma: bool = True,
    scale_runs: bool = True,
    softcap: bool = False,
    tree: bool = False,
    tiles_whole: bool = True,
    in_step: bool = False,
    line_heads: int = 1,
) -> KernelSpec:
    """The kernel for queries of `dtype` over pages of `fmt`. tree: query tokens see each other by a mask. tiles_whole:
    copies for tiles are of whole rows. in_step: a block's warps have neighbouring heads, a copy is for all of them;
    line_heads: so many rows of them make up 128 bytes and are copied as one."""
    constants = (
        ("Element", ELEMENTS[dtype]),
        ("Operand", "bf16" if fmt.name == "bf16" else "half"),
        ("kStoredAs", FORMATS[fmt.name]),
        ("kHeadDim", fmt.head_dim),
        ("kGroupSize", fmt.group_size),
        ("kPageSize", page_size),
        ("kRows", tiling.rows),
        ("kWarps", tiling.warps),
        ("kStages", tiling.stages),
        ("kBlocksPerSm", tiling.blocks),
        ("kTma", tma),
        ("kScaleRuns", scale_runs),
        ("kSoftcap", softcap),
        ("kTree", tree),
        ("kInStep", in_step),
        ("kLineHeads", line_heads),
        ("kTileStages", tiling.tile_stages),
        ("kJoiners", tiling.joiners),
        ("kTileWhole", tiling.tile_stages > 0 and tiles_whole and fmt.head_dim % PANEL == 0),
    )
    entry = "decode_tree" if tiling.tile_stages else "decode"
    threads = 32 * tiling.warps + (TILE_THREADS if tiling.tile_stages else 0)
    return KernelSpec(entry, f"decode/{entry}.cu", entry, constants, threads, shared_bytes(fmt, tiling), product=True)


def specs(*, every: bool = False) -> list[KernelSpec]:
    """The kernels as users get them: bfloat16, D 128, four rows, pages of 16, eight heads of many sequences; or `every`
    format and head dimension, and heads that stand apart."""
    found = []
    for name in FORMATS if every else ("bf16", "fp8", "int8", "int4"):
        dtype = torch.float16 if name == "fp16" else torch.bfloat16
        for head_dim in HEAD_DIMS if every else (128,):
            fmt = KVFormat(name, head_dim)
            asked = [choose_tiling(fmt, rows) for rows in ((4, 16) if every else (4,))]
            if tiles_can(dtype, fmt, True):
                asked.append(choose_tiling(fmt, 4, tiles=True))
            for tiling in asked:
                if not tiling.tile_stages:
                    heads = line_heads(head_dim * BITS[name] // 8, tiling.warps)
                    found.append(decode_spec(dtype, fmt, 16, tiling, in_step=True, line_heads=heads))
                if every or tiling.tile_stages:
                    found.append(decode_spec(dtype, fmt, 16, tiling))
                if every:
                    found.append(decode_spec(dtype, fmt, 64, tiling, softcap=True))
                if every and not tiling.tile_stages:
                    copied = replace(tiling, blocks=choose_tiling(fmt, tiling.rows, tma=False).blocks)
                    found.append(decode_spec(dtype, fmt, 24, copied, tma=False, scale_runs=False))
    return list(dict.fromkeys(found))


def tiles_can(dtype: torch.dtype, fmt: KVFormat, tma: bool) -> bool:
    """Does the tiles' body serve these queries and pages? Else shared nodes go through streaming warps."""
    return tma and fmt.dtype == dtype and fmt.head_dim in TILE_HEAD_DIMS


def fills_one_block(plan: DecodePlan, fmt: KVFormat, multiprocessors: int) -> bool:
    """Nothing is shared, and each sequence and KV head gets a warp where a multiprocessor has one block of four.

    Then a warp's ring alone hides the memory's latency: with rings of two chunks 64 × 4096 tokens took 252 µs or 271,
    whichever way it fell out; with four, 258, and 64 × 16384 take 981 instead of 997.
    """
    warps, ranges = 4 * multiprocessors, len(plan.seqs) * plan.heads_kv
    rows = plan.tokens_per_seq * (plan.heads_q // plan.heads_kv)
    return plan.shared_nodes == 0 and BITS[fmt.name] == 16 and rows <= 8 and 0.9 * warps <= ranges <= warps


def check_served(q: torch.Tensor, fmt: KVFormat, plan: DecodePlan, codes: Parts) -> None:
    """NotImplementedError for what the kernel does not serve."""
    instead = 'backend="cpu"' if q.device.type == "cpu" else ".cpu() tensors"
    group = plan.heads_q // plan.heads_kv
    if fmt.head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"GPU decode takes head_dim {HEAD_DIMS}, got {fmt.head_dim}; use {instead}")
    if q.dtype not in DTYPES or fmt.name not in FORMATS:
        raise NotImplementedError(
            f"GPU decode takes bfloat16 and float16 queries over bf16, fp16, fp8, int8 and int4 caches, got {q.dtype} "
            f"over {fmt.name}; use {instead}"
        )
    if fmt.name == "bf16" and q.dtype != torch.bfloat16:
        raise NotImplementedError(f"GPU decode over a bf16 cache takes bfloat16 queries, got {q.dtype}; convert q")
    if plan.tokens_per_seq > MAX_TOKENS or group > MAX_GROUP:
        raise NotImplementedError(
            f"GPU decode takes up to {MAX_TOKENS} tokens a sequence and {MAX_GROUP} query heads a KV head, got "
            f"{plan.tokens_per_seq} and {group}; use {instead}"
        )
    for x in codes:
        if x.data_ptr() % 16 or any(s * x.element_size() % 16 for s in x.stride()[:3]):
            raise NotImplementedError(
                f"GPU decode takes pages whose rows begin at multiples of 16 bytes, got strides {x.stride()} of "
                f"{x.dtype} at {x.data_ptr():#x}; use {instead}"
            )


def scales_in_runs(fmt: KVFormat, page_size: int, scales: Parts) -> bool:
    """Do the scales of sixteen tokens lie one after another, on multiples of 16 bytes? Then they are copied whole.

    From page to page in 32 bits.
    """
    groups = scale_groups(fmt)
    return page_size % CHUNK == 0 and all(
        x.stride(1) == groups
        and (groups == 1 or x.stride(3) == 1)
        and x.data_ptr() % 16 == 0
        and x.stride(0) * x.element_size() < 1 << 32
        and all(x.stride(d) * x.element_size() % 16 == 0 for d in (0, 2) if x.shape[d] > 1)
        for x in scales
    )


def _byte_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """From page to page, token to token, head to head; of a dimension of size 1 any that a tensor map takes."""
    page, token, head = (
        s * x.element_size() if n > 1 else 16 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)
    )
    return page, token, head


def chunk_map(
    codes: torch.Tensor, row_bytes: int, chunk: int, heads_of_box: int = 1, line_heads: int = 1
) -> TensorMapSpec:
    """Boxes, in words: (panel, token, panels, head, page); panels and boxes as decode/load.cuh has them."""
    pages, page_size, heads = codes.shape[:3]
    page, token, head = _byte_strides(codes)
    row_bytes, head = row_bytes * line_heads, head * line_heads
    heads, heads_of_box = heads // line_heads, heads_of_box // line_heads
    panel = next(p for p in (128, 64, 32, 16) if row_bytes % p == 0)
    panels = row_bytes // panel
    return TensorMapSpec(
        "uint32",
        (panel // 4, page_size, panels, heads, pages),
        (token, panel, head, page),
        (panel // 4, CHUNK if page_size % chunk else chunk, panels, heads_of_box, 1),
        panel if panel >= 32 else 0,
        l2_promotion=0,  # 256 bytes cost 5% of the bandwidth
    )


def tiles_whole(codes: Parts) -> bool:
    """Can a copy bring all panels of 64 columns of its tokens? It can where heads follow each other, panel by panel."""
    return all(x.shape[3] % PANEL == 0 and (x.shape[2] == 1 or x.stride(2) == x.shape[3]) for x in codes)


def tile_map(codes: torch.Tensor, whole: bool) -> TensorMapSpec:
    """Boxes of the tokens that a page and a tile share; of a panel of 64 columns: (column, token, head, page); `whole`,
    of all panels of a head: (column, token of eight, panel, eight, page)."""
    pages, page_size, heads, head_dim = codes.shape
    page, token, head = _byte_strides(codes)
    box = next(n for n in (64, 32, 16) if page_size % n == 0)
    element = MAP_TYPES[codes.dtype]
    if not whole:
        return TensorMapSpec(element, (head_dim, page_size, heads, pages), (token, head, page), (PANEL, box, 1, 1), 128)
    panels = head_dim // PANEL
    sizes = (PANEL, 8, panels * heads, page_size // 8, pages)
    return TensorMapSpec(element, sizes, (token, 2 * PANEL, 8 * token, page), (PANEL, 8, panels, box // 8, 1), 128)


# ---- the launch ------------------------------------------------------------------------------------------------------
@dataclass
class Workspace:
    """Where states and blocks meet, for launches that follow each other."""

    o: torch.Tensor
    ml: torch.Tensor
    meeting: torch.Tensor


class Decode:
    """The kernel, list and buffers for one plan and kind of tensors; called once a layer."""

    def __init__(
        self,
        plan: DecodePlan,
        q: torch.Tensor,
        fmt: KVFormat,
        codes: tuple[torch.Tensor, torch.Tensor],
        listed: WorkList,
        tiling: Tiling,
        *,
        softcap: bool,
        tree: bool,
        tma: bool,
        runs: bool,
    ) -> None:
        self.plan, self.fmt, self.listed, self.device = plan, fmt, listed, q.device
        # Sequences that read the same pages find them in L2, the later the surer; at 16 bits nothing is won by keeping
        # their warps in step (64 × (8192 + 256), not shared: 288 µs against 242).
        apart = BITS[fmt.name] == 16 and plan.stored_tokens < sum(plan.lengths)
        in_step = tma and listed.in_step and not apart
        row_bytes, lines = fmt.head_dim * BITS[fmt.name] // 8, 1
        if in_step and all(x.stride(2) * x.element_size() == row_bytes for x in codes):
            lines = line_heads(row_bytes, tiling.warps)
        self.spec = decode_spec(
            q.dtype,
            fmt,
            codes[0].shape[1],
            tiling,
            tma=tma,
            scale_runs=runs,
            softcap=softcap,
            tree=tree,
            tiles_whole=tiles_whole(codes),
            in_step=in_step,
            line_heads=lines,
        )
        self.map_specs: list[TensorMapSpec | None] = [None, None]
        if tma:
            heads = tiling.warps if in_step else 1
            self.map_specs = [chunk_map(x, row_bytes, chunk_tokens(fmt), heads, lines) for x in codes]
        if tiling.tile_stages:
            self.map_specs += [tile_map(x, tiles_whole(codes)) for x in codes]
        group = plan.heads_q // plan.heads_kv
        self.rows_each = plan.tokens_per_seq * group
        self.fixed = listed.tensors(self.device)
        a = self.args = DecodeArgs()
        for name in ("items", "tile_items", "order", "states", "pages"):
            setattr(a, name, self.fixed[name].data_ptr())
        a.lengths = self.fixed["live"].data_ptr()
        a.tails = a.lengths + 4 * listed.sequences
        a.slots, a.tile_rounds = listed.items.shape[1], len(listed.tile_items)
        a.sequences, a.merge_rows = listed.sequences, self._merge_rows(tiling)
        a.kv_heads, a.tokens = plan.heads_kv, plan.tokens_per_seq
        a.table_pages, a.tail_pages = listed.pages.shape[1], listed.tail_pages
        a.group, a.rows_each = Divisor.by(group), Divisor.by(self.rows_each)
        a.merge_jobs = Divisor.by(-(-plan.heads_kv * self.rows_each // max(1, a.merge_rows)))
        self.grid = (listed.blocks, 1, 1)
        self.workspaces: dict[int | None, Workspace] = {}
        self.graph_meeting = self._meeting()
        if self.device.type == "cuda":
            self.kernel = compiler.load(self.spec, self.device)
            self.launch_args = compiler.Args(*[compiler.TensorMap.blank()] * len(self.map_specs), a)

    def _merge_rows(self, tiling: Tiling) -> int:
        """Rows of a job of merging: one where there are few, of which several warps then have a part each; two, or four
        where there would be more jobs than warps."""
        if not self.listed.total_states:
            return 0
        rows = self.listed.sequences * self.plan.heads_kv * self.rows_each
        if rows <= self.listed.blocks and tiling.warps >= 4:
            return 1
        warps = tiling.warps + (TILE_WARPS if tiling.tile_stages else 0)
        return 2 if rows <= 2 * self.listed.blocks * warps else 4

    def _meeting(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.device)

    def _workspace(self, stream: int | None) -> Workspace:
        """Of a stream, whose launches follow each other; None: of graphs, which hold what is allocated in them.

        A plan's graphs share the meeting, which is made before them: they must not be replayed at the same time.
        """
        found = self.workspaces.get(stream)
        if found is None or stream is None:
            rows = max(1, self.listed.total_states * self.plan.heads_kv * self.rows_each)
            found = self.workspaces[stream] = Workspace(
                torch.empty(rows * self.fmt.head_dim, dtype=torch.float32, device=self.device),
                torch.empty(rows * 2, dtype=torch.float32, device=self.device),
                self.graph_meeting if stream is None else self._meeting(),
            )
        return found

    def __call__(
        self,
        q: torch.Tensor,
        k_parts: Parts,
        v_parts: Parts,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        tree: torch.Tensor | None,
        *,
        scale: float,
        softcap: float,
        left: int | None,
        **emulated: Any,
    ) -> None:
        """Fills o, and lse if there is one, both like q; sinks: float32. emulated: options of emulator.launch.

        tree: (num_seqs, tokens_per_seq) int32, bit j of a row's word telling whether it sees query token j.
        """
        a = self.args
        a.q, a.o, a.lse = q.data_ptr(), o.data_ptr(), None if lse is None else lse.data_ptr()
        a.tree = None if tree is None else tree.data_ptr()
        a.scores = ScoreArgs.of(scale=scale, softcap=softcap, left=left, right=0)
        a.scores.sinks = None if sinks is None else sinks.data_ptr()
        a.q_strides, a.o_strides = Strides.of(q), Strides.of(o)
        size = k_parts[0].element_size()
        a.k, a.v = Paged.of(k_parts[0], size), Paged.of(v_parts[0], size)
        if len(k_parts) > 1:
            a.k_scale, a.v_scale = Paged.of(k_parts[1]), Paged.of(v_parts[1])
        if len(k_parts) > 2:
            a.k_zero, a.v_zero = Paged.of(k_parts[2]), Paged.of(v_parts[2])
        cuda = self.device.type == "cuda"
        stream = compiler.raw_stream(self.kernel.ordinal) if cuda else 0
        space = self._workspace(None if cuda and torch.cuda.is_current_stream_capturing() else stream)
        a.state_o, a.state_ml, a.barrier_counter = (x.data_ptr() for x in (space.o, space.ml, space.meeting))
        pointers = (k_parts[0].data_ptr(), v_parts[0].data_ptr())
        if cuda:
            for n, spec in enumerate(self.map_specs):
                if spec is not None:
                    self.launch_args.point(n, compiler.encode(spec, pointers[n % 2]))
            self.kernel.launch(self.grid, self.launch_args, stream=stream, cooperative=bool(a.merge_rows))
            return
        tensors = {"q": q, "o": o, "lse": lse, "sinks": sinks, "tree": tree, **self.fixed}
        tensors |= {"state_o": space.o, "state_ml": space.ml, "meeting": space.meeting}
        for name, parts in (("k", k_parts), ("v", v_parts)):
            tensors |= {f"{name}{n}": x for n, x in enumerate(parts)}
        known = {name: x for name, x in tensors.items() if x is not None}
        maps = [
            emulator.TensorMap() if spec is None else emulator.tensor_map(spec, pointers[n % 2])
            for n, spec in enumerate(self.map_specs)
        ]
        resident = self.grid[0] if a.merge_rows else 1
        emulator.launch(self.spec, self.grid, [*maps, a], known, resident=resident, **emulated)


def run(
    plan: DecodePlan,
    q: torch.Tensor,
    fmt: KVFormat,
    k_parts: Parts,
    v_parts: Parts,
    page_lists: PageLists,
    lengths: Sequence[int],
    o: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    window: Window | None = None,
    splitting: Splitting | None = None,
    room: int = 0,
    tma: bool | None = None,
    tiles: bool | None = None,
    **emulated: Any,
) -> WorkList:
    """Attention of a plan's queries over one layer's pages; returns the plan's list, for its `grow`.

    q, o: (num_seqs, tokens_per_seq, Hq, D) in the order of plan.seqs; lse: (num_seqs, Hq, tokens_per_seq) float32,
    contiguous, or None. k_parts, v_parts: the format's components of the layer, (num_pages, page_size, Hkv, *trailing).
    page_lists, lengths: of the plan's sequences, in the order of plan.seqs; looked at when the list is made. tree:
    (num_seqs, T, T) bool, which query tokens each row sees, the first being seen by all; causal if None. window: as the
    plan was made with. room: tokens that each sequence may grow by under WorkList.grow before a new plan is needed.
    tma, tiles: whether to load by TMA, and to put shared nodes through tiles; None for whatever the pages and the plan
    allow. emulated: options of emulator.launch.
    """
    page_size = k_parts[0].shape[1]
    arch = arch_of_device(q.device)
    if tma is None:
        tma = page_size % CHUNK == 0 and arch == "sm_90a"
    check_served(q, fmt, plan, (k_parts[0], v_parts[0]))
    if tiles is None or tiles:
        tiles = tiles_can(q.dtype, fmt, tma) and uses_tiles(plan, splitting)
    deep = tma and not tiles and fmt.head_dim <= 128 and fills_one_block(plan, fmt, multiprocessors(q.device))
    tiling = choose_tiling(fmt, plan.tokens_per_seq * (plan.heads_q // plan.heads_kv), tiles, tma, arch, deep)
    listed = work_list_of(
        plan, page_lists, lengths, page_size, tiling, chunk_tokens(fmt), q.device, splitting=splitting, room=room
    )
    if not q.numel():
        return listed
    runs = len(k_parts) > 1 and scales_in_runs(fmt, page_size, (*k_parts[1:], *v_parts[1:]))
    cache: dict[Any, Any] = plan.__dict__.setdefault("_gpu", {})
    strides = (k_parts[0].stride(), v_parts[0].stride())
    key = (
        id(listed),
        q.device,
        q.dtype,
        fmt,
        tiling,
        page_size,
        tma,
        runs,
        softcap > 0,
        tree is None,
        len(k_parts[0]),
        strides,
    )
    bound: Decode | None = cache.get(key)
    if bound is None:
        codes = (k_parts[0], v_parts[0])
        bound = cache[key] = Decode(
            plan, q, fmt, codes, listed, tiling, softcap=softcap > 0, tree=tree is not None, tma=tma, runs=runs
        )
    left = None if window is None else window[0]
    if sinks is not None:
        sinks = sinks.float().contiguous()
    if not _aligned(q):
        q = q.clone(memory_format=torch.contiguous_format)
    to = o if _aligned(o) else torch.empty_like(o, memory_format=torch.contiguous_format)
    words = None
    if tree is not None:
        places = torch.arange(tree.shape[-1], dtype=torch.int32, device=tree.device)
        words = ((tree.to(torch.int32) << places).sum(-1, dtype=torch.int32) | 1).contiguous()
    bound(q, k_parts, v_parts, to, lse, sinks, words, scale=scale, softcap=softcap, left=left, **emulated)
    if to is not o:
        o.copy_(to)
    return listed


def grow(plan: DecodePlan, lengths: npt.NDArray[np.int64], page_lists: PageLists) -> None:
    """Take the sequences' new lengths, in the order of plan.seqs, into the plan and its lists, which stay as they are.

    Raises ValueError, with nothing changed, where a list has no room for them.
    """
    lists = [x for x in plan.__dict__.get("_gpu", {}).values() if isinstance(x, WorkList)]
    for listed in lists:
        listed.check_growth(lengths)
    for listed in lists:
        listed.grow(lengths, page_lists)
    object.__setattr__(plan, "lengths", tuple(lengths.tolist()))


def work_list_of(
    plan: DecodePlan,
    page_lists: PageLists,
    lengths: Sequence[int],
    page_size: int,
    tiling: Tiling,
    chunk: int,
    device: torch.device,
    *,
    splitting: Splitting | None = None,
    room: int = 0,
) -> WorkList:
    """The plan's list for `device`, made once and kept on the plan. chunk: tokens that a warp takes at a time."""
    cache: dict[Any, Any] = plan.__dict__.setdefault("_gpu", {})
    blocks = (1 if device.type == "cpu" else tiling.blocks) * multiprocessors(device)
    deep = tiling.blocks == 1 and tiling.stages >= 4
    longest = DEEP_CHUNKS if deep else WHOLE_CHUNKS
    shape = Shape(tiling.rows, tiling.warps, blocks, tiling.tile_stages > 0, longest, tiling.joiners, chunk)
    key = ("list", device, page_size, shape, splitting, room)
    found: WorkList | None = cache.get(key)
    if found is None:
        found = cache[key] = work_list(plan, page_lists, lengths, page_size, shape, splitting=splitting, room=room)
    return found


def _aligned(x: torch.Tensor) -> bool:
    """Do rows begin at multiples of 8 bytes? The kernel reads and writes up to four values at a time."""
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    return x.stride(-1) == 1 and x.data_ptr() % 8 == 0 and all(s % 4 == 0 for s in strides)
