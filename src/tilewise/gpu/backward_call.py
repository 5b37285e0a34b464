"""What the backward kernels are asked for, and what they give: `GradientCall` and `Gradients`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.scores import Scores

if TYPE_CHECKING:
    from tilewise.functions import Function
    from tilewise.gpu.pattern import AnySchedule


@dataclass(frozen=True)
class GradientCall:
    """A forward call with its results, and the gradients of those. Everything is checked by the caller.

    Dense: q, o, d_o (B, Nq, Hq, D), k and v (B, Nk, Hkv, D), lse and d_lse (B, Hq, Nq) float32. Packed: q, o, d_o
    (total_q, Hq, D), k and v (total_k, Hkv, D), lse and d_lse (Hq, total_q); starts_q, starts_k (sequences + 1,) int32
    or int64 on the device, max_seqlens the longest query and key that they hold, or more. v, o and d_o may have another
    D than q and k. q, k, v, o and d_o have one dtype; any strides, but the last is 1. lse: natural, with sinks in it,
    −inf for rows that see no key.
    d_lse: None where no gradient came through the LSE. scores: with its tensors, sinks (Hq,) and slopes (B, Hq).
    ends: (total_k,) int32, of one packed sequence: the first query that does not see a key any more; positions:
    (total_q,) int32, what a window measures there. deterministic: the same bits in every run.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    d_o: torch.Tensor
    scores: Scores
    d_lse: torch.Tensor | None = None
    starts_q: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None
    max_seqlens: tuple[int, int] | None = None
    function: Function | None = None
    schedule: AnySchedule | None = None
    ends: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    deterministic: bool = False

    @property
    def packed(self) -> bool:
        return self.starts_q is not None


class Gradients(NamedTuple):
    """Of q, k and v, like them in shape and dtype and contiguous; of sinks, (Hq,) float32, None if there were none."""

    d_q: torch.Tensor
    d_k: torch.Tensor
    d_v: torch.Tensor
    d_sinks: torch.Tensor | None
