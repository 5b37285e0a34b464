"""FlexAttention as a peer: torch's own masks and scores by functions, compiled wherever that is possible."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tilewise.plan.blocks import kept_blocks
from tilewise.plan.schedule import BlockSchedule

from .peers import Run

FLEX = "FlexAttention"
COMPILED, EAGER = "compiled", "eager"


def how(device: torch.device) -> str:
    """COMPILED, or EAGER where a CPU has no C++ compiler to do it with: then it forms whole score matrices."""
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return EAGER
    return COMPILED


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by torch, for each set of sizes and each function that it is given anew."""
    import torch._dynamo.config as config

    config.recompile_limit = max(64, config.recompile_limit)  # past it torch runs it eagerly, and says nothing
    made: Callable[..., Any] = torch.compile(function, dynamic=False)
    return made


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Callable[..., Any] | None = None,
    score: Callable[..., Any] | None = None,
    schedule: BlockSchedule | None = None,
) -> Run:
    """flex_attention over q, k and v (B, N, H, D), in its own layout, under a mask or a schedule, and a score.

    Its mask is made, and the whole compiled, at the first call: what raises there is the measuring loop's to report.
    """
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]}
    made: list[Callable[..., Any]] = []

    def first() -> Callable[..., Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        options["score_mod"] = score
        if mask is not None:
            options["block_mask"] = create_block_mask(mask, None, None, q.shape[2], k.shape[2], device=q.device)
        elif schedule is not None:
            options["block_mask"] = block_mask(schedule, q.device)
            if max(schedule.block_q, schedule.block_k) < 128:  # its tiles must not be larger than the blocks
                options["kernel_options"] = {"BLOCK_M": schedule.block_q, "BLOCK_N": schedule.block_k}
        function: Callable[..., Any] = flex_attention
        return compiled(function) if how(q.device) == COMPILED else function

    def run(_: torch.Tensor | None) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is eager is said in the table
            if not made:
                made.append(first())
            o: torch.Tensor = made[0](q, k, v, **options)
        return o.transpose(1, 2)

    return run


def block_mask(schedule: BlockSchedule, device: torch.device) -> Any:
    """torch's BlockMask of the same blocks, all of them full: compiled, it evaluates no mask function.

    Eager, it asks the function alone and no list of blocks: there it gets one that looks the blocks up.
    """
    from torch.nn.attention.flex_attention import BlockMask

    kept = kept_blocks(schedule.cpu()).to(device)  # (1, heads or 1, num_q_blocks, num_k_blocks)
    counts = kept.sum(-1, dtype=torch.int32)
    indices = kept.int().argsort(dim=-1, descending=True, stable=True).int()
    sizes = (schedule.block_q, schedule.block_k)
    lengths = (schedule.seqlen_q, schedule.seqlen_k)
    none = torch.zeros_like(counts), torch.zeros_like(indices)

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return kept[0, h if schedule.heads else 0, q // sizes[0], k // sizes[1]]

    mask = seen if how(device) == EAGER else None
    return BlockMask.from_kv_blocks(*none, counts, indices, BLOCK_SIZE=sizes, mask_mod=mask, seq_lengths=lengths)
