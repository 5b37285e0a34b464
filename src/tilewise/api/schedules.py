"""Which blocks of queries and keys a mask function leaves: a BlockSchedule to look at, keep and pass on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from tilewise import checks, functions
from tilewise.arguments import Schedules
from tilewise.functions import Function
from tilewise.plan.blocks import kept_blocks
from tilewise.plan.schedule import BlockSchedule
from tilewise.plan.schedule_grid import check_geometry

BLOCK = 128  # rows and keys of a block where nobody says


def schedule_of(
    mask: Callable[..., Any],
    B: int,
    H: int,
    Nq: int,
    Nk: int,
    *,
    block_q: int = BLOCK,
    block_k: int = BLOCK,
    device: torch.device | str | None = None,
) -> BlockSchedule:
    """The blocks in which `mask(b, h, q, k)` lets a query see a key, for b < B, h < H, q < Nq, k < Nk.

    The blocks of its `whole` plane are those in which every query sees every key: given back beside the same mask,
    `attention(..., mask=mask, schedule=schedule)`, the mask is evaluated in the others alone, and nothing is searched
    again. It has a batch or heads only if the mask depends on b or h. What no arithmetic on ranges can tell counts as
    seen in part, so a block may be kept of which nothing is seen.

    device: where the schedule shall be, that of the tensors that the mask captures if None, else the CPU.
    """
    for name, size, least in (("B", B, 1), ("H", H, 1), ("Nq", Nq, 0), ("Nk", Nk, 0)):
        checks.integer(name, size, least)
    check_geometry(Nq, Nk, block_q, block_k)
    if mask is None:
        raise TypeError("mask must be a function (b, h, q, k) -> bool, got None")
    function = functions.of(mask, None)
    where = function.tensors[0].device if function.tensors else torch.device("cpu")
    where = where if device is None else torch.empty(0, device=device).device  # with its number
    for x in function.tensors:
        if x.device != where:
            raise ValueError(f"mask must capture tensors on {where}, got one of shape {tuple(x.shape)} on {x.device}")
    if where.type == "cuda":
        from tilewise.gpu.schedules_of_functions import schedule_of as on_device

        made: BlockSchedule = on_device(function, B, H, Nq, Nk, block_q, block_k, where)
        return made
    kinds = function.blocks(B, H, Nq, Nk, block_q, block_k)
    sizes = {"seqlen_q": Nq, "seqlen_k": Nk, "block_q": block_q, "block_k": block_k}
    return BlockSchedule.from_blocks(kinds > 0, whole=kinds == 2, **sizes)


def together(
    schedule: BlockSchedule | None, function: Function | None, batch: int, heads: int, seqlen_q: int, seqlen_k: int
) -> BlockSchedule | None:
    """What a call's schedule and its mask function leave, with a whole plane; the schedule alone if it has one."""
    if function is None or function.mask is None or (schedule is not None and schedule.whole is not None):
        return schedule
    blocks = (BLOCK, BLOCK) if schedule is None else (schedule.block_q, schedule.block_k)
    kinds = function.blocks(batch, heads, seqlen_q, seqlen_k, *blocks)
    return _within(schedule, kinds, seqlen_q, seqlen_k, blocks)


def together_packed(
    schedules: Schedules, function: Function | None, starts_q: Sequence[int], starts_k: Sequence[int], heads: int
) -> list[BlockSchedule | None] | None:
    """The same for each of the packed sequences; None if no sequence has a schedule."""
    batch = len(starts_q) - 1
    listed = [schedules] * batch if isinstance(schedules, BlockSchedule) else schedules
    if function is None or function.mask is None:
        return None if listed is None else list(listed)
    lengths = [(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in zip(pairwise(starts_q), pairwise(starts_k), strict=True)]
    longest = [max(n, default=0) for n in zip(*lengths, strict=True)] or [0, 0]
    kinds: dict[tuple[int, int], torch.Tensor] = {}  # by block sizes: those of the longest serve shorter ones
    found: list[BlockSchedule | None] = []
    for b, (seqlen_q, seqlen_k) in enumerate(lengths):
        one = None if listed is None else listed[b]
        if seqlen_q and seqlen_k and (one is None or one.whole is None):
            blocks = (BLOCK, BLOCK) if one is None else (one.block_q, one.block_k)
            if blocks not in kinds:
                kinds[blocks] = function.blocks(batch, heads, *longest, *blocks)
            of_all = kinds[blocks]
            here = of_all[b : b + 1] if len(of_all) > 1 else of_all
            here = here[:, :, : -(-seqlen_q // blocks[0]), : -(-seqlen_k // blocks[1])]
            one = _within(one, here, seqlen_q, seqlen_k, blocks)
        found.append(one)
    return found


def _within(
    schedule: BlockSchedule | None, kinds: torch.Tensor, seqlen_q: int, seqlen_k: int, blocks: tuple[int, int]
) -> BlockSchedule:
    """The schedule's blocks that are seen, by `kinds` (batch or 1, heads or 1, num_q_blocks, num_k_blocks)."""
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": blocks[0], "block_k": blocks[1]}
    if schedule is None:
        return BlockSchedule.from_blocks(kinds > 0, whole=kinds == 2, **sizes)
    kept = kept_blocks(schedule)
    if 1 < kept.shape[1] < kinds.shape[1]:  # of KV heads, and the mask tells query heads apart
        kept = kept.repeat_interleave(kinds.shape[1] // kept.shape[1], 1)
    kinds = torch.where(kept, kinds, 0)
    lengths = {"lengths_q": schedule.lengths_q, "lengths_k": schedule.lengths_k}
    return BlockSchedule.from_blocks(kinds > 0, whole=kinds == 2, **sizes, **lengths)
