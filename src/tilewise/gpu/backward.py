"""Gradients on a card or in the emulator: `gradients` asks the kernels that the card runs.

backward_call.py says what a call is. Cards without wgmma are served by backward_mma.py, Hopper by backward_hopper.py.
"""

from __future__ import annotations

from typing import Any

from tilewise.arch import card_of
from tilewise.gpu.backward_call import GradientCall as GradientCall
from tilewise.gpu.backward_call import Gradients as Gradients


def gradients(call: GradientCall, **emulated: Any) -> Gradients:
    """The gradients of a call's q, k, v and sinks, on the current stream. emulated: options of emulator.launch."""
    raise NotImplementedError(f"{card_of(call.q.device)} has no backward kernels; use the CPU")
