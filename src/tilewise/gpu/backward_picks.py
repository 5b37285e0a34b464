"""What a block schedule and functions mean for the backward: the arguments of kernels/backward/picks.cuh, and texts.

A score function goes to the kernel twice: as it is, and its derivative as a function like it, under another name.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tilewise.functions.derivative import slope_of
from tilewise.gpu.abi import FAR, Divisor, NoFunctionArgs
from tilewise.gpu.backward_call import GradientCall

if TYPE_CHECKING:
    from tilewise.gpu.pattern import AnySchedule

SLOPE = "UserSlope"


class PickArgs(ctypes.Structure):
    """backward/picks.cuh: Picks."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("kept", "whole", "lengths_k")),
        *((n, ctypes.c_int64) for n in ("kept_batch", "lengths_k_batch")),
        *((n, ctypes.c_int) for n in ("kept_head", "kept_row", "q_blocks", "k_blocks", "left")),
        *((n, Divisor) for n in ("heads_each", "block_q", "block_k")),
    ]


@dataclass(frozen=True)
class Picked:
    """A call's schedule and functions as the kernel takes them: its arguments, the functions' texts, what it reads."""

    args: tuple[ctypes.Structure, ctypes.Structure, ctypes.Structure]
    function: str = ""
    slope: str = ""
    picked: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, call: GradientCall) -> Picked:
        function, schedule = call.function, call.schedule
        read: dict[str, torch.Tensor] = {}
        picks = PickArgs() if schedule is None else _picks(schedule, call.q.shape[-2], read)
        picked = schedule is not None or call.positions is not None
        if call.positions is not None:
            left = call.scores.window[0]
            picks.left = FAR if left is None else min(left, FAR)
        if function is None:
            return cls((picks, NoFunctionArgs(), NoFunctionArgs()), picked=picked, tensors=read)
        read |= {f"captured {n}": x for n, x in enumerate(function.tensors)}
        picked = picked or function.masks
        text = function.text(_sizes(call))
        if not function.scores:
            return cls((picks, function.arguments(), NoFunctionArgs()), text, "", picked, read)
        slope = slope_of(function)
        renamed = re.sub(r"\bUserFunction\b", SLOPE, slope.text(_sizes(call)))
        return cls((picks, function.arguments(), slope.arguments()), text, renamed, picked, read)


def _sizes(call: GradientCall) -> tuple[int, int, int, int]:
    """(sequences, query heads, longest query, longest key)."""
    sequences = len(call.q) if call.starts_q is None else len(call.starts_q) - 1
    return sequences, call.q.shape[-2], call.q.shape[-3], call.k.shape[-3]


def _picks(schedule: AnySchedule, heads: int, read: dict[str, torch.Tensor]) -> PickArgs:
    bits = schedule.bits
    read["schedule"] = bits
    picks = PickArgs(kept=bits.data_ptr(), kept_row=bits.stride(2), q_blocks=bits.shape[2])
    picks.k_blocks = schedule.num_k_blocks
    picks.kept_batch = bits.stride(0) if bits.shape[0] > 1 else 0
    picks.kept_head = bits.stride(1) if bits.shape[1] > 1 else 0
    picks.heads_each = Divisor.by(heads // bits.shape[1])
    picks.block_q, picks.block_k = Divisor.by(schedule.block_q), Divisor.by(schedule.block_k)
    if schedule.whole is not None:
        picks.whole = schedule.whole.data_ptr()
        read["schedule whole"] = schedule.whole
    if schedule.lengths_k is not None:
        lengths = schedule.lengths_k
        picks.lengths_k, picks.lengths_k_batch = lengths.data_ptr(), lengths.stride(0) if len(lengths) > 1 else 0
        read["schedule lengths"] = lengths
    return picks
