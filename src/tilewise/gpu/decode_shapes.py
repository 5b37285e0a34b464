"""Which decode kernel serves a plan: what is served at all, and the shape of the kernel and of its list."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from tilewise import tuned
from tilewise.formats import KVFormat
from tilewise.gpu.decode_kernels import (
    BITS,
    DTYPES,
    FORMATS,
    HEAD_DIMS,
    MAX_GROUP,
    MAX_TOKENS,
    DecodeTiling,
    Parts,
    fits,
    scale_groups,
)
from tilewise.plan.standing import StandingPlan
from tilewise.plan.tiles import DecodePlan
from tilewise.plan.worklist import DEEP_CHUNKS, WHOLE_CHUNKS, Shape, Splitting, uses_tiles

AnyPlan = DecodePlan | StandingPlan


def check_served(q: torch.Tensor, fmt: KVFormat, plan: AnyPlan, codes: Parts) -> None:
    """NotImplementedError for what the kernel does not serve."""
    instead = 'backend="cpu"' if q.device.type == "cpu" else ".cpu() tensors"
    group = plan.heads_q // plan.heads_kv
    if fmt.head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"GPU decode takes head_dim {HEAD_DIMS}, got {fmt.head_dim}; use {instead}")
    if any(stop - start not in HEAD_DIMS for start, stop in value_slices(fmt.values.head_dim)):
        raise NotImplementedError(
            f"GPU decode takes a head_dim of V {HEAD_DIMS}, or up to 512 one that is 256 more than one of them, got "
            f"{fmt.values.head_dim}; write zeros after the channels of V up to such a one, or use {instead}"
        )
    if q.dtype not in DTYPES or fmt.name not in FORMATS or (q.dtype == torch.float32 and fmt.name != "fp32"):
        raise NotImplementedError(
            f"GPU decode takes bfloat16 and float16 queries over bf16, fp16, fp8, int8, int4 and fp32 caches, and "
            f"float32 queries over fp32 caches, got {q.dtype} over {fmt.name}; convert q, or use {instead}"
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


def value_slices(value_dim: int) -> tuple[tuple[int, int], ...]:
    """The columns of V, and of O, that are computed by one launch each: all of them up to 256, of which a warp has
    registers for O; else 256 and the rest, whose launch reads K once more."""
    return ((0, value_dim),) if value_dim <= HEAD_DIMS[-1] else ((0, HEAD_DIMS[-1]), (HEAD_DIMS[-1], value_dim))


def slice_of_values(fmt: KVFormat, v_parts: Parts, start: int, stop: int) -> tuple[KVFormat, list[torch.Tensor]]:
    """The format and V's components of the channels [start, stop); start is a multiple of every group of them."""
    cut = replace(fmt.values, head_dim=stop - start)
    size = {"int4": 2}.get(fmt.name, 1)  # codes of a stored value
    found = [v_parts[0][..., start // size : stop // size]]
    for x in v_parts[1:]:  # scales and zero points
        first = start // fmt.group_size if fmt.name == "int4" else 0
        found.append(x[..., first : first + scale_groups(cut)])
    return fmt.beside(cut), found


def fills_one_block(plan: AnyPlan, fmt: KVFormat, multiprocessors: int) -> bool:
    """Is nothing shared, and are there as many ranges as warps, with one block of four warps per multiprocessor?

    A range is a sequence and KV head. Then each warp has one, and its ring alone has to hide the memory's latency: with
    rings of two chunks 64 × 4096 tokens took 252 µs in some runs and 271 in others; with four they take 258, and
    64 × 16384 take 981 µs instead of 997.
    """
    if isinstance(plan, StandingPlan):
        count, unshared = plan.rows, plan.share is False
    else:
        count, unshared = len(plan.seqs), plan.shared_nodes == 0
    warps, ranges = 4 * multiprocessors, count * plan.heads_kv
    rows = plan.tokens_per_seq * (plan.heads_q // plan.heads_kv)
    return unshared and BITS[fmt.name] == 16 and rows <= 8 and 0.9 * warps <= ranges <= warps


@lru_cache(maxsize=256)
def as_measured(table: tuned.Tuned, fmt: KVFormat, tiling: DecodeTiling, card: str) -> DecodeTiling:
    """The tiling with rings as deep as was fastest on this card. It changes no bit of the result."""
    return table.prefer("decode", tuned.decode_key(fmt, tiling), tiling, lambda t: fits(fmt, t, card))


def has_wide_nodes(plan: AnyPlan, splitting: Splitting | None) -> bool:
    """Has the plan a shared node with enough rows for tiles, or may it have one after it was renewed?"""
    if isinstance(plan, DecodePlan):
        return uses_tiles(plan, splitting)
    rows = plan.rows * plan.tokens_per_seq * (plan.heads_q // plan.heads_kv)
    return plan.share is not False and plan.rows > 1 and rows >= (splitting or Splitting()).tile_rows


def shape_of(tiling: DecodeTiling, chunk: int, device: torch.device, processors: int) -> Shape:
    """The shape of a kernel's list on `device` with so many multiprocessors. chunk: tokens that a warp takes at a
    time."""
    blocks = (1 if device.type == "cpu" else tiling.blocks) * processors
    deep = tiling.blocks == 1 and tiling.stages >= 4
    longest = DEEP_CHUNKS if deep else WHOLE_CHUNKS
    return Shape(
        tiling.rows, tiling.warps, blocks, tiling.tile_stages > 0, longest, tiling.joiners, chunk,
        tuned.weights(device), tiling.tile_rows, tiling.mma,
    )  # fmt: skip
