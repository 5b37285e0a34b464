"""The backward by mma.sync, kernels/backward/backward_mma.cu and mma_ends.cu: which form of it serves, and its launch.

It serves every card without wgmma. The choice is a pure function of the card's shared memory and the head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tilewise import compiler, emulator
from tilewise.arch import arch_of_device, card_of, limits_of
from tilewise.compiler.spec import Constant, KernelSpec
from tilewise.gpu.abi import ELEMENTS, ScoreArgs, Strides, score_rule
from tilewise.gpu.backward_abi import KEY_TILE_WORDS, BackwardArgs
from tilewise.gpu.backward_call import GradientCall, Gradients
from tilewise.gpu.prefill import tma_can
from tilewise.scores import Scores

SOURCE, ENDS = "backward/backward_mma.cu", "backward/mma_ends.cu"
WIDTHS = (64, 128, 192, 256)  # head dimensions that the products run over; others are padded


@dataclass(frozen=True)
class BackwardTiling:
    """Queries and keys of a tile, keys of a pair of warps, parts of dQ side by side, places for Q and dO, and the rest.

    own_registers: a warp keeps its rows of K or V in registers. blocks_each: thread blocks that a multiprocessor holds.
    """

    tile_q: int
    tile_kv: int
    pair_keys: int
    dq_across: int
    stages: int = 2
    own_registers: bool = False
    blocks_each: int = 1

    @property
    def threads(self) -> int:
        return 64 * self.tile_kv // self.pair_keys

    def shared_bytes(self, width: int) -> int:
        """Shared memory per block, as mma_layout.cuh lays it out."""
        rows = 2 * self.tile_kv + 2 * self.stages * self.tile_q
        return 2 * width * rows + 4 * self.tile_q * self.tile_kv + 8 * self.stages * self.tile_q + 4 * KEY_TILE_WORDS


# By padded head dimension: the first that fits the card's shared memory is taken. A warp holds dK or dV of its pair's
# keys in registers, and S or dP of them. With 32 keys each fragment of Q and dO that is read serves two products.
TILINGS: dict[int, tuple[BackwardTiling, ...]] = {
    64: (BackwardTiling(64, 128, 32, 2, own_registers=True),),
    128: (BackwardTiling(64, 128, 32, 4), BackwardTiling(32, 64, 16, 4)),
    192: (BackwardTiling(64, 64, 16, 2), BackwardTiling(32, 48, 16, 3)),
    256: (BackwardTiling(32, 64, 16, 4), BackwardTiling(32, 32, 16, 2, stages=1)),
}


def padded(head_dim: int) -> int:
    """The head dimension that the products run over."""
    return next(d for d in WIDTHS if d >= head_dim)


def choose(card: str, head_dim: int) -> BackwardTiling:
    """The tiling for a head dimension on a card."""
    width, limits = padded(head_dim), limits_of(card)
    return next(t for t in TILINGS[width] if t.shared_bytes(width) <= limits.shared_block)


def new_card(device: torch.device) -> bool:
    """Is there stmatrix, and one instruction that adds four floats? The emulator behaves as the card it imitates."""
    name = card_of(device) if device.type == "cpu" else arch_of_device(device)
    return int(name.removeprefix("sm_").rstrip("a")) >= 90


def specs_of(
    dtype: torch.dtype, head_dim: int, tiling: BackwardTiling, scores: Scores, *, vectors: bool, new: bool
) -> tuple[KernelSpec, KernelSpec, KernelSpec]:
    """The kernels before the backward, of the backward, and after it. vectors: rows lie on 16 bytes."""
    return _specs(dtype, head_dim, tiling, score_rule(scores), vectors, new)


@lru_cache(maxsize=1024)
def _specs(
    dtype: torch.dtype, head_dim: int, tiling: BackwardTiling, rule: tuple[str, str], vectors: bool, new: bool
) -> tuple[KernelSpec, KernelSpec, KernelSpec]:
    width = padded(head_dim)
    common: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENTS[dtype]),
        ("kHeadDim", width),
        ("kColumns", head_dim),
        ("kTileQ", tiling.tile_q),
        ("kTileKv", tiling.tile_kv),
        ("kPairKeys", tiling.pair_keys),
        ("kDqAcross", tiling.dq_across),
        ("kStages", tiling.stages),
        ("kVectors", vectors),
        ("kNewCard", new),
    )
    main = (*common, ("kOwnInRegisters", tiling.own_registers), ("kBlocksEach", tiling.blocks_each), rule)
    before, after = (
        KernelSpec(name, ENDS, name, common, tiling.threads, 0, product=True) for name in ("before_mma", "after_mma")
    )
    shared = tiling.shared_bytes(width)
    return before, KernelSpec("backward_mma", SOURCE, "backward_mma", main, tiling.threads, shared, product=True), after


def gradients(call: GradientCall, tiling: BackwardTiling | None = None, **emulated: Any) -> Gradients:
    """The gradients of a call's q, k and v. tiling: another than the card's own."""
    q, k, v, scores = call.q, call.k, call.v, call.scores
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    vectors = tma_can(q, k, v, call.o, call.d_o, d_q, d_k, d_v)
    tiling = tiling or choose(card_of(q.device), q.shape[-1])
    specs = specs_of(q.dtype, q.shape[-1], tiling, scores, vectors=vectors, new=new_card(q.device))
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    q_tiles, kv_tiles = -(-seqlen_q // tiling.tile_q), -(-seqlen_k // tiling.tile_kv)
    slots = batch * heads * q_tiles * tiling.tile_q
    stats = torch.empty(2 * slots, dtype=torch.float32, device=q.device)
    dq_sum = torch.empty(slots * padded(head_dim), dtype=torch.float32, device=q.device)
    tensors = {"q": q, "k": k, "v": v, "o": call.o, "d_o": call.d_o, "lse": call.lse, "d_lse": call.d_lse}
    tensors |= {"stats": stats, "dq_sum": dq_sum, "dq": d_q, "dk": d_k, "dv": d_v}
    given = {name: x for name, x in tensors.items() if x is not None}
    slopes = scores.slopes
    if slopes is not None:
        given["slopes"] = slopes
    a = BackwardArgs(**{name: x.data_ptr() for name, x in given.items() if name != "slopes"})
    a.scores, a.scale = ScoreArgs.of(scores), scores.scale
    if slopes is not None:
        a.scores.slopes, a.scores.slopes_batch = slopes.data_ptr(), slopes.stride(0)
    for name, x in {"q": q, "k": k, "v": v, "o": call.o, "do": call.d_o, "dq": d_q, "dk": d_k, "dv": d_v}.items():
        setattr(a, f"{name}_strides", Strides(x.stride(0), x.stride(1), x.stride(2)))
    for name, x in (("lse", call.lse), ("d_lse", call.d_lse)):
        if x is not None:
            setattr(a, f"{name}_strides", Strides(x.stride(0), x.stride(2), x.stride(1)))
    a.seqlen_q, a.seqlen_k, a.sequences = seqlen_q, seqlen_k, batch
    a.heads, a.kv_heads, a.group, a.head_dim = heads, kv_heads, heads // kv_heads, head_dim
    a.q_tiles, a.kv_tiles = q_tiles, kv_tiles
    ends, blocks = (q_tiles, heads, batch), (kv_tiles * kv_heads * batch, 1, 1)
    for spec, grid in zip(specs, (ends, blocks, ends), strict=True):
        if q.device.type == "cuda":
            compiler.load(spec, q.device).launch(grid, compiler.Args(a))
        else:
            emulator.launch(spec, grid, [a], given, **emulated)
    return Gradients(d_q, d_k, d_v, None)
