"""The decode kernels, kernels/decode/decode*.cu: their shapes, their constants, their tensor maps.

Everything here is a pure function of the cache's format, the pages' layout and the card; decode.py launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import torch

from tilewise.arch import LIMITS, hopper
from tilewise.compiler.spec import KernelSpec
from tilewise.compiler.tensor_maps import TensorMapSpec
from tilewise.formats import KVFormat
from tilewise.gpu.abi import DECODE_RULES, ELEMENTS, MAP_NAMES, PANEL
from tilewise.plan.worklist import CHUNK, TILE_ROWS, TILE_TOKENS

Parts = Sequence[torch.Tensor]

SELECT_SPEC = KernelSpec("select_pages", "decode/select.cu", "select_pages", (), 512, 0, product=True)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 96, 128, 192, 256)
TILE_DIM = 128  # up to which two warpgroups have registers for O beside the streaming warps; above it one has
TILE_GROUPS = 2  # groups of an int4 row, at most, whose sums they have registers for
MAX_TOKENS, MAX_GROUP = 16, 64
FORMATS = {"bf16": 0, "fp16": 0, "fp8": 1, "int8": 2, "int4": 3, "fp32": 4}  # tile/quant.cuh: Format
BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4, "fp32": 32}
OPERANDS = {"bf16": "bf16", "fp32": "float"}  # of products; of other formats half
RING_BYTES = 65536  # of shared memory per block for the rings: bytes that its streaming warps have in flight
MMA_WARPS, MMA_TOKENS = 4, 32  # decode/tile_mma.cuh: warps of a block, tokens of a tile
COPYING_WARPS = 8  # per multiprocessor that load by cp.async: what its registers hold
BLOCK_OVERHEAD = 1024  # bytes of shared memory per block that the driver reserves


@dataclass(frozen=True)
class DecodeTiling:
    """The shape of a decode kernel.

    rows: the most query rows that a streaming item has. warps: streaming warps per block. stages: chunks in a warp's
    ring. blocks: per multiprocessor. tile_stages: tiles in the ring of the warps that compute tiles; 0 for a kernel
    without them. joiners: how many of those warps stream once their tiles are done. mma: tiles are computed by
    mma.sync, and the streaming warps of a block are among the warps that do so. tile_rows: rows of a tile item at most.
    raw_stages: tiles of quantised codes in the ring from which they are widened into tiles.
    """

    rows: int
    warps: int
    stages: int
    blocks: int
    tile_stages: int = 0
    joiners: int = 0
    mma: bool = False
    tile_rows: int = TILE_ROWS
    raw_stages: int = 0

    @property
    def merging_warps(self) -> int:
        """Warps per block that merge states."""
        return MMA_WARPS if self.mma else self.warps + (self.tile_rows // 16 if self.tile_stages else 0)


def widest(fmt: KVFormat) -> int:
    """The larger head_dim of K and V."""
    return max(fmt.head_dim, fmt.values.head_dim)


def row_bytes(fmt: KVFormat) -> int:
    """Bytes of a row's codes; of a pair, of K's."""
    return fmt.head_dim * BITS[fmt.name] // 8


def chunk_tokens(fmt: KVFormat) -> int:
    """Tokens per chunk, which a warp loads and computes at a time: decode/layout.cuh."""
    groups = max(scale_groups(fmt), scale_groups(fmt.values))
    return 2 * CHUNK if fmt.name == "int4" and widest(fmt) <= 128 and groups <= 2 else CHUNK


def stage_bytes(fmt: KVFormat) -> int:
    """Bytes of K and V per chunk. Where they differ, each begins at a multiple of 1024."""
    each, unit = [chunk_tokens(fmt) * row_bytes(x) for x in (fmt, fmt.values)], 1 if fmt.values is fmt else 1024
    return sum(-(-x // unit) * unit for x in each)


def fold_bytes(fmt: KVFormat, rows: int) -> int:
    """Bytes in which a warp keeps the state of the pieces that it has folded so far."""
    return rows * (fmt.values.head_dim * 4 + 64)


def query_bytes(fmt: KVFormat, rows: int) -> int:
    """Bytes in which a warp keeps float32 query rows that do not fit its registers."""
    return rows * (fmt.head_dim + 4) * 4 if fmt.name == "fp32" and rows * widest(fmt) > 1024 else 0


def tile_groups(fmt: KVFormat) -> int:
    """Warpgroups that compute tiles by wgmma, of 64 rows each: decode/layout.cuh."""
    return 2 if fmt.values.head_dim <= TILE_DIM else 1


def tile_tokens(fmt: KVFormat) -> int:
    """Tokens of a tile by wgmma, as many as registers have room for: decode/layout.cuh."""
    narrow = widest(fmt) > TILE_DIM or fmt.dims == "96x128"
    return TILE_TOKENS // 2 if narrow else TILE_TOKENS


def tile_bytes(fmt: KVFormat) -> int:
    """Bytes of K and V per tile."""
    return tile_tokens(fmt) * sum(-(-x.head_dim // PANEL) for x in (fmt, fmt.values)) * 2 * PANEL


def query_tile_bytes(fmt: KVFormat) -> int:
    """Bytes of Q that the registers of a tile's warpgroups have no room for: decode/layout.cuh."""
    groups, sixteens = tile_groups(fmt), 0
    if BITS[fmt.name] < 16:
        sixteens = 8 if fmt.name == "int4" and fmt.head_dim > PANEL else 4
    elif groups > 1:
        sixteens = fmt.head_dim // 16 - 8 if fmt.head_dim > 192 else 0
    elif fmt.head_dim > 128:
        sixteens = fmt.head_dim // 16
    return groups * -(-sixteens * 16 // PANEL) * 64 * 2 * PANEL


def raw_bytes(fmt: KVFormat) -> int:
    """Bytes of K's and V's codes per tile; 0 where they are not widened."""
    return 2 * TILE_TOKENS * row_bytes(fmt) if BITS[fmt.name] < 16 else 0


def factor_bytes(fmt: KVFormat) -> int:
    """Bytes of what a quantised tile's tokens are multiplied with: decode/tile_factors.cuh."""
    return TILE_TOKENS * (8 + (16 * scale_groups(fmt) if fmt.name == "int4" else 0)) + 16


def scale_groups(fmt: KVFormat) -> int:
    """Scales of a row; of a pair, of K's."""
    return -(-fmt.head_dim // fmt.group_size) if fmt.name == "int4" else 1


def line_heads(fmt: KVFormat, warps: int) -> int:
    """How many neighbouring heads' rows make up 128 bytes, and can be copied as one; 1 if rows are longer.

    warps: heads per copy, of which it must be a divisor.
    """
    row = row_bytes(fmt)
    heads = 128 // row if row <= 128 else 1
    return heads if heads * row == 128 and warps % heads == 0 else 1


def shared_bytes(fmt: KVFormat, tiling: DecodeTiling) -> int:
    """Shared memory per block, as decode/layout.cuh and decode/stream.cuh lay it out."""
    if tiling.mma:
        return _mma_shared_bytes(fmt, tiling)
    tiles = _tile_rings(fmt, tiling.tile_stages, tiling.raw_stages)
    rings = tiling.warps * tiling.stages
    groups = scale_groups(fmt) + scale_groups(fmt.values)
    scales = chunk_tokens(fmt) * {"fp8": 2 * 4, "int8": 2 * 4, "int4": 2 * 2 * groups}.get(fmt.name, 0)
    at_fold = -(-(tiles + rings * stage_bytes(fmt)) // 1024) * 1024
    at_fold += (tiling.warps + tiling.joiners) * tiling.stages * (scales + 8)
    barriers = tiling.tile_stages * (2 if tiling.raw_stages else 1) + tiling.raw_stages
    at_fold = -(-(at_fold + 16 * barriers + 4 * tiling.stages) // 16) * 16
    if tiling.tile_stages:
        at_fold += (16 + 8) * 2 * TILE_ROWS
    if tiling.raw_stages:
        at_fold += 4 * TILE_ROWS * scale_groups(fmt) * (fmt.name == "int4")
        at_fold += tiling.tile_stages * factor_bytes(fmt)
        at_fold += tiling.raw_stages * 2 * TILE_TOKENS * 4 * scale_groups(fmt) + 8 * 2 * TILE_ROWS
    return at_fold + tiling.warps * (fold_bytes(fmt, tiling.rows) + query_bytes(fmt, tiling.rows))


def _tile_rings(fmt: KVFormat, tiles: int, raw: int) -> int:
    """Bytes of the rings of tiles and of codes, and of Q between them."""
    return tiles * tile_bytes(fmt) + raw * raw_bytes(fmt) + (query_tile_bytes(fmt) if tiles else 0)


def _mma_shared_bytes(fmt: KVFormat, tiling: DecodeTiling) -> int:
    """The same where tiles by mma.sync and streams use one memory in turn: the larger of the two, and a counter."""
    streams = shared_bytes(fmt, DecodeTiling(tiling.rows, tiling.warps, tiling.stages, 1))
    row, both = row_bytes(fmt), row_bytes(fmt) + row_bytes(fmt.values)
    tiles = tiling.tile_rows * (row + 20) + tiling.tile_stages * MMA_TOKENS * (both + 16)
    return max(streams, tiles) + 16


def fits(fmt: KVFormat, tiling: DecodeTiling, arch: str) -> bool:
    """Do the tiling's blocks fit a multiprocessor, with rings of two chunks or more?"""
    shared, limits = shared_bytes(fmt, tiling), LIMITS[arch]
    room = tiling.blocks * (shared + BLOCK_OVERHEAD) <= limits.shared_sm
    return tiling.stages >= 2 and shared <= limits.shared_block and room


@lru_cache(maxsize=256)
def choose_tiling(
    fmt: KVFormat, rows_each: int, tiles: bool = False, tma: bool = True, arch: str = "sm_90a", deep: bool = False
) -> DecodeTiling:
    """The kernel's shape for `rows_each` query rows per sequence and KV head; no choice changes a bit of the result.

    Two blocks per multiprocessor where they fit. Quantised formats get eight warps: unpacking takes instructions, and
    eight warps ask for all heads of a token at about the same time. A card with little shared memory gets fewer warps.
    deep: one block with rings twice as deep, for sequences that just fill its warps (`fills_one_block`).
    """
    most = 8 if fmt.name in ("fp8", "int8", "int4") and widest(fmt) <= 128 else 4
    # With larger head dimensions 16 rows of Q and O do not fit a warp's registers: O takes twice as many as Q.
    wide = rows_each > 8 and fmt.head_dim + 2 * fmt.values.head_dim <= 3 * (96 if fmt.name == "fp32" else 128)
    if tiles and not tma:
        return _mma_tiling(fmt, arch)
    if not tma:
        return _copying_tiling(fmt, 16 if wide else 8, most, arch)

    def stages(warps: int) -> int:
        return max(2, min(8, RING_BYTES // warps // stage_bytes(fmt)))

    if tiles:
        return _wgmma_tiling(fmt, arch)
    if deep:
        return DecodeTiling(8, most, min(8, 2 * stages(most)), 1)
    for warps in (most, most // 2, most // 4):
        for blocks in (2, 1):
            if blocks == 2 and warps == 8 and (wide or (fmt.name == "int4" and fmt.dims == "128x96")):
                continue  # two blocks would leave 128 registers per thread
            tiling = DecodeTiling(16 if wide else 8, warps, stages(warps), blocks)
            if fits(fmt, tiling, arch):
                return tiling
    raise AssertionError(f"{fmt} fits no block of {arch}")


def _wgmma_tiling(fmt: KVFormat, arch: str) -> DecodeTiling:
    """The shape of a kernel with tiles by wgmma.

    As many tiles in the ring as fit beside the streams' rings. Of quantised caches two, since keys and values come and
    go by themselves, and as many tiles of codes as fit, for three of which the streams' rings have to make room. Above
    head_dim 128 two warps stream: three tiles come first, of which two are being multiplied.
    """
    warps = 2 * tile_groups(fmt)
    most = max(2, min(8, RING_BYTES // warps // stage_bytes(fmt)))
    if BITS[fmt.name] == 16:
        rings = [(most, tiles, 0) for tiles in range(8, 1, -1)]
    else:
        rings = [(stages, 2, raw) for stages in range(most, 1, -1) for raw in range(8, 2, -1)]
    for stages, tiles, raw in rings:
        # Joiners stream through the memory of the tiles' rings: so much each.
        each = -(-(stages * stage_bytes(fmt) + fold_bytes(fmt, 8)) // 1024) * 1024
        rows = 64 * tile_groups(fmt)
        joiners = min(rows // 16, _tile_rings(fmt, tiles, raw) // each)
        tiling = DecodeTiling(8, warps, stages, 1, tiles, joiners, tile_rows=rows, raw_stages=raw)
        if shared_bytes(fmt, tiling) <= LIMITS[arch].shared_block:
            return tiling
    raise AssertionError(f"{fmt} fits no block of {arch} with tiles")


def _copying_tiling(fmt: KVFormat, rows: int, most: int, arch: str) -> DecodeTiling:
    """The shape of a kernel that loads by cp.async, of up to `most` warps per block: a function of the card's limits.

    Warps come first: while one waits for its chunk, others compute. A multiprocessor's registers hold eight of them,
    for products and addresses take 160 to 255 per thread. Then come bytes in flight, up to 128 KB, which is as much as
    Hopper has with TMA and several times what other cards need: latency times bandwidth per multiprocessor is 13 KB on
    an A100 and 5 KB on a 4090. Then fewer, larger blocks, whose warps ask for neighbouring heads together.
    """
    found: list[tuple[tuple[int, int, int], DecodeTiling]] = []
    for warps in (most, most // 2, most // 4):
        for blocks in (1, 2):
            if warps * blocks > COPYING_WARPS:
                continue
            each = warps * blocks * stage_bytes(fmt)
            for stages in range(max(2, min(8, 2 * RING_BYTES // each)), 1, -1):
                tiling = DecodeTiling(rows, warps, stages, blocks)
                if fits(fmt, tiling, arch):
                    found.append(((warps * blocks, stages * each, warps), tiling))
                    break
    return max(found, key=lambda pair: pair[0])[1]


def _mma_tiling(fmt: KVFormat, arch: str) -> DecodeTiling:
    """The shape of a kernel with tiles by mma.sync: a function of the card's limits.

    Two blocks per multiprocessor come first: one multiplies while the other waits for memory or for its barriers. Then
    come streaming warps, then the tiles' ring, then the streams' rings. A warp has 32 rows of a tile, or sixteen where
    O of 32 does not fit its registers.
    """
    rows = (TILE_ROWS, TILE_ROWS // 2) if fmt.values.head_dim <= 128 else (TILE_ROWS // 2,)
    shapes = (
        DecodeTiling(8, warps, stages, blocks, tile_stages, mma=True, tile_rows=tile_rows)
        for tile_rows in rows
        for blocks in (2, 1)
        for warps in (4, 3, 2)
        for tile_stages in (4, 3, 2)
        for stages in (4, 3, 2)
    )
    return next(t for t in shapes if fits(fmt, t, arch))


@lru_cache(maxsize=1024)
def decode_spec(
    dtype: torch.dtype,
    fmt: KVFormat,
    page_size: int,
    tiling: DecodeTiling,
    *,
    tma: bool = True,
    scale_runs: bool = True,
    rule: tuple[str, str] = DECODE_RULES[0],
    tree: bool = False,
    tiles_whole: bool = True,
    in_step: bool = False,
    line_heads: tuple[int, int] = (1, 1),
    selected: bool = False,
) -> KernelSpec:
    """The kernel for queries of `dtype` over pages of `fmt`.

    rule: what is done to scores. tree: query tokens see each other by a mask. tiles_whole: a copy for tiles brings
    whole rows. in_step: the warps of a block work on neighbouring heads, and one copy brings a chunk for all of them;
    line_heads: heads whose rows of K, and of V, make up 128 bytes and are copied as one. selected: sequences read
    selected pages only.
    """
    constants = (
        ("Element", ELEMENTS[dtype]),
        ("Operand", OPERANDS.get(fmt.name, "half")),
        ("kStoredAs", FORMATS[fmt.name]),
        ("kHeadDim", fmt.head_dim),
        ("kValueDim", fmt.values.head_dim),
        ("kGroupSize", fmt.group_size),
        ("kPageSize", page_size),
        ("kRows", tiling.rows),
        ("kWarps", tiling.warps),
        ("kStages", tiling.stages),
        ("kBlocksPerSm", tiling.blocks),
        ("kTma", tma),
        ("kScaleRuns", scale_runs),
        rule,
        ("kTree", tree),
        ("kInStep", in_step),
        ("kLineHeads", line_heads[0]),
        ("kValueLineHeads", line_heads[1]),
        ("kSelected", selected),
        ("kTileStages", tiling.tile_stages),
        ("kJoiners", tiling.joiners),
        ("kTileRows", tiling.tile_rows),
        ("kRawStages", tiling.raw_stages),
        ("kTileWhole", tiling.tile_stages > 0 and tiles_whole and not (fmt.head_dim | fmt.values.head_dim) % PANEL),
    )
    entry = "decode_tree" if tiling.tile_stages else "decode32" if fmt.name == "fp32" else "decode"
    # Warpgroups of 64 rows, one that loads, one that streams: decode/decode_tree.cu
    threads = 2 * tiling.tile_rows + 256 if tiling.tile_stages else 32 * tiling.warps
    if tiling.mma:
        entry, threads = "decode_tree_mma", 32 * MMA_WARPS
    return KernelSpec(entry, f"decode/{entry}.cu", entry, constants, threads, shared_bytes(fmt, tiling), product=True)


def specs(card: str = "sm_90a", *, every: bool = False) -> list[KernelSpec]:
    """The kernels as users of a card get them: bfloat16, D 128, four rows, pages of 16, eight heads of many sequences,
    and K and V of 192 and 128 channels; with `every`, all formats and head dimensions, and the variants in which each
    warp copies for itself. Of pairs of head dimensions there are the former: all of bf16, two of other formats."""
    found = []
    for name in FORMATS if every else ("bf16", "fp8", "int8", "int4", "fp32"):
        dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(name, torch.bfloat16)
        forms = [(KVFormat(name, head_dim), every) for head_dim in (HEAD_DIMS if every else (128,))]
        pairs = permutations(HEAD_DIMS, 2) if name == "bf16" else ((192, 128), (64, 128))
        if every or name == "bf16":
            told = [KVFormat(name, k).beside(KVFormat(name, v)) for k, v in pairs]
            forms += [(fmt, False) for fmt in told if every or fmt.dims == "192x128"]
        for fmt, all_forms in forms:
            if hopper(card):
                found += _tma_specs(dtype, fmt, all_forms)
            if all_forms or not hopper(card):
                found += _copying_specs(dtype, fmt, card, all_forms)
    return [*dict.fromkeys(found), SELECT_SPEC]


def _copying_specs(dtype: torch.dtype, fmt: KVFormat, card: str, every: bool) -> list[KernelSpec]:
    """By cp.async: streams, and on other cards than Hopper tiles."""
    found = []
    for rows in (4, 16) if every else (4,):
        tiling = choose_tiling(fmt, rows, tma=False, arch=card)
        found.append(decode_spec(dtype, fmt, 16, tiling, tma=False))
        if rows == 4 and not hopper(card) and tiles_can(dtype, fmt, False, card):
            shared = choose_tiling(fmt, rows, tiles=True, tma=False, arch=card)
            found.append(decode_spec(dtype, fmt, 16, shared, tma=False))
            if every:
                found.append(decode_spec(dtype, fmt, 24, shared, tma=False))
                found.append(decode_spec(dtype, fmt, 64, shared, tma=False, rule=DECODE_RULES[1]))
        if every:
            found.append(decode_spec(dtype, fmt, 24, tiling, tma=False, scale_runs=False))
            found.append(decode_spec(dtype, fmt, 64, tiling, tma=False, rule=DECODE_RULES[1]))
            found.append(decode_spec(dtype, fmt, 16, tiling, tma=False, selected=True))
    return found


def _tma_specs(dtype: torch.dtype, fmt: KVFormat, every: bool) -> list[KernelSpec]:
    """Hopper's, by TMA: streams, and tiles where there are any."""
    found = []
    asked = [choose_tiling(fmt, rows) for rows in ((4, 16) if every else (4,))]
    if tiles_can(dtype, fmt, True):
        asked.append(choose_tiling(fmt, 4, tiles=True))
    for tiling in asked:
        if not tiling.tile_stages:
            heads = line_heads(fmt, tiling.warps), line_heads(fmt.values, tiling.warps)
            found.append(decode_spec(dtype, fmt, 16, tiling, in_step=True, line_heads=heads))
        if every or tiling.tile_stages:
            found.append(decode_spec(dtype, fmt, 16, tiling))
        if every:
            found.append(decode_spec(dtype, fmt, 64, tiling, rule=DECODE_RULES[1]))
        if every and not tiling.tile_stages:
            found.append(decode_spec(dtype, fmt, 16, tiling, selected=True))
    return found


def tiles_can(dtype: torch.dtype, fmt: KVFormat, tma: bool, card: str = "sm_90a", tree: bool = False) -> bool:
    """Is there a kernel with tiles for these queries and pages? If not, streaming warps take the shared nodes.

    On Hopper warpgroups compute tiles, which come by TMA, and quantised codes are widened on the way; on other cards
    warps do, by mma.sync, and quantised codes are multiplied by streaming warps alone. int4 at head_dim 96 has no room
    in registers for Q beside the sums of its groups, and above 64 none for a tree's masks; quantised K and V of two
    head dimensions have none either: streaming warps take them all.
    """
    if not hopper(card):
        return fmt.dtype == dtype and BITS[fmt.name] == 16
    if BITS[fmt.name] >= 16:
        return tma and fmt.dtype == dtype and BITS[fmt.name] == 16
    held = fmt.name != "int4" or (fmt.head_dim % PANEL == 0 and scale_groups(fmt) <= TILE_GROUPS)
    held = held and not (tree and fmt.name == "int4" and fmt.head_dim > PANEL)
    return tma and fmt.values is fmt and fmt.head_dim <= TILE_DIM and held


def scales_in_runs(fmt: KVFormat, page_size: int, scales: Parts) -> bool:
    """Are the scales of 16 tokens contiguous, and do they begin at multiples of 16 bytes? Then one copy brings them.

    scales: of K, or of V with V's format. The stride from page to page has to fit 32 bits.
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
    """Bytes from page to page, token to token, head to head; 16 for a dimension of size 1, whose stride is not used."""
    page, token, head = (
        s * x.element_size() if n > 1 else 16 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)
    )
    return page, token, head


def chunk_map(
    codes: torch.Tensor, row_bytes: int, chunk: int, heads_of_box: int = 1, line_heads: int = 1
) -> TensorMapSpec:
    """The map for chunks, in 32-bit words: (panel, token, panels, head, page). decode/layout.cuh has the boxes."""
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
    """Can one copy bring all panels (of 64 columns) of its tokens? It can where heads are contiguous."""
    return all(x.shape[3] % PANEL == 0 and (x.shape[2] == 1 or x.stride(2) == x.shape[3]) for x in codes)


def tile_map(codes: torch.Tensor, tokens: int, whole: bool) -> TensorMapSpec:
    """The map for tiles of so many tokens: a box is those that lie in one page.

    It has one panel of 64 columns, (column, token, head, page), or with `whole` all panels of a head,
    (column, token modulo 8, panel, token / 8, page); of quantised codes whole rows, as they are.
    """
    pages, page_size, heads, head_dim = codes.shape
    page, token, head = _byte_strides(codes)
    box = min(tokens, next(n for n in (64, 32, 16) if page_size % n == 0))
    if codes.element_size() == 1:
        words = head_dim // 4
        return TensorMapSpec("uint32", (words, page_size, heads, pages), (token, head, page), (words, box, 1, 1), 0)
    element = MAP_NAMES[codes.dtype]
    if not whole:
        return TensorMapSpec(element, (head_dim, page_size, heads, pages), (token, head, page), (PANEL, box, 1, 1), 128)
    panels = head_dim // PANEL
    sizes = (PANEL, 8, panels * heads, page_size // 8, pages)
    return TensorMapSpec(element, sizes, (token, 2 * PANEL, 8 * token, page), (PANEL, 8, panels, box // 8, 1), 128)
