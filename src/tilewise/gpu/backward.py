"""Gradients on a card or in the emulator: `gradients` asks the kernels that the card runs.

backward_call.py says what a call is. Cards without wgmma are served by backward_mma.py, Hopper by backward_hopper.py.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewise.arch import card_of, hopper
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu import backward_hopper
from tilewise.gpu.backward_call import GradientCall as GradientCall
from tilewise.gpu.backward_call import Gradients as Gradients


def kernel_of(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The kernel that gives gradients on a device, None if none does."""
    card = card_of(device)
    if hopper(card) and dtype in backward_hopper.DTYPES and head_dim <= max(backward_hopper.TILINGS):
        return "backward"
    return None


def gradients(call: GradientCall, **emulated: Any) -> Gradients:
    """The gradients of a call's q, k, v and sinks, on the current stream. emulated: options of emulator.launch."""
    device, dtype, head_dim = call.q.device, call.q.dtype, call.q.shape[-1]
    if call.function is not None and call.function.scores:
        raise NotImplementedError("score functions have no gradients on GPUs; use CPU tensors for them")
    if kernel_of(device, dtype, head_dim) is None:
        raise NotImplementedError(
            f"{card_of(device)} has no backward kernel for {dtype} and head_dim {head_dim}; use CPU tensors"
        )
    return backward_hopper.gradients(call, **emulated)


def specs(card: str = "sm_90a", *, every: bool = False) -> list[KernelSpec]:
    """The kernels as users of a card get them: bfloat16 and head dimension 128, or `every` one."""
    return backward_hopper.specs(every=every) if hopper(card) else []
