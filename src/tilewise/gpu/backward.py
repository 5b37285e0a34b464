"""Gradients on a card or in the emulator: `gradients` asks the kernels that the card runs.

backward_call.py says what a call is. Hopper is served by backward_hopper.py; other cards, and what that does not take,
by backward_mma.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewise.arch import card_of, hopper
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu import backward_hopper, backward_mma
from tilewise.gpu.backward_call import GradientCall as GradientCall
from tilewise.gpu.backward_call import Gradients as Gradients

WIDEST = max(backward_mma.WIDTHS)  # head dimension


def kernel_of(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int | None = None, *, dropout: bool = False
) -> str | None:
    """The kernel that gives gradients on a device, None if none does. value_dim: of V, by default as head_dim; dropout:
    of a call that drops weights."""
    if hopper(card_of(device)) and backward_hopper.serves(dtype, head_dim, value_dim=value_dim) and not dropout:
        return "backward"
    served = dtype in backward_mma.DTYPES and max(head_dim, value_dim or 0) <= WIDEST
    return "backward_mma" if served else None


def check_served(q: torch.Tensor, v: torch.Tensor, where: str) -> None:
    """NotImplementedError for q (…, D) and v (…, Dv) whose gradients no kernel gives. where: "cuda" or "emulator"."""
    if kernel_of(q.device, q.dtype, q.shape[-1], v.shape[-1]) is None:
        instead = 'backend="cpu"' if where == "emulator" else ".cpu() tensors"
        raise NotImplementedError(
            "an input requires gradients, and backward kernels take bfloat16, float16 and float32 with head_dim up to "
            f"{WIDEST}, got {q.dtype}, {q.shape[-1]} of q and {v.shape[-1]} of v; use {instead}, or "
            "call it under torch.no_grad()"
        )


def gradients(call: GradientCall, **emulated: Any) -> Gradients:
    """The gradients of a call's q, k, v and sinks, on the current stream. emulated: options of emulator.launch."""
    head_dim, value_dim = call.q.shape[-1], call.v.shape[-1]
    scored = call.function is not None and call.function.scores
    served = not scored and backward_hopper.serves(call.q.dtype, head_dim, call.scores, value_dim)
    if served and hopper(card_of(call.q.device)):
        return backward_hopper.gradients(call, **emulated)
    if value_dim != head_dim:  # by mma.sync there is one for both: zeros add nothing to any product
        widest = max(head_dim, value_dim)
        even: Any = {name: _filled(getattr(call, name), widest) for name in ("q", "k", "v", "o", "d_o")}
        d_q, d_k, d_v, d_sinks = backward_mma.gradients(replace(call, **even), **emulated)
        d_q, d_k = (x[..., :head_dim].contiguous() for x in (d_q, d_k))
        return Gradients(d_q, d_k, d_v[..., :value_dim].contiguous(), d_sinks)
    return backward_mma.gradients(call, **emulated)


def _filled(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def specs(card: str = "sm_90a", *, every: bool = False) -> list[KernelSpec]:
    """The kernels as users of a card get them: bfloat16 and head dimension 128, or `every` one."""
    return (backward_hopper.specs(every=every) if hopper(card) else []) + backward_mma.specs(card, every=every)
