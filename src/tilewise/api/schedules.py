"""Which blocks of queries and keys a mask function leaves: a BlockSchedule to look at, keep and pass on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch

from tilewise import checks, functions
from tilewise.arguments import Schedules
from tilewise.functions import Function
from tilewise.gpu import kinds
from tilewise.graphs import outside
from tilewise.plan.blocks import Kinds, kept_blocks
from tilewise.plan.schedule import BlockSchedule
from tilewise.plan.schedule_grid import check_geometry

BLOCK = 128  # rows and keys of a block where nobody says


@outside
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
    sizes = (B, H, Nq, Nk, block_q, block_k)
    (_known_sizes if all(type(n) is int for n in sizes) else _check_sizes)(*sizes)
    if mask is None:
        raise TypeError("mask must be a function (b, h, q, k) -> bool, got None")
    function = functions.of(mask, None)
    where = function.tensors[0].device if function.tensors else torch.device("cpu")
    if device is not None:
        where = device if isinstance(device, torch.device) else torch.device(device)
        where = where if where.index is not None else torch.empty(0, device=where).device  # with its number
    for x in function.tensors:
        if x.device != where:
            raise ValueError(f"mask must capture tensors on {where}, got one of shape {tuple(x.shape)} on {x.device}")
    if where.type == "cuda":
        return kinds.schedule_of(function, B, H, Nq, Nk, block_q, block_k, where)
    found = _kinds(function, B, H, Nq, Nk, block_q, block_k)
    geometry = {"seqlen_q": Nq, "seqlen_k": Nk, "block_q": block_q, "block_k": block_k}
    return BlockSchedule.from_blocks(found > 0, whole=found == 2, **geometry)


def _check_sizes(B: Any, H: Any, Nq: Any, Nk: Any, block_q: Any, block_k: Any) -> None:
    for name, size, least in (("B", B, 1), ("H", H, 1), ("Nq", Nq, 0), ("Nk", Nk, 0)):
        checks.integer(name, size, least)
    check_geometry(Nq, Nk, block_q, block_k)


_known_sizes = lru_cache(maxsize=256)(_check_sizes)  # plain ints that were right before


def _kinds(function: Function, batch: int, heads: int, *sizes: int) -> torch.Tensor:
    """What `function.blocks` tells, for one sequence and one head where the mask is the same for all."""
    return function.blocks(batch if "b" in function.uses else 1, heads if "h" in function.uses else 1, *sizes)


def together(
    schedule: BlockSchedule | None, function: Function | None, batch: int, heads: int, seqlen_q: int, seqlen_k: int
) -> BlockSchedule | Kinds | None:
    """What a call's schedule and its mask function leave of the blocks, for the CPU."""
    if function is None or not function.masks:
        return schedule
    return _within(schedule, lambda *blocks: _kinds(function, batch, heads, seqlen_q, seqlen_k, *blocks))


def together_packed(
    schedules: Schedules, function: Function | None, starts_q: Sequence[int], starts_k: Sequence[int], heads: int
) -> list[BlockSchedule | Kinds | None] | None:
    """The same for each of the packed sequences; None if no sequence has a schedule."""
    batch = len(starts_q) - 1
    listed = [schedules] * batch if isinstance(schedules, BlockSchedule) else list(schedules or [None] * batch)
    if function is None or not function.masks:
        return None if schedules is None else list(listed)
    lengths = [(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in zip(pairwise(starts_q), pairwise(starts_k), strict=True)]
    longest = [max(n) for n in zip(*lengths, strict=True)]

    @lru_cache
    def of_longest(block_q: int, block_k: int) -> torch.Tensor:
        return _kinds(function, batch, heads, *longest, block_q, block_k)

    def of(b: int, block_q: int, block_k: int) -> torch.Tensor:
        kinds = of_longest(block_q, block_k)  # which serve shorter sequences as well
        kinds = kinds[b : b + 1] if len(kinds) > 1 else kinds
        return kinds[:, :, : -(-lengths[b][0] // block_q), : -(-lengths[b][1] // block_k)]

    return [_within(one, partial(of, b)) if all(lengths[b]) else None for b, one in enumerate(listed)]


def _within(schedule: BlockSchedule | None, kinds_of: Callable[[int, int], torch.Tensor]) -> Kinds:
    """kinds_of: what a mask function makes of blocks of some size, as `Kinds` has it."""
    if schedule is None:
        return Kinds(kinds_of(BLOCK, BLOCK).numpy(), BLOCK, BLOCK)
    blocks, kept = (schedule.block_q, schedule.block_k), kept_blocks(schedule)
    if schedule.whole is not None:
        kinds = kept.to(torch.int8) + kept_blocks(schedule, schedule.whole)
    else:
        kinds = kinds_of(*blocks)
        if 1 < kept.shape[1] < kinds.shape[1]:  # of KV heads, and the mask tells query heads apart
            kept = kept.repeat_interleave(kinds.shape[1] // kept.shape[1], 1)
        kinds = torch.where(kept, kinds, 0)
    return Kinds(kinds.numpy(), *blocks, schedule.lengths_q, schedule.lengths_k)


def past_lengths(schedules: Schedules, starts_k: Sequence[int]) -> torch.Tensor | None:
    """(total_k,) bool: the keys of sequences end to end that lie past their block's length; None if there are none.

    Their memory may hold anything, and on the CPU 0 · NaN is NaN as well.
    """
    batch = len(starts_k) - 1
    listed = [schedules] * batch if schedules is None or isinstance(schedules, BlockSchedule) else schedules
    if all(one is None or one.lengths_k is None for one in listed):
        return None
    found = torch.zeros(starts_k[-1], dtype=torch.bool, device="cpu")
    for b, one in enumerate(listed):
        if one is not None and one.lengths_k is not None:
            lengths = one.lengths_k[b if len(one.lengths_k) > 1 else 0]
            place = torch.arange(starts_k[b + 1] - starts_k[b], device="cpu")
            found[starts_k[b] : starts_k[b + 1]] = place % one.block_k >= lengths[place // one.block_k]
    return found
