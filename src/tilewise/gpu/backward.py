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


def kernel_of(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The kernel that gives gradients on a device, None if none does."""
    if hopper(card_of(device)) and backward_hopper.serves(dtype, head_dim):
        return "backward"
    served = dtype in backward_mma.DTYPES and head_dim <= max(backward_mma.WIDTHS)
    return "backward_mma" if served else None


def check_served(q: torch.Tensor, v: torch.Tensor, where: str) -> None:
    """NotImplementedError for q (…, D) and v (…, Dv) whose gradients no kernel gives. where: "cuda" or "emulator"."""
    if kernel_of(q.device, q.dtype, max(q.shape[-1], v.shape[-1])) is None:
        instead = 'backend="cpu"' if where == "emulator" else ".cpu() tensors"
        raise NotImplementedError(
            "an input requires gradients, and backward kernels take bfloat16, float16 and float32 with head_dim up to "
            f"{max(backward_mma.WIDTHS)}, got {q.dtype}, {q.shape[-1]} of q and {v.shape[-1]} of v; use {instead}, or "
            "call it under torch.no_grad()"
        )


def gradients(call: GradientCall, **emulated: Any) -> Gradients:
    """The gradients of a call's q, k, v and sinks, on the current stream. emulated: options of emulator.launch.

    Where the head dimensions of q and v differ, the smaller one is filled up with zeros.
    """
    dims = call.q.shape[-1], call.v.shape[-1]
    if dims[0] != dims[1]:
        alike: dict[str, Any] = {name: _widened(getattr(call, name), max(dims)) for name in ("q", "k", "v", "o", "d_o")}
        found = gradients(replace(call, **alike), **emulated)
        d_q, d_k, d_v = (x[..., :dim].contiguous() for x, dim in zip(found[:3], (dims[0], *dims), strict=True))
        return Gradients(d_q, d_k, d_v, found.d_sinks)
    card, head_dim = card_of(call.q.device), call.q.shape[-1]
    scored = call.function is not None and call.function.scores
    if hopper(card) and not scored and backward_hopper.serves(call.q.dtype, head_dim, call.scores):
        return backward_hopper.gradients(call, **emulated)
    return backward_mma.gradients(call, **emulated)


def _widened(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    missing = head_dim - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def specs(card: str = "sm_90a", *, every: bool = False) -> list[KernelSpec]:
    """The kernels as users of a card get them: bfloat16 and head dimension 128, or `every` one."""
    return (backward_hopper.specs(every=every) if hopper(card) else []) + backward_mma.specs(card, every=every)
