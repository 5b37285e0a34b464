"""Gradients on a card or in the emulator: `gradients` asks the kernels that the card runs.

backward_call.py says what a call is. Cards without wgmma are served by backward_mma.py, Hopper by backward_hopper.py.
"""

from __future__ import annotations

from typing import Any

from tilewise.arch import card_of, hopper
from tilewise.gpu import backward_hopper
from tilewise.gpu.backward_call import GradientCall as GradientCall
from tilewise.gpu.backward_call import Gradients as Gradients


def gradients(call: GradientCall, **emulated: Any) -> Gradients:
    """The gradients of a call's q, k, v and sinks, on the current stream. emulated: options of emulator.launch."""
    card, head_dim = card_of(call.q.device), call.q.shape[-1]
    if hopper(card) and call.q.dtype in backward_hopper.DTYPES and head_dim <= max(backward_hopper.TILINGS):
        return backward_hopper.gradients(call, **emulated)
    raise NotImplementedError(
        f"{card} has no backward kernel for {call.q.dtype} and head_dim {head_dim}; use CPU tensors"
    )
