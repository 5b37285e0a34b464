"""The teaching ladder: attention kernels that differ by one idea each, from a scalar loop to a warp-specialised ring.

All rungs take the same arguments and leave the same result; `run` runs one on a card or, over CPU tensors, in the
emulator. The sources are learn/kernels/NN_name.cu; the story is told in learn/README.md.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch

from tilewise import compiler, emulator
from tilewise.compiler.spec import Constant, KernelSpec
from tilewise.compiler.tensor_maps import TensorMapSpec
from tilewise.gpu import named
from tilewise.gpu.abi import ELEMENTS, LOG2E, MAP_NAMES, PANEL, Strides

Constants = tuple[tuple[str, Constant], ...]


class AttentionArgs(ctypes.Structure):
    """learn/kernels/args.cuh: AttentionArgs."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse")),
        *((f"{name}_strides", Strides) for name in ("q", "k", "v", "o")),
        *((name, ctypes.c_int) for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "causal")),
        ("scale_log2", ctypes.c_float),
        ("reserved", ctypes.c_int),
    ]


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder.

    idea: what changed from the rung before, in one line. line: which story it belongs to; rungs are compared with the
    one before them on the same line. tile_q: query rows of a block. constants(head_dim) and
    shared_bytes(head_dim, element bytes) complete the spec. tile_kv: given for rungs that load by TMA, which take
    tensor maps of q, k and v before the arguments and need sm_90a. blocks: the grid of a persistent rung, whose blocks
    share all tiles; else one block a tile.
    """

    name: str
    source: str
    idea: str
    line: str
    threads: int
    tile_q: int
    constants: Callable[[int], Constants]
    shared_bytes: Callable[[int, int], int]
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...]
    tile_kv: int | None = None
    blocks: int | None = None
    exact: bool = True  # False: rounds its inputs by design

    @property
    def hopper(self) -> bool:
        return self.tile_kv is not None

    def spec(self, dtype: torch.dtype, head_dim: int) -> KernelSpec:
        """The kernel for one dtype and head dimension; NotImplementedError if the rung's idea does not serve them."""
        if dtype not in self.dtypes or head_dim not in self.head_dims:
            taken = ", ".join(str(d).removeprefix("torch.") for d in self.dtypes)
            raise NotImplementedError(
                f"{self.name} is written for {taken} and head_dim {', '.join(map(str, self.head_dims))}, "
                f"got {str(dtype).removeprefix('torch.')} and {head_dim}"
            )
        constants: Constants = (("Element", ELEMENTS[dtype]), ("kHeadDim", head_dim), *self.constants(head_dim))
        shared = self.shared_bytes(head_dim, dtype.itemsize)
        source = str(PurePosixPath("learn/kernels") / self.source)
        return KernelSpec(self.name, source, self.name, constants, self.threads, shared)


def run(
    rung: Rung,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    late: bool = True,
    seed: int = 0,
    count: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, emulator.Counters | None]:
    """One rung: o (B, Nq, Hq, D), lse (B, Hq, Nq), and the counters if `count`.

    q (B, Nq, Hq, D), k and v (B, Nk, Hkv, D): CUDA tensors run on their card, CPU tensors in the emulator, for which
    late, seed and count are (see emulator.launch).
    """
    batch, seqlen_q, heads_q, head_dim = q.shape
    spec = rung.spec(q.dtype, head_dim)
    o = torch.full_like(q, math.nan, memory_format=torch.contiguous_format)
    lse = torch.full((batch, heads_q, seqlen_q), math.nan, device=q.device)
    if not o.numel():
        return o, lse, None
    if not k.shape[1]:  # no keys: nothing to launch over
        return o.zero_(), lse.fill_(-math.inf), None
    launch = prepare(rung, q, k, v, o, lse, causal=causal, scale=scale)
    grid = launch.grid
    if q.is_cuda:
        compiler.load(spec, q.device).launch(grid, compiler.Args(*launch.args))
        return o, lse, None
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    return o, lse, emulator.launch(spec, grid, launch.args, tensors, late=late, seed=seed, count=count)


@dataclass(frozen=True)
class Launch:
    """A grid and the arguments of a launch."""

    grid: tuple[int, int, int]
    args: list[Any]


def prepare(
    rung: Rung,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Launch:
    """What a launch of the rung over these tensors takes; o (B, Nq, Hq, D) and lse (B, Hq, Nq) are written."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    args = AttentionArgs(
        *(x.data_ptr() for x in (q, k, v, o, lse)),
        *(Strides.of(x) for x in (q, k, v, o)),
        *(batch, seqlen_q, k.shape[1], heads_q, k.shape[2], int(causal)),
        (head_dim**-0.5 if scale is None else scale) * LOG2E,
        0,
    )
    tiles = -(-seqlen_q // rung.tile_q)
    grid = (tiles, heads_q, batch) if rung.blocks is None else (min(rung.blocks, tiles * heads_q * batch), 1, 1)
    maps = []
    if rung.tile_kv is not None:
        maps = [_panel_map(x, rows) for x, rows in ((q, rung.tile_q), (k, rung.tile_kv), (v, rung.tile_kv))]
    return Launch(grid, [*maps, args])


def _panel_map(x: torch.Tensor, rows: int) -> Any:
    """The map of x (B, N, H, D) by boxes of `rows` rows and one panel of columns, for tile/hopper.cuh's load_tile."""
    size = x.element_size()
    sizes = (x.shape[3], x.shape[1], x.shape[2], x.shape[0])
    strides = tuple(size * s for s in (x.stride(1), x.stride(2), x.stride(0)))
    spec = TensorMapSpec(MAP_NAMES[x.dtype], sizes, strides, (PANEL, rows, 1, 1), 128)
    return compiler.encode(spec, x.data_ptr()) if x.is_cuda else emulator.tensor_map(spec, x.data_ptr())


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

RUNGS: tuple[Rung, ...] = (
    # ---- lecture ----
    Rung(
        "registers",
        "03_registers.cu",
        "a square of threads for a tile of rows; O, m and l in registers",
        line="lecture",
        threads=256,
        tile_q=32,
        constants=lambda d: (("kTile", 32), ("kSide", 16)),
        shared_bytes=lambda d, size: (3 * 32 * (d + 1) + 32 * 33) * 4,
        dtypes=(F32,),
        head_dims=(32, 64, 96, 128),
    ),
    # ---- raw CUDA ----
    Rung(
        "flash_naive",
        "04_flash_naive.cu",
        "the algorithm alone: one thread a row, O in global memory",
        line="raw CUDA",
        threads=32,
        tile_q=32,
        constants=lambda d: (("kTile", 32),),
        shared_bytes=lambda d, size: (3 * 32 * d + 32 * 32) * 4,
        dtypes=(F32,),
        head_dims=(32, 64, 96, 128),
    ),
    Rung(
        "flash_2d",
        "05_flash_2d.cu",
        "lanes run along rows: coalesced loads, maxima and sums by shuffle; O still in global memory",
        line="raw CUDA",
        threads=256,
        tile_q=32,
        constants=lambda d: (("kTile", 32), ("kWarps", 8)),
        shared_bytes=lambda d, size: (3 * 32 * (d + 1) + 32 * 32) * 4,
        dtypes=(F32,),
        head_dims=(32, 64, 96, 128),
    ),
    Rung(
        "scalar2d_row_tile",
        "06_scalar2d_row_tile.cu",
        "O and the row statistics stay in registers; 4 rows a thread share each value fetched",
        line="raw CUDA",
        threads=256,
        tile_q=64,
        constants=lambda d: (("kTileQ", 64), ("kTileKv", 32), ("kThreads", 256)),
        shared_bytes=lambda d, size: (128 * (d + 1) + 64 * 33) * 4,
        dtypes=(F32, F16, BF16),
        head_dims=(32, 64, 96, 128),
    ),
    Rung(
        "warp_wmma",
        "07_warp_wmma.cu",
        "the products go to the tensor cores by wmma, one warp a block",
        line="raw CUDA",
        threads=32,
        tile_q=32,
        constants=lambda d: (("kTileQ", 32), ("kTileKv", 32)),
        shared_bytes=lambda d, size: (32 + 2 * 32) * (d + 8) * 2 + 32 * (40 * 2 + 36 * 4 + (d + 4) * 4),
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128),
    ),
    Rung(
        "block_wmma",
        "08_block_wmma.cu",
        "four warps share a K/V tile; tiles of S and O dealt to the warps in turn",
        line="raw CUDA",
        threads=128,
        tile_q=64,
        constants=lambda d: (("kTileQ", 64), ("kTileKv", 32), ("kWarps", 4)),
        shared_bytes=lambda d, size: (64 + 2 * 32) * (d + 8) * 2 + 64 * (40 * 2 + 36 * 4 + (d + 4) * 4),
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128),
    ),
    Rung(
        "wmma_row_block",
        "09_wmma_row_block.cu",
        "each warp owns 16 rows end to end: block barriers only around K/V",
        line="raw CUDA",
        threads=128,
        tile_q=64,
        constants=lambda d: (("kTileQ", 64), ("kTileKv", 32), ("kWarps", 4)),
        shared_bytes=lambda d, size: (64 + 2 * 32) * (d + 8) * 2 + 64 * (40 * 2 + 36 * 4 + (d + 4) * 4),
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128),
    ),
    Rung(
        "mma",
        "10_mma.cu",
        "mma.sync fed by ldmatrix: softmax on the accumulators, S, P and O never leave the registers",
        line="raw CUDA",
        threads=128,
        tile_q=64,
        constants=lambda d: (("kTileQ", 64), ("kTileKv", 64), ("kThreads", 128)),
        shared_bytes=lambda d, size: (64 + 64) * d * size,
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128),
    ),
    Rung(
        "mma_swizzle",
        "11_mma_swizzle.cu",
        "shared tiles XOR-swizzled: ldmatrix without bank conflicts",
        line="raw CUDA",
        threads=128,
        tile_q=64,
        constants=lambda d: (("kTileQ", 64), ("kTileKv", 64), ("kThreads", 128)),
        shared_bytes=lambda d, size: (64 + 64) * d * size,
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128),
    ),
    Rung(
        "mma_qreg",
        "12_mma_qreg.cu",
        "Q's fragments stay in registers, so K and V get its shared memory: twice the rows a block, half the barriers",
        line="raw CUDA",
        threads=256,
        tile_q=128,
        constants=lambda d: (("kTileQ", 128), ("kTileKv", 64 if d <= 128 else 32), ("kThreads", 256)),
        shared_bytes=lambda d, size: 128 * d * size,
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128, 256),
    ),
    Rung(
        "mma_qreg_vld",
        "13_mma_qreg_vld.cu",
        "16 bytes a thread to and from global memory",
        line="raw CUDA",
        threads=256,
        tile_q=128,
        constants=lambda d: (("kTileQ", 128), ("kTileKv", 64 if d <= 128 else 32), ("kThreads", 256)),
        shared_bytes=lambda d, size: 128 * d * size,
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128, 256),
    ),
    Rung(
        "mma_qreg_async",
        "14_mma_qreg_async.cu",
        "cp.async into a second stage: the next K and V tiles travel while this one is computed; one barrier a tile",
        line="raw CUDA",
        threads=256,
        tile_q=128,
        constants=lambda d: (("kTileQ", 128), ("kTileKv", 64 if d <= 128 else 32), ("kThreads", 256)),
        # two stages of K and V; Q comes in through the second, which D 256 has to widen for it
        shared_bytes=lambda d, size: (256 if d <= 128 else 192) * d * size,
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128, 256),
    ),
    Rung(
        "hopper",
        "20_hopper.cu",
        "TMA brings tiles, wgmma multiplies them from shared memory",
        line="raw CUDA",
        threads=128,
        tile_q=64,
        tile_kv=128,
        constants=lambda d: (("kTileQ", 64), ("kTileKv", 128)),
        shared_bytes=lambda d, size: (64 + 2 * 128) * d * size + 24,
        dtypes=(F16, BF16),
        head_dims=(64, 128),
    ),
    Rung(
        "hopper_ring",
        "21_hopper_ring.cu",
        "a producer warp keeps a ring of tiles full for two consumer warpgroups",
        line="raw CUDA",
        threads=384,
        tile_q=128,
        tile_kv=128,
        constants=lambda d: (("kTileQ", 128), ("kTileKv", 128), ("kStages", 2)),
        shared_bytes=lambda d, size: (128 + 2 * 2 * 128) * d * size + 8 + 4 * 2 * 8,
        dtypes=(F16, BF16),
        head_dims=(64, 128),
    ),
    # ---- persistent ----
    Rung(
        "pika_scalar",
        "15_pika_scalar.cu",
        "a warp a row, lanes along the head dimension, no shared memory",
        line="persistent",
        threads=128,
        tile_q=4,
        constants=lambda d: (("kWarps", 4),),
        shared_bytes=lambda d, size: 0,
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128, 256),
    ),
    Rung(
        "pika_opt",
        "16_pika_opt.cu",
        "16-byte loads, several keys of a warp at once, states merged at the end",
        line="persistent",
        threads=128,
        tile_q=4,
        constants=lambda d: (("kWarps", 4), ("kUnroll", 4)),
        shared_bytes=lambda d, size: 0,
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128, 256),
    ),
    Rung(
        "pika_dp4a",
        "18_pika_dp4a.cu",
        "rows become int8 with a scale each on the way into shared memory; four products an instruction",
        line="persistent",
        threads=256,
        tile_q=32,
        constants=lambda d: (("kTile", 32), ("kWarps", 8)),
        shared_bytes=lambda d, size: (3 * 32 * (d // 4 + 1) + 3 * 32 + 32 * 32) * 4,
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128),
        exact=False,
    ),
    Rung(
        "pika_persistent",
        "19_pika_persistent.cu",
        "a fixed grid takes 16-row items from a formula; K and V stream by cp.async past the resident queries",
        line="persistent",
        threads=128,
        tile_q=16,
        constants=lambda d: (("kTileQ", 16), ("kTileKv", 64), ("kWarps", 4)),
        shared_bytes=lambda d, size: (16 + 2 * 64) * (d + 8) * 2 + 16 * (72 * 2 + 68 * 4 + (d + 4) * 4),
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128),
        blocks=132 * 4,  # 4 blocks of D 128 fit a multiprocessor of an H200 at once; any number is right
    ),
    Rung(
        "pika_mma",
        "17_pika_mma.cu",
        "tensor cores: a query tile of 16 rows a warp, key tiles of 16 tokens shared by the block's warps",
        line="persistent",
        threads=128,
        tile_q=64,
        constants=lambda d: (("kTileQ", 64), ("kTileKv", 16), ("kThreads", 128)),
        shared_bytes=lambda d, size: (64 + 2 * 16) * d * size,
        dtypes=(F16, BF16),
        head_dims=(32, 64, 96, 128),
    ),
)

# Not a step of the ladder: what the resource report shows when a thread wants more registers than it can have.
SPILLING = Rung(
    "spilling",
    "90_spilling.cu",
    "a thread holds a row of Q and of O: at D 128 more than 255 registers, so some live in memory",
    line="apart",
    threads=64,
    tile_q=64,
    constants=lambda d: (("kTileQ", 64), ("kTileKv", 16)),
    shared_bytes=lambda d, size: 2 * 16 * d * 4,
    dtypes=(F32,),
    head_dims=(32, 64, 128),
)


def _named(rung: Rung) -> named.NamedKernel:
    def run_named(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse, _ = run(rung, q, k, v, causal=causal, scale=scale)
        return o, lse

    return named.NamedKernel(rung.name, run_named)


for _rung in RUNGS:
    named.register(_named(_rung))
